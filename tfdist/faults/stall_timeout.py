"""Computes how long a worker may make no progress before the watchdog ends the job as stalled."""

import collections
import math
import statistics
from typing import Any

from tfdist.events.phase_names import BUILDING, COMPUTE, EXCHANGE, INPUT, MEETING, TRACING

_FLOOR_SECONDS = 60.0
_CAP_SECONDS = 1800.0
_UNSEEN_SECONDS = 600.0  # For a first exchange with invisible bytes: 440 MB at 6 Mbit/s.
_CARRIED_SECONDS = 30.0
_STEPS, _STEPS_REMEMBERED, _LONGEST_STEPS = 20, 64, 3


class StallTimeout:
    """Computes how long this worker may make no progress, from the durations of its steps, for the watchdog.

    Args:
      given: The user's limit in seconds; `None` to derive it from the steps, infinite for no limit.
      meeting_seconds: How long all workers may take to come to a call.
      sees_bytes: Whether `observe` receives the number of exchanged bytes. Otherwise a worker has ten minutes for an
        exchange until the duration of one step is known.
    """

    def __init__(self, given: float | None = None, meeting_seconds: float = math.inf, sees_bytes: bool = True):
        self._given, self._meeting_seconds = given, meeting_seconds
        self._first_exchange_seconds = _FLOOR_SECONDS if sees_bytes else _UNSEEN_SECONDS
        self._carried, self._since_carried = 0, math.inf
        self._steps: collections.deque[float] = collections.deque(maxlen=_STEPS_REMEMBERED)
        self._longest = 0.0
        self._state: Any = None
        self._phase: str | None = None
        self._is_first = False
        self.waited_seconds = 0.0

    def learn(self, seconds: float, is_first: bool) -> None:
        """Records the duration of a training step, and whether it was the first step of a `fit`."""
        self._longest = max(self._longest, seconds)
        if not is_first:
            self._steps.append(seconds)

    def observe(
        self, phase: str | None, progress: Any, elapsed_seconds: float, *, is_first: bool = False, carried: int = 0
    ) -> None:
        """Records what this worker does now, and counts the time since its last progress.

        Args:
          phase: A phase of `tfdist.faults.activity`, or a section; `None` outside of calls.
          progress: A value that changes when the worker makes progress in the phase, or leaves it and returns.
          elapsed_seconds: Time since the last call of this method.
          is_first: Whether input and computation may take longer than in a usual step.
          carried: Number of bytes that the worker has exchanged with peers so far. An increase is progress.
        """
        self.waited_seconds += elapsed_seconds
        self._since_carried += elapsed_seconds
        if (phase, progress) != self._state:
            self.waited_seconds = 0.0
        if carried != self._carried:
            self._carried = carried
            self.waited_seconds = self._since_carried = 0.0
        self._state, self._phase, self._is_first = (phase, progress), phase, is_first

    @property
    def waits(self) -> bool:
        """Whether this worker is where workers wait for peers: in an exchange or at the beginning of a call."""
        return self._phase in (EXCHANGE, MEETING)

    @property
    def carries(self) -> bool:
        """Whether this worker waits for peers and bytes have moved in the last 30 s, or in half of its limit if less.

        Peers may have finished their own parts of the exchange, and wait for this worker.
        """
        return self.waits and self._since_carried < min(_CARRIED_SECONDS, self.limit_seconds / 2)

    @property
    def may_take_long(self) -> bool:
        """Whether this worker is in a slow phase, such as a callback, within its limit, so that peers wait for it."""
        return self._is_long and not self.is_over

    @property
    def _is_long(self) -> bool:
        if self._phase in (INPUT, COMPUTE):
            return self._is_first
        return self._phase is not None and not self.waits

    @property
    def usual_seconds(self) -> float:
        """The median duration of the recent training steps, or the longest duration if only first steps are known."""
        return statistics.median(self._steps) if self._steps else self._longest

    @property
    def limit_seconds(self) -> float:
        """How long a worker may make no progress in its current phase, such as a callback, by the watchdog's rule."""
        if self._phase is None or self._given == math.inf:
            return math.inf
        if self._phase == MEETING:
            return self._meeting_seconds
        longest = _LONGEST_STEPS * self._longest
        is_prepared = self._phase not in (BUILDING, TRACING) and not (self._phase == COMPUTE and self._is_first)
        if self._given is not None and is_prepared:
            return self._given
        if self._is_long:
            return max(_CAP_SECONDS, longest)
        floor = self._first_exchange_seconds if self.waits and not self._longest else _FLOOR_SECONDS
        return max(min(max(floor, _STEPS * self.usual_seconds), _CAP_SECONDS), longest)

    @property
    def is_over(self) -> bool:
        """Whether this worker has made no progress for longer than its limit, so that the watchdog acts."""
        return self.waited_seconds > self.limit_seconds
