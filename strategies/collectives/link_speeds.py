"""Finds the slowest link from this worker to a peer, by the counters of the kernel."""

import collections
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from tfdist.faults.straggler_policy import WorkerLinks
from tfdist.strategies.collectives.link_counts import LinkCounts, LinkRate, rate_between

_AT_ONCE = 8  # Connections to look at after a step. A look is a call of the system.
_KEPT = 5  # Newest rates of a link. The largest counts, since other programs may have slowed a transfer down.
_LEAST_OF_LINK = 3  # Number of these rates that the link must have limited.


class LinkSpeeds:
    """The speeds of the links from this worker to its peers, in the last steps.

    Args:
      peers: Numbers of the peers.
      counts: Returns the present counters of the connection to a peer.
    """

    def __init__(self, peers: Sequence[int], counts: Callable[[int], LinkCounts | None]) -> None:
        self._counts = counts
        self._turns = itertools.cycle(list(peers))
        self._at_once = min(_AT_ONCE, len(peers))
        self._before: dict[int, tuple[int, LinkCounts]] = {}
        self._rates: dict[int, collections.deque[LinkRate | None]] = {}
        self._bytes: dict[int, float] = {}  # Of a step.

    def look(self, step: int) -> None:
        """Looks at the next few connections, at the end of training step number `step`."""
        for peer in itertools.islice(self._turns, self._at_once):
            now, before = self._counts(peer), self._before.get(peer)
            if now is None:
                continue
            self._before[peer] = step, now
            if before is not None and step > before[0]:
                self._bytes[peer] = (now.sent - before[1].sent) / (step - before[0])
                rates = self._rates.setdefault(peer, collections.deque(maxlen=_KEPT))
                rates.append(rate_between(before[1], now))

    def slowest(self) -> WorkerLinks | None:
        """Returns the slowest link of this worker; `None` if too little is known."""
        return slowest_of(self._rates, self._bytes)


def slowest_of(
    rates: Mapping[int, Sequence[LinkRate | None]], bytes_of_step: Mapping[int, float]
) -> WorkerLinks | None:
    """Returns the slowest link.

    Args:
      rates: By peer, the newest rates of its link; `None` for an interval with too little data.
      bytes_of_step: By peer, the bytes that a step sends to it.
    """
    known = {peer: [rate for rate in each if rate is not None] for peer, each in rates.items()}
    known = {peer: each for peer, each in known.items() if len(each) >= _LEAST_OF_LINK}
    if not known:
        return None
    # A short burst may be faster than the link, so it only tells that a link is fast.
    best = {peer: max(rate.rate for rate in each) for peer, each in known.items()}
    exact = {peer: [rate.rate for rate in each if rate.is_of_link] for peer, each in known.items()}
    of_link = {peer: max(each) for peer, each in exact.items() if len(each) >= _LEAST_OF_LINK}
    slowest = min(of_link, key=of_link.__getitem__, default=None)
    others = [rate for peer, rate in best.items() if peer != slowest]
    if slowest is None:
        return WorkerLinks(None, 0.0, statistics.median(others), 0.0)
    rate = of_link[slowest]
    return WorkerLinks(slowest, rate, statistics.median(others or [rate]), bytes_of_step[slowest] / rate)
