"""Decides after which steps within an epoch of `fit` a backup is saved."""

import datetime
import time
from typing import Any

from tfdist.backup.chief_decision import ChiefDecision


class SaveSchedule:
    """Decides after which steps of a `fit` to save a backup, equally on all workers.

    For an interval of time, the clock of the chief decides. Asking the chief costs a message, so its answer
    also has the number of steps until the next question.

    Args:
      save_freq: A number of steps or a `datetime.timedelta`. Any other value causes no save after a step.
      steps: Number of steps that were trained before.
    """

    def __init__(self, save_freq: Any, agreement: ChiefDecision, steps: int):
        self._save_freq = save_freq
        self._agreement = agreement
        self._saved_at = self._looked_at = steps
        self._look_at_clock = steps + 1  # By then, the duration of a step is known.
        self._seconds_saved = self._seconds_looked = time.monotonic()

    def saved(self, steps: int) -> None:
        """Notes that a backup was saved after `steps` steps, for any reason, to count `save_freq` from there."""
        self._saved_at = steps

    def is_due(self, steps: int) -> bool:
        """Whether to save a backup after `steps` steps. Call it once after each step."""
        if not isinstance(self._save_freq, datetime.timedelta):
            return type(self._save_freq) is int and steps - self._saved_at >= self._save_freq
        if steps < self._look_at_clock:
            return False
        answer = self._agreement.settle("fit", None, lambda _: self._look(steps, self._save_freq.total_seconds()))
        self._look_at_clock = steps + answer["steps"]
        return answer["save"]

    def _look(self, steps: int, interval_seconds: float) -> dict[str, Any]:
        """Returns, on the chief, whether the time interval is over, and the steps until the next look at the clock."""
        now = time.monotonic()
        passed = max(steps - self._looked_at, 1)
        step_seconds = (now - self._seconds_looked) / passed
        self._seconds_looked, self._looked_at = now, steps
        left = self._seconds_saved + interval_seconds - now
        save = left < step_seconds
        if save:
            self._seconds_saved, left = now, interval_seconds
        # At most twice the measured number of steps, because later steps or a validation may take longer.
        return {"save": save, "steps": min(max(1, int(left / max(step_seconds, 1e-6))), 2 * passed)}
