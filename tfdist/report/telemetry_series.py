"""Policy: totals, rates and curves from the figures of workers over time. No files and no clock."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from tfdist.telemetry.telemetry_file import FitTelemetry, TelemetryFile
from tfdist.telemetry.worker_metrics import WorkerMetrics

Points = list[tuple[float, float]]
"""Points of a curve: x and y."""

Figure = Callable[[WorkerMetrics], float | None]
"""Takes one figure; `None` if it is unknown."""

_MOST_POINTS = 200


def longest(telemetry: Mapping[int, Mapping[int, TelemetryFile]]) -> list[TelemetryFile]:
    """Returns for each attempt the file of the worker with most figures, for figures that all workers have."""
    return [max(files.values(), key=lambda file: len(file.figures)) for files in telemetry.values() if files]


def continued(figures: Iterable[WorkerMetrics], figure: Figure) -> list[tuple[WorkerMetrics, float]]:
    """Returns the figures that have a total, each with its growth since the first `fit`.

    A total begins again at 0 if a later `fit` of the process has another `Telemetry`.
    """
    found: list[tuple[WorkerMetrics, float]] = []
    former, newest = 0.0, 0.0  # The totals at the end of former callbacks, and the newest of this one.
    for each in figures:
        value = figure(each)
        if value is None:
            continue
        if value < newest or (found and _begins_again(found[-1][0], each)):
            former += newest
        newest = value
        found.append((each, former + newest))
    return found


def _begins_again(before: WorkerMetrics, now: WorkerMetrics) -> bool:
    """Whether totals begin again at 0: fewer steps, or all of them come after the model's last step before."""
    return now.steps < before.steps or (before.steps > 0 and now.step - now.steps == before.step)


def growth(figures: Iterable[WorkerMetrics], figure: Figure) -> float | None:
    """Returns how much a total has grown, from 0 on; `None` if it is unknown."""
    found = continued(figures, figure)
    return found[-1][1] if found else None


def rate(file: TelemetryFile, figure: Figure) -> list[Points]:
    """Returns for each `fit` how much a total has grown by second, at the end of each interval."""
    grown = iter(continued(file.figures, figure))
    curves, before = [], 0.0
    for fit in file.fits:
        count = sum(figure(each) is not None for each in fit.figures)
        known = [(fit.start, before), *((each.time, total) for each, total in itertools.islice(grown, count))]
        before = known[-1][1]
        curves.append(_slopes(thinned(known)))
    return [curve for curve in curves if curve]


def _slopes(points: Points) -> Points:
    return [
        (until, (now - before) / (until - since))
        for (since, before), (until, now) in itertools.pairwise(points)
        if until > since
    ]


def level(file: TelemetryFile, figure: Figure, *, by: Figure = lambda each: each.time) -> list[Points]:
    """Returns for each `fit` a figure of the moment, over time or another figure, with the last value at each x."""
    curves = [_changes(fit, figure, by) for fit in file.fits]
    return [thinned(curve) for curve in curves if curve]


def _changes(fit: FitTelemetry, figure: Figure, by: Figure) -> Points:
    points: Points = []
    for each in fit.figures:
        x, y = by(each), figure(each)
        if x is not None and y is not None:
            points[-1:] = [(x, y)] if points and points[-1][0] == x else [*points[-1:], (x, y)]
    return points


def thinned(points: Points) -> Points:
    """Returns at most some hundred points, evenly spaced, with the first and the last."""
    stride = -(-len(points) // _MOST_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def at_step(points: Sequence[tuple[float, float]], step: float) -> float | None:
    """Returns a total at a step, between or beyond the steps at which it is known; `None` with less than two."""
    known = sorted(dict(points).items())
    if len(known) < 2:
        return None
    after = next((i for i, (x, _) in enumerate(known) if x >= step and i), len(known) - 1)
    (x0, y0), (x1, y1) = known[after - 1], known[after]
    return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
