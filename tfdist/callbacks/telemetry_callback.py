"""A callback that records the figures of every worker: for the run directory, TensorBoard and Prometheus."""

import contextlib
import numbers
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals, tf_internals
from tfdist.cluster import ClusterSpec
from tfdist.data.weak_callbacks import listen
from tfdist.events.phase_names import AGREEING, SAVE, VALIDATION
from tfdist.faults import beside_steps
from tfdist.run_files import ATTEMPT, RunFiles, is_supervised
from tfdist.strategies.foreign_keras import ForKerasModels
from tfdist.telemetry import kubeflow_sink
from tfdist.telemetry.asked_trace import AskedTrace
from tfdist.telemetry.json_lines_sink import JsonLinesSink
from tfdist.telemetry.kubeflow_sink import KubeflowSink
from tfdist.telemetry.metrics_collector import MetricsCollector
from tfdist.telemetry.metrics_sink import MetricsSink, WorkerIdentity, check_package
from tfdist.telemetry.metrics_writer import MetricsWriter
from tfdist.telemetry.progress_estimate import ProgressEstimate
from tfdist.telemetry.prometheus_sink import PrometheusSink
from tfdist.telemetry.step_tally import StepTally, is_reported
from tfdist.telemetry.step_trace import StepTrace
from tfdist.telemetry.telemetry_arguments import (
    checked_address,
    checked_count,
    checked_folder,
    checked_port,
    checked_seconds,
    checked_steps,
    checked_workers,
)
from tfdist.telemetry.tensorboard_sink import TensorBoardSink, folder_of

_LAST_PORT = 65535
_SLOT = "TFDIST_SLOT"  # Number of this worker among those of its machine, by `tfdist run`.


