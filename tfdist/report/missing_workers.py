"""Finds the workers that were missing from exchanges, and the last position of each worker, from their events.

Pure functions, without files, clocks and processes.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.events.event_file import ASKED, EXCHANGE, LOST_PEER, EventFile
from tfdist.events.phase_names import OWN_LOOP

WAITS = (EXCHANGE, "the beginning of a call", "agreement on a backup", "waiting for the chief")
"""Phases in which a worker waits for its peers."""


@dataclasses.dataclass(frozen=True)
class LastPosition:
    """Where a worker was when its events were written.

    Attributes:
      phase: Its phase, such as "input"; `None` outside of calls of Keras.
      call: Name of the call of Keras; `None` outside of calls.
      step: Number of training steps that it had finished; `None` if it is not known.
      seconds: How long it had done nothing that an event shows.
      error: Name of the exception with which a step of its had failed.
    """

    phase: str | None
    call: str | None
    step: int | None
    seconds: float
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class MissedExchange:
    """An exchange for which a worker waited in vain.

    Attributes:
      group: Key of the group of replicas.
      key: Key of the exchange in the group.
      bytes: Number of bytes that each worker sends to a peer.
      step: Number of training steps that the waiting workers had finished; `None` if it is not known.
      waiting: The waiting workers, each with its seconds.
      absent: The workers that had not begun the exchange, as far as known.
      unheard: The workers that had begun it, but of which some bytes had not arrived at a waiting worker.
      workers: The workers that take part in it; empty for all.
    """

    group: int
    key: int
    bytes: int
    step: int | None
    waiting: Mapping[int, float]
    absent: Sequence[int]
    unheard: Sequence[int] = ()
    workers: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class LastExchange:
    """The last exchange in which a worker's part arrived at a peer.

    Attributes:
      peer: The peer.
      group: Key of the group of replicas.
      key: Key of the exchange in its group.
      step: Number of training steps that the peer had finished; `None` if it is not known.
      seconds: How long before the peer wrote its events the exchange was complete; `None` if it was not.
    """

    peer: int
    group: int
    key: int
    step: int | None
    seconds: float | None


def last_position(file: EventFile) -> LastPosition:
    """Returns where a worker was when its events were written."""
    header = file.header
    moments = [event.ns for event in file.events[-1:]]
    moments += [each["since"] for each in _pending(file) if each["since"] is not None]
    idle = file.seconds_before(max(moments)) if moments else header["time"] - header.get("start", header["time"])
    runs = [event for event in file.events if event.kind == "run"]
    error = runs[-1].details.get("error") if runs and header.get("phase") is None else None
    return LastPosition(header.get("phase"), header.get("call"), _step_of(file), max(idle, 0.0), error)


def _step_of(file: EventFile, step: int | None = None) -> int | None:
    """Returns the finished steps of a worker, or those at an event. In a loop of its own nothing may count them."""
    known = int(file.header.get("step") or 0) if step is None else step
    return None if not known and file.header.get("phase") == OWN_LOOP else known


def missed_exchanges(files: Mapping[int, EventFile]) -> list[MissedExchange]:
    """Returns the exchanges for which workers waited, the one that has lasted longest first.

    The workers may have written their events at different times, at the request of a user. A worker that has taken part
    in an exchange meanwhile, or that wrote its events before and then worked on, is not missing.

    Args:
      files: The events of each worker that has written some.
    """
    waited: dict[tuple[int, int], dict[int, Mapping[str, Any]]] = {}
    for worker, file in files.items():
        for each in _pending(file):
            if each["since"] is not None:
                waited.setdefault((each["group"], each["key"]), {})[worker] = each
    missed = []
    for (group, key), by_worker in waited.items():
        begin = min(_moment(files[worker], each["since"]) for worker, each in by_worker.items())
        lacking = {
            peer
            for each in by_worker.values()
            for peer in each["missing"]
            if _takes_part(peer, each) and (peer not in files or not _works_on(files[peer], group, key, begin))
        }
        if lacking:
            missed.append(
                MissedExchange(
                    group=group,
                    key=key,
                    bytes=max(each["bytes"] for each in by_worker.values()),
                    step=max(steps) if (steps := _known_steps(files, by_worker)) else None,
                    waiting={worker: files[worker].seconds_before(each["since"]) for worker, each in by_worker.items()},
                    absent=sorted(lacking - by_worker.keys()),
                    unheard=sorted(lacking & by_worker.keys()),
                    workers=next((members for each in by_worker.values() if (members := _members_of(each))), ()),
                )
            )
    return sorted(missed, key=lambda each: (-max(each.waiting.values()), each.group, each.key))


def held_up(missed: Sequence[MissedExchange]) -> dict[int, list[int]]:
    """Returns the workers that were missing from an exchange only because they waited in another one, each with whom.

    The replicas of a group exchange among themselves, and then with those of other groups. So the other groups wait for
    workers that wait for the missing one. Empty if all missing workers wait for each other.
    """
    absent = {worker for each in missed for worker in each.absent}
    waits: dict[int, set[int]] = {}
    for each in missed:
        for worker in absent & each.waiting.keys():
            waits.setdefault(worker, set()).update(each.absent)
    held = {worker: sorted(peers) for worker, peers in waits.items() if peers}
    return held if absent - held.keys() else {}


def _members_of(entry: Mapping[str, Any]) -> Sequence[int]:
    """Returns the workers that take part in an exchange; empty for all, and in damaged entries."""
    members = entry.get("workers")
    is_known = isinstance(members, list | tuple) and all(isinstance(each, int) for each in members)
    return tuple(members) if is_known and members else ()


def _takes_part(worker: int, entry: Mapping[str, Any]) -> bool:
    members = _members_of(entry)
    return not members or worker in members


def _known_steps(files: Mapping[int, EventFile], workers: Iterable[int]) -> list[int]:
    return [step for worker in workers if (step := _step_of(files[worker])) is not None]


def _works_on(file: EventFile, group: int, key: int, begin: float) -> bool:
    """Whether a worker has completed an exchange, or wrote its events before the exchange began and then worked on."""
    if file.header.get("why") == ASKED and file.header["time"] < begin:
        return True
    done = ((event.details.get("group"), event.details.get("key")) for event in file.events if event.kind == EXCHANGE)
    return (group, key) in done


def _moment(file: EventFile, ns: int) -> float:
    """Returns a moment of a worker, given on the monotonic clock of its host, in seconds since the epoch."""
    return float(file.header["time"]) - file.seconds_before(ns)


def last_exchange(files: Mapping[int, EventFile], worker: int) -> LastExchange | None:
    """Returns the last exchange in which the part of a worker arrived at one of its peers."""
    found = [
        (each.step or 0, float(file.header["time"]) - (each.seconds or 0), each)
        for peer, file in files.items()
        if peer != worker
        for each in _exchanges_with(peer, file, worker)
    ]
    return max(found, key=lambda each: each[:2])[2] if found else None


def _exchanges_with(peer: int, file: EventFile, worker: int) -> Iterator[LastExchange]:
    """Yields the last complete exchange of a peer, and the last incomplete one that only lacks other workers' parts."""
    for event in reversed(file.events):
        if event.kind == EXCHANGE and _takes_part(worker, event.details):
            group, key = (int(event.details.get(name, 0)) for name in ("group", "key"))
            yield LastExchange(peer, group, key, _step_of(file, event.step), file.seconds_before(event.ns))
            break
    for each in reversed(_pending(file)):
        if worker not in each["missing"] and _takes_part(worker, each):
            yield LastExchange(peer, each["group"], each["key"], _step_of(file), None)
            break


