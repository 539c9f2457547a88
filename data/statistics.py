"""How the work of the last training step was shared."""

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How the work was shared in the last training step, by replica where it is a list.

    Attributes:
      rows: Of the global batch.
      compute_seconds: For them, without waiting.
      wait_seconds: The rest of the step: what lies between steps, exchange, and waiting for slower replicas.
      step_seconds: Between the ends of this step and of the one before; 0 for the first.
      rows_per_second: Of the whole step, all replicas together.
      imbalance: The longest compute time over the mean; about 1 where a step is little else.
      changes: How often shares have changed.
    """

    rows: tuple[int, ...]
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    step_seconds: float
    rows_per_second: float
    imbalance: float
    changes: int


class StepTimes:
    """Makes statistics of reports.

    Attributes:
      statistics: Of the last step; `None` before the first.
    """

    def __init__(self) -> None:
        self.statistics: Statistics | None = None
        self._ended = 0.0

    def begin(self) -> None:
        """The step that comes is the first of an iterator."""
        self._ended = 0.0

    def note(self, report: Any, changes: int) -> Statistics:
        """Makes the statistics of the report of a step that has ended."""
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
