"""Policy: how fast the workers of an attempt trained, and on how many rows. Pure functions."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tfdist.events.phase_names import CALLBACK, COMPUTE, EXCHANGE, INPUT, OWN_LOOP
from tfdist.events.time_record import TimeRecord
from tfdist.report.telemetry_series import at_step, continued, longest
from tfdist.telemetry.telemetry_file import TelemetryFile

_STEP = (INPUT, COMPUTE, EXCHANGE, CALLBACK)


@dataclasses.dataclass(frozen=True)
class StepSpeed:
    """How fast workers trained.

    Attributes:
      steps: Number of training steps.
      seconds: Their time: input, computation, exchanges, and callbacks between them, as the mean over workers.
      efficiency: Part of this time that is not spent on exchanges and waits for peers; `None` if it is unknown.
      rows: Rows of all workers in these steps; `None` if they are unknown.
      typical_seconds: Time from the end of a step to the end of the next: the median over intervals of some seconds.
        First steps, saves and ends of epochs do not change it. `None` if it is unknown.
    """

    steps: int
    seconds: float
    efficiency: float | None
    rows: float | None
    typical_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps

    @property
    def rows_per_second(self) -> float | None:
        """Rows of all workers by second of these steps; `None` if they are unknown."""
        return self.rows / self.seconds if self.rows and self.seconds else None


def combined(speeds: Sequence[StepSpeed]) -> StepSpeed | None:
    """Returns the speed over several attempts; `None` without one."""
    if not speeds:
        return None
    rows = [each.rows for each in speeds if each.rows is not None]
    return StepSpeed(
        sum(each.steps for each in speeds),
        sum(each.seconds for each in speeds),
        _mean((each.efficiency, each.seconds) for each in speeds),
        sum(rows) if len(rows) == len(speeds) else None,
        _mean((each.typical_seconds, each.steps) for each in speeds),
    )


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """Returns the mean of the known values by their weights; `None` without one."""
    known = [(value, weight) for value, weight in weighted if value is not None and weight > 0]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def steps_of(records: Sequence[TimeRecord]) -> tuple[int, int]:
    """Returns the steps of the model before the first step of an attempt, and after its last."""
    trained = [each for each in records if each.steps > max(each.resumed_steps, 0)]
    if not trained:
        return 0, 0
    return min(max(each.resumed_steps, 0) for each in trained), max(each.steps for each in trained)


def speed_of(records: Sequence[TimeRecord], telemetry: Mapping[int, TelemetryFile]) -> StepSpeed | None:
    """Returns how fast the workers of an attempt trained."""
    trained = [each for each in records if each.steps > max(each.resumed_steps, 0)]
    if not trained:
        return None
    first, last = steps_of(records)
    # If steps report, as in `fit`, a loop of the script's own beside them has none of the counted steps.
    own = 0.0 if any(each.seconds[COMPUTE] for each in trained) else _mean_of(trained, OWN_LOOP)
    seconds = own + sum(_mean_of(trained, phase) for phase in _STEP)
    exchanged = _mean_of(trained, EXCHANGE)
    rows = at_step(_rows_by_step(telemetry, first), last)
    # Steps that do not report only compute, and a loop of the script's own does not tell its exchanges.
    efficiency = 1 - exchanged / seconds if exchanged and not own else None
    return StepSpeed(last - first, seconds, efficiency, rows, _typical_seconds(telemetry))


def _mean_of(records: Sequence[TimeRecord], phase: str) -> float:
    return statistics.fmean(each.seconds[phase] for each in records)


def _typical_seconds(telemetry: Mapping[int, TelemetryFile]) -> float | None:
    """Returns the median of the step times of intervals, from the worker with most figures."""
    figures = [each for file in longest({0: telemetry}) for each in file.figures]
    new = [now for before, now in itertools.pairwise(figures) if now.steps > before.steps]
    return statistics.median(known) if (known := [each.step_seconds for each in new if each.step_seconds]) else None


def _rows_by_step(telemetry: Mapping[int, TelemetryFile], first: int) -> list[tuple[float, float]]:
    """Returns the rows of all workers by step, from the worker with most figures."""
    known = [[each for each in file.figures if each.global_rows] for file in telemetry.values()]
    most = max(known, key=len, default=[])
    steps = [first + total for _, total in continued(most, lambda each: each.steps)]
    rows = [total for _, total in continued(most, lambda each: each.global_rows)]
    return [(float(first), 0.0), *zip(steps, rows, strict=True)] if most else []


def rows_of(steps: tuple[int, int], lost: int, telemetry: Mapping[int, TelemetryFile]) -> tuple[float, float] | None:
    """Returns the rows of the kept and of the lost steps of an attempt; `None` if they are unknown.

    Args:
      steps: Steps of the model before the first step of the attempt and after its last.
      lost: Number of its steps that were lost.
      telemetry: Figures of its workers.
    """
    first, last = steps
    if first == last:
        return 0.0, 0.0
    points = _rows_by_step(telemetry, first)
    kept, rows = at_step(points, last - lost), at_step(points, last)
    return None if kept is None or rows is None else (max(kept, 0.0), max(rows - max(kept, 0.0), 0.0))
