"""Writes the figures of a worker as scalars for TensorBoard, in a run folder of its own."""

import os
from collections.abc import Mapping

import tensorflow as tf

from tfdist.telemetry.metrics_sink import MetricsSink
from tfdist.telemetry.worker_metrics import WorkerMetrics, scalars


class TensorBoardSink(MetricsSink):
    """Writes scalars into `<log_dir>/worker-<i>`, over the training steps of the model.

    Args:
      folder: The run folder of the worker.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: tf.summary.SummaryWriter | None = None
        self._before: WorkerMetrics | None = None
        self._logs: Mapping[str, float] = {}

    def write(self, figures: WorkerMetrics) -> None:
        """Writes the figures, and totals as means since the figures before. The first figures are only noted."""
        before = self._before
        if before is None or (before.steps, self._logs) == (figures.steps, figures.logs):
            self._before = before or figures  # An interval without a step counts for the next one.
            return
        self._logs = figures.logs
        if before.steps < figures.steps:
            self._before = figures
        with tf.device("CPU:0"):
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(self._folder)
            with self._writer.as_default(step=figures.step):
                for tag, value in scalars(figures, before):
                    tf.summary.scalar(tag, value)
            self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def folder_of(log_dir: str, worker: int) -> str:
    """Returns the run folder of a worker for TensorBoard."""
    return os.path.join(log_dir, f"worker-{worker}")