def elsewhere(files: Mapping[int, EventFile], workers: Sequence[int], culprit: int | None) -> list[int]:
    """Returns the workers that were elsewhere while others waited for all workers.

    Exchanges over TensorFlow's own collectives are not seen one by one. There, the phases of the workers tell.

    Args:
      files: The events of each worker that has written some.
      workers: All workers.
      culprit: The worker that has caused the failure, if it is known.
    """
    waiting = {worker for worker, file in files.items() if file.header.get("phase") in WAITS}
    peers = [file.header.get("peer") for file in files.values()]
    caused = {peer for peer in peers if isinstance(peer, int)} if culprit is None else {culprit}
    if not waiting or caused:
        return sorted(caused - waiting) if waiting else []
    # A worker that has lost a peer was stopped by that, wherever it was.
    stopped = {worker for worker, file in files.items() if file.header.get("why") == LOST_PEER}
    return sorted(set(workers) - waiting - stopped)


def _pending(file: EventFile) -> list[Mapping[str, Any]]:
    """Returns the incomplete exchanges in the first line of a file, without entries that are damaged."""
    entries = file.header.get("pending")
    return [each for each in entries if _is_whole(each)] if isinstance(entries, list) else []


def _is_whole(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("missing"), list):
        return False
    numbers = [entry.get(name) for name in ("group", "key", "bytes")]
    since = entry.get("since", "")
    return all(isinstance(each, int) for each in numbers) and (since is None or isinstance(since, int | float))
