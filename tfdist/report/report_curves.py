"""Policy: the charts of the page of `tfdist report`, and the curves in them. Pure functions."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from tfdist.report.report_charts import Chart, Curve
from tfdist.report.report_figures import RunFigures
from tfdist.report.telemetry_series import Points, level, longest, rate
from tfdist.telemetry.telemetry_file import TelemetryFile
from tfdist.telemetry.worker_metrics import WorkerMetrics

_WIDE = 50.0  # With a larger quotient of its values a loss is drawn on a logarithmic axis.
_FAILURES = " Dashed vertical lines are failures."


@dataclasses.dataclass(frozen=True)
class _TimeAxis:
    """The time since the start of the run, in a unit that suits its length."""

    start: float
    unit: float
    label: str
    failures: Sequence[float]

    @classmethod
    def of(cls, figures: RunFigures) -> "_TimeAxis":
        firsts = [fit.start for files in figures.telemetry.values() for file in files.values() for fit in file.fits]
        lasts = [each.time for files in figures.telemetry.values() for file in files.values() for each in file.figures]
        start = figures.start if figures.start is not None else min(firsts, default=0.0)
        seconds = figures.seconds or max(lasts, default=start) - start
        units = (("seconds", 1.0, 180.0), ("minutes", 60.0, 10_800.0), ("hours", 3600.0, math.inf))
        name, unit, _ = next((each for each in units if seconds < each[2]), units[-1])
        failures = [(each.failure.time - start) / unit for each in figures.attempts if each.failure]
        return cls(start, unit, f"{name} since the start", failures)

    def __call__(self, curves: Sequence[Points]) -> list[Points]:
        return [[((x - self.start) / self.unit, y) for x, y in curve] for curve in curves]


def throughput_chart(figures: RunFigures) -> Chart:
    """Returns the chart of the rows by second of all workers."""
    time = _TimeAxis.of(figures)
    segments = [
        segment for file in longest(figures.telemetry) for segment in time(rate(file, lambda each: each.global_rows))
    ]
    told = f"Rows per second of all workers over the time of the run.{_FAILURES}"
    curves = [Curve("rows/s", segments)] if segments else []
    return Chart("throughput", "Rows per second, all workers", told, time.label, "rows/s", curves, time.failures)


def shares_chart(figures: RunFigures) -> Chart:
    """Returns the chart of each worker's share of the rows."""
    time = _TimeAxis.of(figures)
    told = f"Share of each worker in the rows of all workers, over the time of the run.{_FAILURES}"
    curves = _by_worker(figures, time, lambda file: level(file, lambda each: _percent(each.share)))
    return Chart("shares", "Share of the rows by worker", told, time.label, "% of the rows", curves, time.failures)


def traffic_chart(figures: RunFigures) -> Chart:
    """Returns the chart of the bytes that each worker sends by second: all bytes, or else those of gradients."""
    time = _TimeAxis.of(figures)
    curves = _by_worker(figures, time, lambda file: rate(file, lambda each: _mega(each.network_sent_bytes)))
    what = "all bytes of training steps"
    if not any(y for curve in curves for segment in curve.segments for _, y in segment):
        curves = _by_worker(figures, time, lambda file: rate(file, lambda each: _mega(each.sent_bytes)))
        what = "bytes of gradients"
    told = f"Megabytes that each worker sends by second ({what}), over the time of the run.{_FAILURES}"
    return Chart("traffic", f"Sent by worker: {what}", told, time.label, "MB/s", curves, time.failures)


def loss_chart(figures: RunFigures) -> Chart:
    """Returns the chart of the loss by training step. After a failure, lost steps are there twice."""

    def curves_of(name: str) -> list[Points]:
        def loss(each: WorkerMetrics) -> float | None:
            return each.logs.get(name)

        return [curve for file in longest(figures.telemetry) for curve in level(file, loss, by=lambda each: each.step)]

    curves = [Curve("loss", curves_of("loss"))]
    validated = [_changes(curve) for curve in curves_of("val_loss")]
    curves.append(Curve("val_loss", [curve for curve in validated if curve], is_marked=True))
    known = [y for curve in curves for segment in curve.segments for _, y in segment if math.isfinite(y)]
    is_wide = bool(known) and min(known) > 0 and max(known) / min(known) > _WIDE
    told = "Loss by training step, as Keras shows it: the mean since the beginning of the epoch. "
    told += "Steps that were lost in a failure and done again are there twice."
    shown = [curve for curve in curves if curve.segments]
    return Chart("loss", "Loss by training step", told, "step", "loss", shown, (), is_wide, from_zero=False)


def _by_worker(figures: RunFigures, time: _TimeAxis, curves_of: Callable[[TelemetryFile], list[Points]]) -> list[Curve]:
    workers = sorted({worker for files in figures.telemetry.values() for worker in files})
    curves = []
    for worker in workers:
        files = [files[worker] for files in figures.telemetry.values() if worker in files]
        segments = [segment for file in files for segment in time(curves_of(file))]
        if segments:
            curves.append(Curve(f"worker {worker}", segments))
    return curves


def _changes(points: Points) -> Points:
    """Returns the points at which a value is another than before."""
    return [point for number, point in enumerate(points) if not number or point[1] != points[number - 1][1]]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _mega(count: float | None) -> float | None:
    return None if count is None else count / 1e6
