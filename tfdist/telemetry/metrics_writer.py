"""A thread that gathers the figures of this worker every few seconds, and gives them to all sinks."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from tfdist.telemetry.metrics_sink import MetricsSink
from tfdist.telemetry.worker_metrics import WorkerMetrics

_END_SECONDS = 10.0  # How long the end of a `fit` waits for the last figures, if a disk or file server hangs.


class MetricsWriter:
    """Writes figures at its start, every few seconds, and at its end, in a thread of its own.

    Args:
      collect: Returns the figures of the moment.
      sinks: Where to write them. The writer closes them.
      every_seconds: Seconds between two figures.
    """

    def __init__(
        self, collect: Callable[[], WorkerMetrics], sinks: Sequence[MetricsSink], every_seconds: float
    ) -> None:
        self._collect, self._sinks, self._every_seconds = collect, sinks, every_seconds
        self._is_over = threading.Event()
        self._failed: set[str] = set()  # Names of what has failed and was logged.
        self._thread = threading.Thread(target=self._run, name="tfdist-telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the last figures and closes the sinks. Does nothing the second time."""
        self._is_over.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        self._write()
        while not self._is_over.wait(self._every_seconds):
            self._write()
        self._write()
        for sink in self._sinks:
            with self._logging_once(type(sink).__name__):
                sink.close()

    def _write(self) -> None:
        with self._logging_once("MetricsCollector"):
            figures = self._collect()
            for sink in self._sinks:
                with self._logging_once(type(sink).__name__):
                    sink.write(figures)

    @contextlib.contextmanager
    def _logging_once(self, name: str) -> Iterator[None]:
        """Logs any error in the block, once for each name, since training must not end by it."""
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                logging.error(
                    "Telemetry could not write its figures (%s): %s. Training continues, and the next write tries "
                    "again. This message appears once.",
                    name,
                    error,
                )
