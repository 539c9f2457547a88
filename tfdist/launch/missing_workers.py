"""Finds the workers that were missing from exchanges, and the last position of each worker, from their events.

Pure functions, without files, clocks and processes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.events.event_file import EXCHANGE, EventFile

WAITS = (EXCHANGE, "the beginning of a call", "agreement on a backup", "waiting for the chief")
"""Phases in which a worker waits for its peers."""


@dataclasses.dataclass(frozen=True)
class LastPosition:
    """Where a worker was when its events were written.

    Attributes:
      phase: Its phase, such as "input"; `None` outside of calls of Keras.
      call: Name of the call of Keras; `None` outside of calls.
      step: Number of training steps that it had finished.
      seconds: How long it had done nothing that an event shows.
      error: Name of the exception with which a step of its had failed.
    """

    phase: str | None
    call: str | None
    step: int
    seconds: float
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class MissedExchange:
    """An exchange for which a worker waited in vain.

    Attributes:
      group: Key of the group of replicas.
      key: Key of the exchange in the group.
      bytes: Number of bytes that each worker sends to a peer.
      step: Number of training steps that the waiting workers had finished.
      waiting: The waiting workers, each with its seconds.
      absent: The workers that had not begun the exchange, as far as known.
      unheard: The workers that had begun it, but of which some bytes had not arrived at a waiting worker.
    """

    group: int
    key: int
    bytes: int
    step: int
    waiting: Mapping[int, float]
    absent: Sequence[int]
    unheard: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class LastExchange:
    """The last exchange in which a worker's part arrived at a peer.

    Attributes:
      peer: The peer.
      key: Key of the exchange in its group.
      step: Number of training steps that the peer had finished.
      seconds: How long before the peer wrote its events the exchange was complete.
    """

    peer: int
    key: int
    step: int
    seconds: float


def last_position(file: EventFile) -> LastPosition:
    """Returns where a worker was when its events were written."""
    header = file.header
    moments = [event.ns for event in file.events[-1:]]
    moments += [each["since"] for each in _pending(file) if each["since"] is not None]
    idle = file.seconds_before(max(moments)) if moments else header["time"] - header.get("start", header["time"])
    runs = [event for event in file.events if event.kind == "run"]
    error = runs[-1].details.get("error") if runs and header.get("phase") is None else None
    return LastPosition(header.get("phase"), header.get("call"), int(header.get("step") or 0), max(idle, 0.0), error)


def missed_exchanges(files: Mapping[int, EventFile]) -> list[MissedExchange]:
    """Returns the exchanges for which workers waited, the earliest first.

    Args:
      files: The events of each worker that has written some.
    """
    waited: dict[tuple[int, int], dict[int, Mapping[str, Any]]] = {}
    for worker, file in files.items():
        for each in _pending(file):
            if each["since"] is not None:
                waited.setdefault((each["group"], each["key"]), {})[worker] = each
    missed = []
    for (group, key), by_worker in sorted(waited.items()):
        lacking = {peer for each in by_worker.values() for peer in each["missing"]}
        missed.append(
            MissedExchange(
                group=group,
                key=key,
                bytes=max(each["bytes"] for each in by_worker.values()),
                step=max(int(files[worker].header.get("step") or 0) for worker in by_worker),
                waiting={worker: files[worker].seconds_before(each["since"]) for worker, each in by_worker.items()},
                absent=sorted(lacking - by_worker.keys()),
                unheard=sorted(lacking & by_worker.keys()),
            )
        )
    return missed


def last_exchange(files: Mapping[int, EventFile], worker: int) -> LastExchange | None:
    """Returns the last exchange in which the part of a worker arrived at one of its peers."""
    latest: tuple[float, LastExchange] | None = None
    for peer, file in files.items():
        complete = [event for event in file.events if event.kind == EXCHANGE] if peer != worker else []
        if complete:
            event, seconds = complete[-1], file.seconds_before(complete[-1].ns)
            found = LastExchange(peer, int(event.details.get("key", 0)), event.step, seconds)
            if latest is None or file.header["time"] - seconds > latest[0]:
                latest = file.header["time"] - seconds, found
    return latest[1] if latest else None


def blamed(files: Mapping[int, EventFile], workers: Sequence[int]) -> list[int]:
    """Returns the workers for which others waited: those absent from exchanges, or else those that were elsewhere.

    Exchanges over TensorFlow's own collectives are not seen one by one. There, the phases of the workers tell.

    Args:
      files: The events of each worker that has written some.
      workers: All workers.
    """
    absent = {worker for each in missed_exchanges(files) for worker in each.absent}
    if absent:
        return sorted(absent)
    waiting = {worker for worker, file in files.items() if file.header.get("phase") in WAITS}
    return sorted(set(workers) - waiting) if waiting else []


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
