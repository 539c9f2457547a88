"""Statistics of how the work of a training step was shared among replicas."""

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How the work of the last training step was shared among replicas. Tuples have one entry per replica.

    Attributes:
      rows: Rows of the global batch.
      compute_seconds: Computation time of these rows, without waiting.
      wait_seconds: The rest of the step: time between steps, gradient exchange, and waiting for slower replicas.
      step_seconds: Time from the end of the step before to the end of this step; 0 for the first step.
      rows_per_second: Rows of all replicas divided by `step_seconds`.
      imbalance: The longest compute time divided by the mean; 1 if the work is perfectly balanced.
      changes: How often the replicas' shares of the global batch have changed.
    """

    rows: tuple[int, ...]
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    step_seconds: float
    rows_per_second: float
    imbalance: float
    changes: int


class StepTimes:
    """Computes statistics of how replicas share the work, from the reports of training steps."""

    def __init__(self) -> None:
        self.statistics: Statistics | None = None  # The statistics of the last step.
        self._ended = 0.0

    def begin(self) -> None:
        """Marks the next training step as the first of an iterator, which has no step before it to measure from."""
        self._ended = 0.0

    def note(self, report: Any, changes: int) -> Statistics:
        """Computes the statistics of a training step that has just ended from its report."""
        now = time.monotonic()
        step_seconds = now - self._ended if self._ended else 0.0
        self._ended = now
        rows, seconds = tuple(report.rows.tolist()), tuple(float(each) for each in report.compute_seconds)
        self.statistics = Statistics(
            rows,
            seconds,
            tuple(max(step_seconds - each, 0.0) for each in seconds),
            step_seconds,
            sum(rows) / step_seconds if step_seconds else 0.0,
            max(seconds) / (sum(seconds) / len(seconds)) if sum(seconds) else 1.0,
            changes,
        )
        return self.statistics
