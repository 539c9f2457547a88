"""When a `fit` is saved between the ends of its epochs."""

import datetime
import time
from typing import Any

from tfdist.backup.commit_agreement import CommitAgreement


class SaveSchedule:
    """After which steps to save; all workers after the same.

    Where time decides it is the chief's clock. Asking it costs an agreement, so it also says how many steps to wait
    with the next question.

    Args:
      save_freq: A number of steps, or a `datetime.timedelta`; anything else is not due after steps.
      agreement: Among the workers.
      steps: That were trained before.
    """

    def __init__(self, save_freq: Any, agreement: CommitAgreement, steps: int):
        self._save_freq = save_freq
        self._agreement = agreement
        self._saved_at = self._looked_at = steps
        self._look_at_clock = steps + 1  # Then the duration of a step is known.
        self._seconds_saved = self._seconds_looked = time.monotonic()

    def saved(self, steps: int) -> None:
        """Takes note of a save after so many steps, for whatever reason."""
        self._saved_at = steps

    def is_due(self, steps: int) -> bool:
        """Whether to save after so many steps; ask once after each."""
        if not isinstance(self._save_freq, datetime.timedelta):
            return type(self._save_freq) is int and steps - self._saved_at >= self._save_freq
        if steps < self._look_at_clock:
            return False
        answer = self._agreement.settle("fit", None, lambda _: self._look(steps, self._save_freq.total_seconds()))
        self._look_at_clock = steps + answer["steps"]
        return answer["save"]

    def _look(self, steps: int, interval_seconds: float) -> dict[str, Any]:
        """On the chief: whether the time has come, and in how many steps to look again."""
        now = time.monotonic()
        passed = max(steps - self._looked_at, 1)
        step_seconds = (now - self._seconds_looked) / passed
        self._seconds_looked, self._looked_at = now, steps
        left = self._seconds_saved + interval_seconds - now
        save = left < step_seconds
        if save:
            self._seconds_saved, left = now, interval_seconds
        # Not much further than what was measured: what comes then, as a validation, may take longer.
        return {"save": save, "steps": min(max(1, int(left / max(step_seconds, 1e-6))), 2 * passed)}
