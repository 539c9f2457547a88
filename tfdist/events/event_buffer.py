"""The newest events of this worker, such as its steps and exchanges, in memory.

Does not load TensorFlow.
"""

import collections
import time
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that this worker has done or noticed.

    Attributes:
      ns: Time of the event, at its end if it lasted, in nanoseconds on the monotonic clock of this host.
      kind: Kind of the event, such as "step"; docs/reference/run_directory.md has all kinds.
      step: Number of training steps that this worker had finished, with those before the commit that it has restored.
      details: Other values, by name. `since` is the time at which the event began.
    """

    ns: int
    kind: str
    step: int
    details: dict[str, Any]


class EventBuffer:
    """A ring buffer of events, to which all threads add. An event costs microseconds, and a call of a function if off.

    Attributes:
      is_on: Whether events are kept.
      step: Number of training steps that this worker has finished, with those before the commit that it has restored.
      steps_before: How many of them this strategy has not counted, since an earlier attempt has made them.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.step = self.steps_before = 0
        self._events: collections.deque[tuple[int, str, int, dict[str, Any]]] = collections.deque(maxlen=0)

    def start(self, size: int) -> None:
        """Keeps the newest `size` events from now on."""
        self._events = collections.deque(maxlen=size)
        self.is_on = size > 0

    def note(self, kind: str, **details: Any) -> None:
        """Adds an event of this moment."""
        if self.is_on:
            # One append needs no lock, and a plain tuple less time than an `Event`.
            self._events.append((time.monotonic_ns(), kind, self.step, details))

    def count(self, step: int) -> None:
        """Records that a training step has ended, by the number that the strategy gives it."""
        self.step = self.steps_before + step

    def count_from(self, step: int) -> None:
        """Numbers the next training step `step + 1`, as commits do, and with it all later ones."""
        self.steps_before += step - self.step
        self.step = step

    def copy(self) -> list[Event]:
        """Returns the events, oldest first."""
        # `list` runs no Python code, so no thread can add an event meanwhile.
        return [Event(*each) for each in list(self._events)]


EVENTS = EventBuffer()
"""The events of this process."""
