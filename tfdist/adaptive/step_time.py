"""The time of a training step as a function of the global batch size, fitted to measured steps."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_KEPT = 24  # Newest measurements of each batch size.
_LEAST_KEPT = 3
_SIZES = 12  # Batch sizes that are kept, the newest ones.


class StepLine(NamedTuple):
    """The time of a step: fixed seconds, and seconds for each row of the global batch."""

    fixed: float
    per_row: float

    def seconds(self, size: float) -> float:
        """Returns the time of a step with a global batch of `size` rows."""
        return self.fixed + self.per_row * size


class StepTime:
    """Measured times of steps, by global batch size, and the line through them.

    The median of each size counts, so that single pauses do not matter. With one size only, the time that replicas
    compute counts as time per row. The rest, such as the exchange of gradients, counts as fixed.
    """

    def __init__(self) -> None:
        self._measured: dict[int, list[tuple[float, float]]] = {}

    def observe(self, size: int, seconds: float, compute_seconds: float) -> None:
        """Adds a step: the rows of its global batch, its time, and the time that its slowest replica computed."""
        if seconds <= 0:
            return
        here = self._measured.pop(size, [])
        self._measured[size] = [*here, (seconds, min(compute_seconds, seconds))][-_KEPT:]
        for old in list(self._measured)[:-_SIZES]:
            del self._measured[old]

    @property
    def is_known(self) -> bool:
        """Whether enough steps of one size were measured."""
        return any(len(each) >= _LEAST_KEPT for each in self._measured.values())

    def line(self) -> StepLine | None:
        """Returns the line through the measured times; `None` before enough steps were measured."""
        points = [
            (size, statistics.median(t for t, _ in each), statistics.median(c for _, c in each), len(each))
            for size, each in self._measured.items()
            if len(each) >= _LEAST_KEPT
        ]
        if not points:
            return None
        if len(points) > 1:
            return _fitted([(size, seconds, weight) for size, seconds, _, weight in points])
        ((size, seconds, compute, _),) = points
        return StepLine(seconds - compute, compute / size)

    def state(self) -> dict[str, Any]:
        """Returns the measurements for `restored`."""
        return {str(size): [list(pair) for pair in each] for size, each in self._measured.items()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "StepTime":
        """Returns the step times that `state` has returned."""
        made = cls()
        made._measured = {int(size): [(t, c) for t, c in each] for size, each in state.items()}
        return made


def _fitted(points: Sequence[tuple[int, float, int]]) -> StepLine:
    """Fits a line with neither negative fixed time nor negative time per row, by least squares of relative errors."""
    weighted = [(size, seconds, count / seconds**2) for size, seconds, count in points]
    total = sum(w for *_, w in weighted)
    size = sum(w * x for x, _, w in weighted) / total
    seconds = sum(w * y for _, y, w in weighted) / total
    spread = sum(w * (x - size) ** 2 for x, _, w in weighted)
    per_row = sum(w * (x - size) * (y - seconds) for x, y, w in weighted) / spread
    if per_row <= 0:
        return StepLine(seconds, 0.0)
    if seconds - per_row * size < 0:
        return StepLine(0.0, sum(w * x * y for x, y, w in weighted) / sum(w * x * x for x, _, w in weighted))
    return StepLine(seconds - per_row * size, per_row)
