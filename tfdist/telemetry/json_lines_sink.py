"""Writes the figures of a worker as JSON lines into the run directory: a header, then one line per interval."""

import dataclasses
import json
import os
import pathlib
import time
from typing import Any

from tfdist.symlink_safe_file import no_follow
from tfdist.telemetry.metrics_sink import MetricsSink, WorkerIdentity
from tfdist.telemetry.worker_metrics import WorkerMetrics


class JsonLinesSink(MetricsSink):
    """Appends whole lines to a file. If a line does not fit on the disk, no part of it stays.

    Args:
      path: The file. A second `fit` of the process appends to it, after a header of its own.
      identity: The worker.
      header: Other values of the header.
    """

    def __init__(self, path: pathlib.Path, identity: WorkerIdentity, header: dict[str, Any]) -> None:
        self._path = path
        self._header: dict[str, Any] | None = {**dataclasses.asdict(identity), "start": time.time(), **header}

    def write(self, figures: WorkerMetrics) -> None:
        """Appends the known figures as a line."""
        known = {name: value for name, value in dataclasses.asdict(figures).items() if value not in (None, {})}
        lines = [each for each in (self._header, known) if each is not None]
        self._append("".join(f"{json.dumps(_finite(each), allow_nan=False)}\n" for each in lines))
        self._header = None

    def _append(self, text: str) -> None:
        descriptor = no_follow(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            size, data = os.fstat(descriptor).st_size, text.encode()
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Does nothing, since no file stays open."""


def _finite(value: Any) -> Any:
    """Returns a value for JSON, which has no Inf and NaN: these become text."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