class Telemetry(ForKerasModels, keras.callbacks.Callback):
    """Records rows, time by phase, traffic, backups, memory and metrics of every worker while `fit` runs.

        model.fit(train, callbacks=[tfdist.callbacks.Telemetry("logs", prometheus_port=9400)])

    Each worker writes its own figures, every few seconds and at the end of `fit`:

    - as JSON lines into the run directory, under `tfdist run`
    - as scalars for TensorBoard into `<log_dir>/worker-<i>`, with `log_dir`
    - for Prometheus at `http://127.0.0.1:<port>/metrics` while `fit` runs, with `prometheus_port`

    In a TrainJob of Kubeflow Trainer that takes progress, the chief also reports progress and metrics to it.

    The training thread only adds up numbers; a thread writes. If a write fails, as on a full disk, an error is logged
    once and training continues. Put the callback after those that add to the logs. Under one device without a strategy
    and in steps that do not report, rows and phases are unknown.

    Args:
      log_dir: Folder for TensorBoard, which all workers share. Needs `tfdist[tensorboard]`.
      prometheus_port: Port for Prometheus; 0 for any free port. Needs `tfdist[prometheus]`. Under `tfdist run
        --workers`, the first worker of a machine listens at this port, the next one at the port after it, and so on.
      prometheus_address: Address at which to listen. Anybody who reaches another address than loopback can read the
        figures; "0.0.0.0" and "::" stand for all addresses of the machine.
      every_seconds: Seconds between two figures.
      trace_steps: First and last step of this process that TensorFlow's profiler traces, counted from 1, such as
        `(10, 20)`. The trace goes to the folder of the worker in `log_dir`. Writing it takes some seconds, in which
        its peers wait.
      trace_workers: Numbers of the workers that trace the `trace_steps`.
      trace_when_asked: Number of steps that a worker traces, after the one that runs, when it gets SIGUSR2; `None` for
        none. Needs `log_dir`.

    Attributes:
      endpoint: Address and port for Prometheus while `fit` runs, such as "127.0.0.1:9400"; otherwise `None`.

    Raises:
      ValueError: If an argument is invalid.
      ImportError: If a package is missing.
      ClusterError: When `fit` begins, if the port is taken.
    """

    async_safe = True
    """Lets Keras call the hook of batches in a thread, if no other callback needs the order."""

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        prometheus_port: int | None = None,
        prometheus_address: str = "127.0.0.1",
        *,
        every_seconds: float = 5.0,
        trace_steps: tuple[int, int] | None = None,
        trace_workers: Sequence[int] = (0,),
        trace_when_asked: int | None = None,
    ) -> None:
        super().__init__()
        self._log_dir = checked_folder(log_dir)
        self._port = checked_port(prometheus_port)
        self._address = checked_address(prometheus_address)
        self._every_seconds = checked_seconds(every_seconds)
        self._trace_steps = checked_steps(trace_steps, self._log_dir)
        self._trace_workers = checked_workers(trace_workers)
        self._trace_when_asked = checked_count(trace_when_asked, self._log_dir)
        if self._log_dir is not None:
            check_package("log_dir", "tensorboard")
        if self._port is not None:
            check_package("prometheus_port", "prometheus_client")
        self.endpoint: str | None = None
        self.async_safe = self._trace_steps is None
        self._tally: StepTally | None = None
        self._collector: MetricsCollector | None = None
        self._trace: StepTrace | None = None
        self._end_asked_trace: Callable[[], Any] | None = None
        self._close: Callable[[], Any] | None = None
        self._close_port: Callable[[], None] | None = None
        self._end_listening: Callable[[], None] | None = None
        self._last_batch, self._steps = -1, 0
        self._test_began = self._saved = 0.0

    def get_state(self) -> dict[str, Any]:
        """Returns no state: the figures are of one process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, since `get_state` returns no state."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to record: opens the port, starts the thread that writes."""
        self._stop()  # An earlier `fit` may have failed.
        strategy = self.model.distribute_strategy
        reports, identity = getattr(strategy, "reports", None), _identity_of(strategy)
        if self._tally is None or self._collector is None:
            local = (reports.num_replicas if reports is not None else 1) // identity.workers
            self._tally = StepTally(slice(local * identity.worker, local * (identity.worker + 1)))
            self._collector = MetricsCollector(strategy, self._tally)
        self._tally.begin()
        params = self.params or {}  # Keras sets none in a custom loop.
        self._collector.begin_fit(ProgressEstimate(params.get("epochs"), params.get("steps")))
        self._saved, self._has_base = _saved_seconds(), False
        self._begin_traces(identity.worker, self._tally)
        sinks = self._sinks(identity)
        writer = MetricsWriter(self._collector.collect, sinks, self._every_seconds)
        self._close = weakref.finalize(self, writer.close)
        if reports is not None:
            self._reports = reports
            self._end_listening = listen(reports.listeners, self._add)

    def _begin_traces(self, worker: int, tally: StepTally) -> None:
        if self._log_dir is None:
            return
        folder = folder_of(self._log_dir, worker)
        if self._trace_steps is not None and worker in self._trace_workers:
            self._trace = self._trace or StepTrace(folder, *self._trace_steps)
        if self._trace_when_asked is not None:
            trace = AskedTrace(folder, self._trace_when_asked, lambda: tally.latest.work.steps)
            self._end_asked_trace = weakref.finalize(self, trace.end)
            if not trace.begin():
                logging.warning(
                    "Worker %d cannot trace when it gets SIGUSR2, since the program handles this signal itself, or "
                    "`fit` does not run in the main thread.",
                    worker,
                )

    def _sinks(self, identity: WorkerIdentity) -> list[MetricsSink]:
        sinks: list[MetricsSink] = []
        if self._port is not None:
            server = PrometheusSink(self._address, _own_port(self._port), identity)
            sinks, self.endpoint, self._close_port = [server], server.endpoint, server.close
            # A free port is a warning, because absl hides lower levels by default.
            level = logging.INFO if self._port else logging.WARNING
            logging.log(level, "Worker %d serves its figures at http://%s/metrics.", identity.worker, self.endpoint)
        files = RunFiles.of_worker() if is_supervised() else None
        if files is not None:
            path = files.telemetry(identity.attempt, identity.worker)
            header = {"prometheus": self.endpoint, "every_seconds": self._every_seconds}
            sinks.append(JsonLinesSink(path, identity, header))
        if self._log_dir is not None:
            sinks.append(TensorBoardSink(folder_of(self._log_dir, identity.worker)))
        if identity.worker == 0 and kubeflow_sink.is_given():
            sinks.append(KubeflowSink())
        if not sinks:
            logging.warning(
                "Telemetry records figures only under `tfdist run`, or with `log_dir` or `prometheus_port`. None of "
                "these is given, so nothing is recorded."
            )
        return sinks

    def _add(self, report: Any) -> None:
        """Adds a training step, in the thread of TensorFlow that ends it."""
        if self._tally is not None:
            self._note_saves(self._tally)
            self._tally.add(report, self._reports.phases())

    def _note_saves(self, tally: StepTally) -> None:
        saved = _saved_seconds()
        tally.pause(SAVE, saved - self._saved)
        self._saved = saved

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch, and in the first one how many steps the model has been trained on."""
        self._last_batch = -1
        if self._collector is None or self._tally is None:
            return
        self._collector.epoch = epoch
        self._collector.progress.begin_epoch(epoch)
        if not self._has_base:  # All callbacks have begun, so a backup is restored.
            self._has_base = True
            self._collector.base_step = max(_steps_of(self.model) - self._tally.latest.work.steps, 0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts a trace, if one is asked for."""
        if self._trace is not None:
            self._trace.before_step(self._steps + 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the loss and the metrics, and steps that do not report."""
        steps, self._last_batch = batch - self._last_batch, batch
        self._steps += steps
        if self._tally is not None and not is_reported(self._tally.latest):
            self._tally.add_batches(steps)
        if self._trace is not None:
            self._trace.after_step(self._steps)
        if self._collector is not None:
            self._collector.progress.end_batch(batch)
        self._note(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the beginning of a validation."""
        self._test_began = time.monotonic()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes how long a validation took."""
        if self._tally is not None:
            self._tally.pause(VALIDATION, time.monotonic() - self._test_began)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the loss and the metrics of the epoch, with those of the validation."""
        if self._collector is not None:
            self._collector.progress.end_epoch(epoch)
        self._note(logs)

    def _note(self, logs: dict[str, Any] | None) -> None:
        if self._collector is not None and logs:
            told = {name: float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
            self._collector.logs = {**self._collector.logs, **told}

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the last figures, and closes the port and the files."""
        if self._tally is not None:
            self._note_saves(self._tally)
            self._tally.end()
        self._stop()

    def _stop(self) -> None:
        if self._end_listening is not None:
            self._end_listening()
            self._end_listening = None
        if self._trace is not None:
            self._trace.end()
        if self._end_asked_trace is not None:
            self._end_asked_trace()
            self._end_asked_trace = None
        if self._close_port is not None:
            self._close_port()  # First, since the last figures may wait for a disk, and the next `fit` needs the port.
            self._close_port = None
        if self._close is not None:
            self._close()
            self._close = self.endpoint = None


def _own_port(port: int) -> int:
    """Returns the port of this worker, from that of the first worker of its machine; 0, for any free one, stays.

    Raises:
      ValueError: If there is no such port.
    """
    slot = int(os.environ.get(_SLOT) or 0)
    if not port:
        return 0
    if port + slot <= _LAST_PORT:
        return port + slot
    raise ValueError(
        f"prometheus_port is the port of the first worker of a machine, and the others take the next ones, so with "
        f"{_SLOT}={slot} it must be at most {_LAST_PORT - slot}, got {port}. Give a lower port, or 0 for any free port."
    )


def _identity_of(strategy: Any) -> WorkerIdentity:
    elastic = getattr(strategy, "elastic", None)
    workers = tf_internals.number_of_workers(strategy) if elastic is None else elastic.workers
    spec = ClusterSpec.from_env() if workers > 1 else None
    attempt = int(os.environ.get(ATTEMPT) or 0)
    return WorkerIdentity(spec.worker_id if spec else 0, workers, socket.gethostname(), os.getpid(), attempt)


def _saved_seconds() -> float:
    return beside_steps.section_seconds[SAVE] + beside_steps.section_seconds[AGREEING]


def _steps_of(model: keras.Model) -> int:
    """Returns how many steps the optimizer of a model has made; 0 if it has no single optimizer."""
    with contextlib.suppress(AttributeError):
        return int(tf.convert_to_tensor(keras_internals.counter_of(model.optimizer)).numpy())
    return 0
