"""How long a worker may stay where it is: the rule of the watchdog, without clocks and threads."""

import collections
import math
import statistics
from typing import Any

__all__ = ["INPUT", "TRAINING", "Patience"]

TRAINING = "training"
INPUT = "input"
_FLOOR_SECONDS = 60.0
_CAP_SECONDS = 1800.0
_STEPS, _STEPS_REMEMBERED, _LONGEST_STEPS = 20, 64, 3


class Patience:
    """How long a worker may stay where it is; see `tfdist.faults.watchdog` for the rule.

    Args:
      given: The user's number of seconds, `None` to learn it, infinite to stay for ever.
    """

    def __init__(self, given: float | None = None):
        self._given = given
        self._steps: collections.deque[float] = collections.deque(maxlen=_STEPS_REMEMBERED)
        self._longest = 0.0
        self._state: tuple[int, str | None] = (0, None)
        self._progress: Any = None
        self._in_step = 0.0
        self._is_first = True
        self.waited_seconds = 0.0

    def observe(self, step: int, activity: str | None, elapsed_seconds: float, progress: Any = None) -> None:
        """Takes note of where this worker is.

        Args:
          step: How many steps are done.
          activity: `TRAINING`; `INPUT` where that is all; another word for what may take long; `None` outside of `fit`.
          elapsed_seconds: Since the last call.
          progress: Another value, if it has got on meanwhile by what is no step.
        """
        before, was = self._state
        self.waited_seconds += elapsed_seconds
        if was == TRAINING:
            self._in_step += elapsed_seconds
        if step > before:
            took = self._in_step / (step - before)
            self._longest = max(self._longest, took)
            if self._in_step and not self._is_first:  # else of a `fit` that a callback calls
                self._steps.append(took)
            self._is_first = False
            self._in_step = 0.0
        if activity is None:
            self._is_first = True
            self._in_step = 0.0
        if (step, activity) != self._state or progress != self._progress:
            self.waited_seconds = 0.0
        self._state, self._progress = (step, activity), progress

    @property
    def may_take_long(self) -> bool:
        """Whether this worker does what may take long, and its clock runs: others wait for it."""
        return self._is_long and not self.is_over

    @property
    def _is_long(self) -> bool:
        activity = self._state[1]
        return activity is not None and (activity not in (TRAINING, INPUT) or self._is_first)

    @property
    def usual_seconds(self) -> float:
        """What a step takes, as far as that is known."""
        return statistics.median(self._steps) if self._steps else self._longest

    @property
    def limit_seconds(self) -> float:
        """How long this worker may stay where it is."""
        if self._state[1] is None or self._given == math.inf:
            return math.inf
        longest = _LONGEST_STEPS * self._longest
        if self._given is not None and (not self._is_first or self._state[1] == INPUT):
            return self._given
        if self._is_long or not self._steps:
            return max(_CAP_SECONDS, longest)
        return max(min(max(_FLOOR_SECONDS, _STEPS * self.usual_seconds), _CAP_SECONDS), longest)

    @property
    def is_over(self) -> bool:
        """Whether it has stayed there for longer."""
        return self.waited_seconds > self.limit_seconds
