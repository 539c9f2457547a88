"""How long a fragment of the weights travels, and how long steps wait for it."""

import threading
import time
from collections.abc import Callable

_LEAST_SECONDS, _LEAST_PART = 1.0, 0.05  # Shorter waits, and smaller parts of an epoch, are not worth a warning.


class TravelTimes:
    """The times of one fragment, from its departures to its averages. Several threads may call all methods.

    The first exchange does not count, since TensorFlow compiles its operations meanwhile.

    Args:
      clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._departed: float | None = None  # The time of the departure, while the fragment travels.
        self._awaited: float | None = None  # Since when a step waits for it.
        self._counts = False
        self._longest = self._waited = 0.0

    def depart(self) -> None:
        """Notes that the fragment departs."""
        with self._lock:
            self._departed, self._awaited = self._clock(), None

    def begin_wait(self) -> None:
        """Notes that a step needs the averages, which may be there already."""
        with self._lock:
            if self._departed is not None:
                self._awaited = self._clock()

    def end(self) -> None:
        """Notes that the averages are there."""
        with self._lock:
            now = self._clock()
            if self._counts and self._departed is not None:
                self._longest = max(self._longest, now - self._departed)
                self._waited += 0.0 if self._awaited is None else now - self._awaited
            self._departed, self._awaited, self._counts = None, None, True

    def take(self) -> tuple[float, float]:
        """Returns the longest time from departure to averages, and the time that steps waited, since the last call."""
        with self._lock:
            taken, self._longest, self._waited = (self._longest, self._waited), 0.0, 0.0
            return taken


def is_long(waited: float, seconds: float) -> bool:
    """Whether steps that waited some seconds in an epoch of `seconds` are worth a warning."""
    return waited >= max(_LEAST_SECONDS, _LEAST_PART * seconds)
