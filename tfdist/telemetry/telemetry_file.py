"""Reads the files that `json_lines_sink.py` writes: the figures of a worker over time. Does not load TensorFlow."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.telemetry.worker_metrics import WorkerMetrics

_MOST_LINES = 2000  # The reader takes evenly spaced lines of a longer file.
_ANY_NUMBER = ("residual_norm", "logs")  # These may be Inf or NaN, which the file has as text.
_LARGEST = 1e18
_IS_MAPPING = {field.name: field.default_factory is dict for field in dataclasses.fields(WorkerMetrics)}


@dataclasses.dataclass(frozen=True)
class FitTelemetry:
    """The figures of a worker in one `fit`.

    Attributes:
      header: The worker, and the begin of the `fit` as `start`, in seconds since the epoch.
      figures: Its figures, oldest first. Totals go on from the `fit` before in the same process.
    """

    header: Mapping[str, Any]
    figures: Sequence[WorkerMetrics]

    @property
    def start(self) -> float:
        """Begin of the `fit`, in seconds since the epoch."""
        told = self.header.get("start")
        first = self.figures[0].time if self.figures else 0.0
        return float(told) if isinstance(told, int | float) and 0 <= told <= first else first


@dataclasses.dataclass(frozen=True)
class TelemetryFile:
    """The content of a file of figures.

    Attributes:
      fits: The figures of each `fit`.
      damaged: Number of lines that could not be read.
    """

    fits: Sequence[FitTelemetry] = ()
    damaged: int = 0

    @property
    def figures(self) -> list[WorkerMetrics]:
        """The figures of all `fit`s, oldest first."""
        return [figures for fit in self.fits for figures in fit.figures]


def read_telemetry(path: pathlib.Path) -> TelemetryFile:
    """Reads a file of figures. Leaves out lines that cannot be read, and counts them.

    Raises:
      OSError: If the file cannot be read.
    """
    with path.open(errors="replace") as file:
        lines = file.read().splitlines()
    fits: list[tuple[Mapping[str, Any], list[WorkerMetrics]]] = []
    damaged = 0
    for line in _chosen(lines):
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise TypeError("a line must be an object")
            if "steps" in content:
                if not fits:
                    fits.append(({}, []))
                fits[-1][1].append(_metrics(content))
            else:
                fits.append((content, []))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            damaged += 1
    return TelemetryFile([FitTelemetry(header, figures) for header, figures in fits if figures], damaged)


def _chosen(lines: Sequence[str]) -> Iterator[str]:
    """Yields the headers, the last line and evenly spaced others."""
    stride = max(len(lines) // _MOST_LINES, 1)
    for number, line in enumerate(lines):
        if number % stride == 0 or number == len(lines) - 1 or '"every_seconds"' in line:
            yield line


def _metrics(content: Mapping[str, Any]) -> WorkerMetrics:
    known: dict[str, Any] = {}
    for name, is_mapping in _IS_MAPPING.items():
        if name in content:
            value, is_any = content[name], name in _ANY_NUMBER
            if is_mapping:
                known[name] = {str(key): _number(each, is_any) for key, each in value.items()}
            else:
                known[name] = _number(value, is_any)
    return WorkerMetrics(**known)


def _number(value: Any, is_any: bool) -> float:
    if is_any and isinstance(value, str):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a figure must be a number")
    if not is_any and not (math.isfinite(value) and 0 <= value < _LARGEST):
        raise ValueError("a figure must be finite, and not negative")
    return value
