"""Policy: which workers and links are slow, and why, by the times of recent steps. No clock, process or network.

A few steps at a time form a block. A worker is slow once it was slow in most of the last blocks. For computation the
number of blocks grows with the variation from step to step. So a single long step makes no verdict. Nor does a second
job on the machine that takes a core from one worker now and from another later. A worker has one verdict for each
cause, whatever links it is about, so that a verdict stays while the slowest link changes. Does not load TensorFlow.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfdist.events.straggler_file import CALLBACK, COMPUTATION, INPUT, LINK

_LEAST_BLOCKS, _MOST_BLOCKS = 4, 32  # Blocks that are looked at, on a quiet and on a noisy machine.
_NEEDED = 0.75  # Part of these blocks in which a worker must be slow.
_QUIET = 0.1  # Jitter of a quiet machine. More jitter needs more blocks, as for the mean of noisy numbers.
_CLEAR = 2.0  # Times slower; beyond, the jitter of the other workers counts less.
_LEAST_SECONDS = 1e-9
_FEWER_ROWS = 0.8  # Rows of a worker, as a part of the median of the others, that count as fewer.


class Link(NamedTuple):
    """A connection from a worker to another; `None` in place of one of them means all peers."""

    sender: int | None
    receiver: int | None


class Straggler(NamedTuple):
    """A slow worker, with the cause.

    Attributes:
      cause: `COMPUTATION`, `INPUT`, `LINK` or `CALLBACK`.
      worker: The slow worker; for a link, the one that sends, or the receiver if its links from all peers are slow.
    """

    cause: str
    worker: int


class Slow(NamedTuple):
    """How slow a worker is in a block of steps.

    Attributes:
      amount: See `StragglerRecord`.
      link: The slow link or links; `None` for other causes.
    """

    amount: float
    link: Link | None = None


@dataclasses.dataclass(frozen=True)
class WorkerLinks:
    """The links from a worker to its peers.

    Attributes:
      peer: Receiver of the slowest link; `None` if no link limits the exchanges.
      rate: Bytes per second of this link while it is busy; 0 without a `peer`.
      typical: Median rate of the worker's other links; of the same link if it is the only one.
      seconds: Time in which the slowest link carries the bytes of a step; 0 without a `peer`.
    """

    peer: int | None
    rate: float
    typical: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Some successive training steps.

    Attributes:
      first, last: Numbers of its first and last step.
      seconds: Mean time of a step, without the longest time of a worker in Python between steps.
      rows: Rows by worker.
      compute: Mean compute time of a step by worker, without the longest and the shortest quarter of the steps.
      input: Mean time by worker in which it had no batch.
      jitter: By worker, how much the compute time changes from a step to the next: mean difference of logarithms.
      links: Links by worker; `None` if they are not known, or have carried little. Empty if none are known.
      outside: Time of a step by worker in callbacks and other Python code between steps, as a mean without the longest
        and the shortest quarter of the steps. Empty if it is not known.
      is_measured: Whether a `BalancedSharding` measures the workers, so that it will give slow ones fewer rows.
    """

    first: int
    last: int
    seconds: float
    rows: Sequence[float]
    compute: Sequence[float]
    input: Sequence[float]
    jitter: Sequence[float]
    links: Sequence[WorkerLinks | None] = ()
    outside: Sequence[float] = ()
    is_measured: bool = False


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a worker is slow in a block of steps.

    Attributes:
      computation: How many times slower than the median of the other workers, per row.
      computation_part: Part of a step for which the worker computes longer than this median.
      waiting: Part of a step in which the worker waits for its input, or is in Python code between steps.
      waiting_part: Part of a step for which it does so longer than the median of the others.
      link: Rate of a link, as a part of the median of the others.
      link_of_two: Likewise between two workers. There the only other link is the way back, which carries the
        acknowledgments of this one. Both then slow each other down.
      link_part: Part of a step in which this link carries the bytes of the step.
    """

    computation: float
    computation_part: float
    waiting: float
    waiting_part: float
    link: float
    link_of_two: float
    link_part: float


BEGINS = Limits(
    computation=1.5, computation_part=0.15, waiting=0.3, waiting_part=0.25, link=0.25, link_of_two=0.4, link_part=0.2
)
"""Limits for a verdict."""

GOES_ON = Limits(
    computation=1.25, computation_part=0.08, waiting=0.15, waiting_part=0.12, link=0.5, link_of_two=0.6, link_part=0.1
)
"""Limits below which a verdict ends. They are lower, so that verdicts do not come and go."""


@dataclasses.dataclass(frozen=True)
class StragglerVerdict:
    """A worker or link that is slow, or is no longer slow.

    Attributes:
      straggler: The worker, and the cause.
      amount: See `StragglerRecord`.
      since: The step since which it is slow.
      step: The last step before the verdict.
      link: The slow link or links; `None` for other causes.
      is_balanced: Whether a slow worker gets fewer rows, so that the others need not wait for it.
      may_balance: Whether a `BalancedSharding` is a remedy. It is none if shares already differ or follow the speed.
      is_over: Whether it is no longer slow, or `has_changed`.
      has_changed: Whether it is still slow, but `is_balanced` has changed. The next verdict has the new value.
    """

    straggler: Straggler
    amount: float
    since: int
    step: int
    link: Link | None = None
    is_balanced: bool = False
    may_balance: bool = True
    is_over: bool = False
    has_changed: bool = False


class StragglerJudge:
    """Finds slow workers in the blocks of steps that it is given. It knows the last blocks and the present verdicts.

    Attributes:
      verdicts: The present verdicts.
    """

    def __init__(self) -> None:
        self.verdicts: dict[Straggler, StragglerVerdict] = {}
        self._blocks: collections.deque[_Judged] = collections.deque(maxlen=_MOST_BLOCKS)
        self._count = 0  # Blocks so far.
        self._ended: dict[Straggler, int] = {}  # That number at the end of the last verdict.

    def add(self, block: Block) -> list[StragglerVerdict]:
        """Takes the newest block. Returns the verdicts that are over, and those that begin."""
        self._count += 1
        self._blocks.append(_Judged(block, slow_in(block, BEGINS), slow_in(block, GOES_ON)))
        ended = [held for held in self.verdicts.values() if self._is_over(held.straggler)]
        for verdict in ended:
            del self.verdicts[verdict.straggler]
            self._ended[verdict.straggler] = self._count
        changed = [held for held in self.verdicts.values() if self._has_changed(held)]
        begun = [self._changed(verdict) for verdict in changed]
        self.verdicts |= {verdict.straggler: verdict for verdict in begun}
        for straggler, slow in sorted(self._blocks[-1].slow.items(), key=_is_sender):
            if self._begins(straggler) and not self._is_told(slow.link):
                begun.append(self._verdict(straggler, slow.link))
                self.verdicts[straggler] = begun[-1]
        over = [dataclasses.replace(each, is_over=True, step=block.last) for each in ended]
        over += [dataclasses.replace(each, is_over=True, has_changed=True, step=block.last) for each in changed]
        return over + begun

    def _recent(self, straggler: Straggler) -> "tuple[list[_Judged], int]":
        """Returns the last blocks in which to look for a slow worker, and how many of them must be slow."""
        count = _LEAST_BLOCKS
        if straggler.cause == COMPUTATION:
            jitters = [each.block.jitter for each in self._blocks]
            own = statistics.fmean(each[straggler.worker] for each in jitters)
            others = statistics.fmean(_medians_of_others(each)[straggler.worker] for each in jitters)
            # Noise of the others is small beside a worker that computes many times as long.
            count = blocks_for(max(own, others * min(_CLEAR / self._usual_factor(straggler), 1.0)))
        since_end = self._count - self._ended.get(straggler, 0)
        return list(self._blocks)[-min(count, since_end) :] if since_end else [], math.ceil(_NEEDED * count)

    def _usual_factor(self, straggler: Straggler) -> float:
        """Returns how many times slower a worker is in the last few blocks, by their median; 1 where it is not slow."""
        recent = list(self._blocks)[-_LEAST_BLOCKS:]
        return statistics.median(each.slow[straggler].amount if straggler in each.slow else 1.0 for each in recent)

    def _begins(self, straggler: Straggler) -> bool:
        recent, needed = self._recent(straggler)
        return straggler not in self.verdicts and sum(straggler in each.slow for each in recent) >= needed

    def _is_told(self, link: Link | None) -> bool:
        """Whether a present verdict is about the links to the same worker, one of both being about those from all."""
        if link is None or link.receiver is None:
            return False
        held = [each.link for each in self.verdicts.values() if each.link and each.link.receiver == link.receiver]
        return bool(held) and (link.sender is None or any(each.sender is None for each in held))

    def _is_over(self, straggler: Straggler) -> bool:
        return self._in_most(lambda each: straggler not in each.still_slow)

    def _has_changed(self, verdict: StragglerVerdict) -> bool:
        if verdict.straggler.cause != COMPUTATION:
            return False
        worker, limits = verdict.straggler.worker, BEGINS if verdict.is_balanced else GOES_ON
        return self._in_most(lambda each: holds_up(each.block, worker, limits) == verdict.is_balanced)

    def _in_most(self, is_so: "Callable[[_Judged], bool]") -> bool:
        """Whether something is so in most of the last few blocks, however noisy the machine is."""
        return sum(map(is_so, list(self._blocks)[-_LEAST_BLOCKS:])) >= math.ceil(_NEEDED * _LEAST_BLOCKS)

    def _changed(self, verdict: StragglerVerdict) -> StragglerVerdict:
        """Returns the verdict about the same worker with the other `is_balanced`."""
        recent = [each for each in list(self._blocks)[-_LEAST_BLOCKS:] if verdict.straggler in each.still_slow]
        amount = statistics.median([each.still_slow[verdict.straggler].amount for each in recent] or [verdict.amount])
        return dataclasses.replace(
            verdict,
            amount=amount,
            since=recent[0].block.first if recent else self._blocks[-1].block.first,
            step=self._blocks[-1].block.last,
            is_balanced=not verdict.is_balanced,
            may_balance=_may_balance(self._blocks[-1].block),
        )

    def _verdict(self, straggler: Straggler, link: Link | None) -> StragglerVerdict:
        newest = self._blocks[-1].block
        found = [each for each in self._recent(straggler)[0] if straggler in each.slow]
        is_balanced = straggler.cause == COMPUTATION and not holds_up(newest, straggler.worker, GOES_ON)
        return StragglerVerdict(
            straggler,
            amount=statistics.median(each.slow[straggler].amount for each in found),
            since=found[0].block.first,
            step=newest.last,
            link=link,
            is_balanced=is_balanced,
            may_balance=_may_balance(newest),
        )


def _is_sender(found: tuple[Straggler, Slow]) -> bool:
    """Key that puts links from all peers to one worker before a link from one of these peers."""
    link = found[1].link
    return link is not None and link.sender is not None


def _may_balance(block: Block) -> bool:
    return not block.is_measured and min(block.rows) >= _FEWER_ROWS * max(block.rows)


def blocks_for(jitter: float) -> int:
    """Returns how many blocks to look at where compute times have this jitter from step to step."""
    return min(max(math.ceil(_LEAST_BLOCKS * (jitter / _QUIET) ** 2), _LEAST_BLOCKS), _MOST_BLOCKS)


class _Judged(NamedTuple):
    block: Block
    slow: Mapping[Straggler, Slow]
    still_slow: Mapping[Straggler, Slow]


def slow_in(block: Block, limits: Limits) -> dict[Straggler, Slow]:
    """Returns the slow workers of a block of steps."""
    if len(block.compute) < 2 or block.seconds <= 0:
        return {}
    found = [*_slow_computation(block, limits), *_slow_links(block, limits)]
    found += _waiting(INPUT, block.input, block.seconds, limits)
    found += _waiting(CALLBACK, block.outside, block.seconds + max(block.outside, default=0.0), limits)
    return dict(found)


def _slow_computation(block: Block, limits: Limits) -> Iterator[tuple[Straggler, Slow]]:
    per_row = [seconds / rows if rows else 0.0 for seconds, rows in zip(block.compute, block.rows, strict=True)]
    compute, rows = _medians_of_others(block.compute), _medians_of_others(block.rows)
    for worker, usual in enumerate(_medians_of_others(per_row)):
        if usual <= 0 or per_row[worker] < limits.computation * usual:
            continue
        factor = per_row[worker] / usual
        if block.compute[worker] - compute[worker] >= limits.computation_part * block.seconds:
            # Fewer rows take less time, but not in proportion: each step has a fixed part.
            factor = min(factor, block.compute[worker] / max(compute[worker], _LEAST_SECONDS))
            yield Straggler(COMPUTATION, worker), Slow(factor)
        elif block.rows[worker] < _FEWER_ROWS * rows[worker]:
            yield Straggler(COMPUTATION, worker), Slow(factor)


def holds_up(block: Block, worker: int, limits: Limits) -> bool:
    """Returns whether a worker computes longer than the others in each step, so that these wait."""
    excess = block.compute[worker] - _medians_of_others(block.compute)[worker]
    return excess >= limits.computation_part * block.seconds


def _waiting(cause: str, times: Sequence[float], seconds: float, limits: Limits) -> Iterator[tuple[Straggler, Slow]]:
    """Yields the workers that spend much longer than the others on something, of a step that takes `seconds`."""
    for worker, (own, others) in enumerate(zip(times, _medians_of_others(times), strict=True)):
        if own >= limits.waiting * seconds and own - others >= limits.waiting_part * seconds:
            yield Straggler(cause, worker), Slow(min(own / seconds, 1.0))


def _slow_links(block: Block, limits: Limits) -> Iterator[tuple[Straggler, Slow]]:
    found: dict[Link, float] = {}
    limit = limits.link if len(block.links) > 2 else limits.link_of_two
    known = [(worker, each) for worker, each in enumerate(block.links) if each is not None]
    if len(known) < 2:
        return
    typical = _medians_of_others([each.typical for _, each in known])
    for (worker, own), usual in zip(known, typical, strict=True):
        if own.peer is None or own.rate >= limit * usual or own.seconds < limits.link_part * block.seconds:
            continue
        are_all = len(block.links) > 2 and own.typical < limit * usual
        found[Link(worker, None if are_all else own.peer)] = own.rate / usual
    for link, amount in [*found.items(), *_joined(found, len(block.links))]:
        named = link.sender if link.sender is not None else link.receiver
        if named is not None:
            yield Straggler(LINK, named), Slow(amount, link)


def _joined(found: Mapping[Link, float], workers: int) -> Iterator[tuple[Link, float]]:
    """Yields the links from all peers to one worker, if each of them is slow."""
    receivers = collections.Counter(link.receiver for link in found if link.receiver is not None)
    for receiver, count in receivers.items():
        if workers > 2 and count == workers - 1:
            yield Link(None, receiver), statistics.median(found[each] for each in found if each.receiver == receiver)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Returns for each worker the median of the values of all other workers."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ordered = [values[worker] for worker in order]
    middle = (len(values) - 2) / 2  # The place of the median among the others, or between two places.
    places = math.floor(middle), math.ceil(middle)
    medians = [0.0] * len(values)
    for rank, worker in enumerate(order):
        medians[worker] = sum(ordered[place + (place >= rank)] for place in places) / 2
    return medians
