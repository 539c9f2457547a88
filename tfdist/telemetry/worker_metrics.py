"""All figures of a worker at one moment, and their names, units and meanings for Prometheus and TensorBoard.

`METRICS` is the only list: the exporter, the TensorBoard tags and the table in the documentation follow it. Does not
load TensorFlow.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.events.phase_names import CALLBACK, COMPUTE, EXCHANGE, INPUT, SAVE, VALIDATION

FIT_START = "start"
PHASES = {
    FIT_START: "from the beginning of `fit` to the first step: comparison of workers, traces, restoring",
    INPUT: "waiting for the input",
    COMPUTE: "computing, without waits for other replicas",
    EXCHANGE: "exchanges that computation does not hide, waits for other replicas, and the update of the variables",
    VALIDATION: "validation",
    SAVE: "waiting for a backup",
    CALLBACK: "other callbacks, and Python code between steps",
}
"""The phases of a `fit`. A worker is in one of them at each moment, so they sum to the time of the `fit`."""

MODEL_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "accumulated_gradients": "accumulated gradients",
    "residuals": "residuals of compression",
    "local_copies": "copies of weights for local steps",
    "other": "other variables",
}
"""The kinds of memory of a model, each with its name for people."""


@dataclasses.dataclass(frozen=True)
class WorkerMetrics:
    """The figures of one worker at one moment. A figure is `None` if it is not known.

    Counts and seconds are totals since the callback's first `fit` in this process. Other figures are of this moment, or
    of the last interval between two figures in which a step ended.

    Attributes:
      time: The moment, in seconds since the epoch.
      step: Training steps of the model, including those before a restart.
      epoch: Epoch of the running `fit`, from 0.
      steps: Training steps of this process.
      rows: Rows of this worker's replicas.
      global_rows: Rows of all replicas.
      phase_seconds: Seconds by phase; empty if steps do not report.
      step_seconds: Mean seconds from the end of one step to the end of the next, in the last interval.
      share: Part of the rows of all replicas that this worker had, in the last interval.
      imbalance: Longest compute time of a step divided by the mean of all replicas, in the last interval.
      straggler: By cause, 1 while this worker holds up its peers, else 0; see `straggler_file.py`. Empty if alone.
      raw_bytes: Bytes of gradients that exchanges would have sent without compression.
      sent_bytes: Bytes of gradients that were sent. Both are known with `compression` only.
      compression_ratio: `raw_bytes` divided by `sent_bytes`, in the last interval.
      residual_norm: Euclidean norm of the residuals of this worker's codecs.
      network_sent_bytes: All bytes that steps sent to peers.
      network_received_bytes: All bytes that steps received from peers.
      restarts: Restarts of the job by `tfdist run` so far.
      progress: Part of the steps of the running `fit` that is done, from 0 to 1. Needs the number of steps of an epoch.
      remaining_seconds: Estimated time until the `fit` ends, at the mean speed of this process.
      committed_at: Time of the newest commit, in seconds since the epoch.
      resident_bytes: Memory of this process.
      model_bytes: Memory of the variables and gradients on a replica of this worker, by kind, as in
        `strategy.memory_report()`. Known from the first step of a `fit` on; empty without a strategy of tfdist.
      cpu_seconds: Processor time of this process, since its start.
      logs: Newest loss and metrics, by name.
    """

    time: float
    step: int
    epoch: int
    steps: int
    restarts: int
    resident_bytes: int
    cpu_seconds: float
    rows: int | None = None
    global_rows: int | None = None
    phase_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step_seconds: float | None = None
    share: float | None = None
    imbalance: float | None = None
    straggler: Mapping[str, float] = dataclasses.field(default_factory=dict)
    raw_bytes: int | None = None
    sent_bytes: int | None = None
    compression_ratio: float | None = None
    residual_norm: float | None = None
    network_sent_bytes: int | None = None
    network_received_bytes: int | None = None
    progress: float | None = None
    remaining_seconds: float | None = None
    committed_at: float | None = None
    model_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    logs: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Metric:
    """One figure under the names by which other programs know it.

    Attributes:
      field: The attribute of `WorkerMetrics`. That of a metric with a label is a mapping.
      name: Name for Prometheus.
      is_total: Whether it only grows. TensorBoard then shows its growth, by step or by second.
      meaning: Description of the figure, with its unit.
      label: Label for Prometheus, with the key of the mapping as its value.
      tag: Tag in TensorBoard; `{}` stands for the key. Empty if TensorBoard does not show it.
      per: "step" or "second", for a total.
    """

    field: str
    name: str
    is_total: bool
    meaning: str
    tag: str
    label: str = ""
    per: str = "step"


def _total(field: str, name: str, meaning: str, tag: str = "", label: str = "", per: str = "step") -> Metric:
    return Metric(field, name, True, meaning, tag, label, per)


def _now(field: str, name: str, meaning: str, tag: str = "", label: str = "") -> Metric:
    return Metric(field, name, False, meaning, tag, label)


METRICS = (
    _total(
        "steps", "tfdist_steps_total", "Training steps of this process", "throughput/steps_per_second", per="second"
    ),
    _total("rows", "tfdist_rows_total", "Rows that this worker trained on", "throughput/rows_per_second", per="second"),
    _total(
        "phase_seconds",
        "tfdist_phase_seconds_total",
        "Seconds that this worker spent in a phase of training",
        "step/{}_seconds",
        label="phase",
    ),
    _now(
        "step_seconds", "tfdist_step_seconds", "Mean seconds from the end of a step to that of the next", "step/seconds"
    ),
    _now("step", "tfdist_step", "Training steps of the model, including those before a restart"),
    _now("epoch", "tfdist_epoch", "Epoch of the running fit, from 0", "progress/epoch"),
    _now("progress", "tfdist_progress_ratio", "Part of the steps of the running fit that is done", "progress/done"),
    _now(
        "remaining_seconds",
        "tfdist_remaining_seconds",
        "Estimated seconds until the running fit ends",
        "progress/remaining_seconds",
    ),
    _now("share", "tfdist_share_ratio", "Part of the rows of all replicas that this worker has", "balance/share"),
    _now(
        "imbalance",
        "tfdist_imbalance_ratio",
        "Longest compute time of a step divided by the mean of all replicas",
        "balance/imbalance",
    ),
    _now(
        "straggler",
        "tfdist_straggler",
        "1 while this worker holds up the others for this cause, else 0",
        "balance/straggler_{}",
        label="cause",
    ),
    _total(
        "raw_bytes",
        "tfdist_gradient_raw_bytes_total",
        "Bytes of gradients before compression",
        "traffic/raw_bytes",
    ),
    _total(
        "sent_bytes",
        "tfdist_gradient_sent_bytes_total",
        "Bytes of gradients that this worker sent, after compression",
        "traffic/sent_bytes",
    ),
    _now(
        "compression_ratio",
        "tfdist_compression_ratio",
        "Bytes of gradients before compression divided by bytes sent",
        "traffic/compression_ratio",
    ),
    _now("residual_norm", "tfdist_residual_norm", "Euclidean norm of the residuals", "traffic/residual_norm"),
    _total(
        "network_sent_bytes",
        "tfdist_network_sent_bytes_total",
        "Bytes sent to peers",
        "traffic/network_sent_bytes",
    ),
    _total(
        "network_received_bytes",
        "tfdist_network_received_bytes_total",
        "Bytes received from peers",
        "traffic/network_received_bytes",
    ),
    _now("restarts", "tfdist_restarts", "Restarts of the job by tfdist run so far", "progress/restarts"),
    _now(
        "committed_at",
        "tfdist_last_commit_timestamp_seconds",
        "Time of the newest backup, in seconds since the epoch",
        "backup/age_seconds",
    ),
    _now("resident_bytes", "tfdist_resident_memory_bytes", "Bytes of memory of this process", "process/resident_bytes"),
    _now(
        "model_bytes",
        "tfdist_model_memory_bytes",
        "Bytes of weights, gradients, optimizer state and other variables on a replica of this worker",
        "memory/{}_bytes",
        label="kind",
    ),
    _total(
        "cpu_seconds",
        "tfdist_cpu_seconds_total",
        "Processor seconds of this process",
        "process/used_cores",
        per="second",
    ),
    _now("logs", "tfdist_log", "Newest loss and metrics of Keras", "logs/{}", label="name"),
)
"""All metrics, each under all of its names."""


def scalars(now: WorkerMetrics, before: WorkerMetrics) -> Iterator[tuple[str, float]]:
    """Yields the tags and values for TensorBoard. Totals become means over the steps or seconds since `before`."""
    divisors = {"step": now.steps - before.steps, "second": now.time - before.time}
    for metric in METRICS:
        divisor = divisors[metric.per] if metric.is_total else 1
        if not metric.tag or divisor <= 0:
            continue
        for key, value in values(metric, now).items():
            if metric.is_total:
                value = (value - values(metric, before).get(key, 0.0)) / divisor
            elif metric.field == "committed_at":
                value = now.time - value
            yield metric.tag.format(key), value


def values(metric: Metric, figures: WorkerMetrics) -> dict[str, float]:
    """Returns the known values of a metric by the value of its label; by "" without a label."""
    value: Any = getattr(figures, metric.field)
    if metric.label:
        return {str(key): float(each) for key, each in value.items()}
    return {} if value is None else {"": float(value)}
