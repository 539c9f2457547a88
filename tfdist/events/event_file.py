"""The file with the events of one worker: JSON lines with its position, its events and the stacks of its threads.

    {"format": 1, "worker": 1, "pid": 71, "time": 1764184083.1, "ns": 51200113, "why": "stall", "phase": "input", ...}
    {"ns": 51100871, "kind": "exchange", "step": 30, "since": 51100021, "key": 412, "bytes": 40960, "last": 0}
    {"thread": "MainThread", "calls": [["train.py", 31, "on_train_batch_end"], ["train.py", 40, "<module>"]]}

Does not load TensorFlow.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.events.event_buffer import Event
from tfdist.symlink_safe_file import write_whole

FORMAT = 1
START = "start"
"""Why the file of a worker that has begun was written. It has no events yet."""

ASKED = "asked"
"""Why the file was written after SIGUSR2."""

EXCHANGE = "exchange"
"""Why the file was written after an exchange of this worker had failed; also the kind of the events of exchanges."""

LOST_PEER = "lost peer"
"""Why the file was written after the process of a peer had ended."""

_DIGITS = 6

Call = tuple[str, int, str]
"""A call in a stack: file, line and function."""


@dataclasses.dataclass(frozen=True)
class EventFile:
    """The content of an event file.

    Attributes:
      header: The worker, the reason of the file, and the worker's position at that moment.
      events: The events, oldest first.
      stacks: By name of a thread, its calls, innermost first.
      damaged: Number of lines that could not be read.
    """

    header: Mapping[str, Any]
    events: Sequence[Event] = ()
    stacks: Mapping[str, Sequence[Call]] = dataclasses.field(default_factory=dict)
    damaged: int = 0

    @property
    def is_of_failure(self) -> bool:
        """Whether the worker has failed, stalled or lost a peer."""
        return self.header.get("why") not in (START, ASKED)

    def seconds_before(self, ns: int) -> float:
        """Returns how long before the file was written a moment was, given in nanoseconds on the monotonic clock."""
        return float(self.header["ns"] - ns) / 1e9


def write_events(
    path: pathlib.Path, header: Mapping[str, Any], events: Iterable[Event], stacks: Mapping[str, Sequence[Call]]
) -> None:
    """Writes an event file, completely or not at all.

    Raises:
      OSError: If the file cannot be written.
    """
    lines = [
        {"format": FORMAT, **header},
        *({"ns": each.ns, "kind": each.kind, "step": each.step, **each.details} for each in events),
        *({"thread": name, "calls": calls} for name, calls in stacks.items()),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(line, default=_plain) + "\n" for line in lines))


def read_header(path: pathlib.Path) -> Mapping[str, Any]:
    """Returns the first line of an event file; empty if the file is missing or damaged."""
    try:
        with path.open() as file:
            return _header(file.readline())
    except (OSError, ValueError):
        return {}


def read_events(path: pathlib.Path) -> EventFile:
    """Reads an event file. Leaves out lines that cannot be read, and counts them.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If the file is no event file.
    """
    with path.open(errors="replace") as file:
        header, *lines = file.read().splitlines() or [""]
    events, stacks, damaged = [], {}, 0
    for line in lines:
        try:
            content = json.loads(line)
            if "thread" in content:
                stacks[str(content["thread"])] = [(str(f), int(n), str(name)) for f, n, name in content["calls"]]
            else:
                events.append(
                    Event(int(content.pop("ns")), str(content.pop("kind")), int(content.pop("step")), content)
                )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged += 1
    return EventFile(_header(header), events, stacks, damaged)


def _header(line: str) -> Mapping[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("is no file of events of this version of tfdist")
    numbers = (header.get("worker"), header.get("ns"), header.get("time"))
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("has no worker or no time in its first line")
    return header


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it: an array of NumPy as a list, anything else as text."""
    if not hasattr(value, "tolist"):
        return str(value)
    values = value.tolist()
    return [round(each, _DIGITS) for each in values] if isinstance(values, list) else values
