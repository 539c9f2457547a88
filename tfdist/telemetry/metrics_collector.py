"""Gathers the figures of this worker, such as steps, traffic, backups and memory, in the thread that writes."""

import contextlib
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from tfdist.backup.commit_writer import newest_commit_at
from tfdist.run_files import ATTEMPT
from tfdist.telemetry.progress_estimate import ProgressEstimate
from tfdist.telemetry.step_tally import StepTally, Tally, is_reported, mean_step_seconds, share_of
from tfdist.telemetry.worker_metrics import WorkerMetrics

_NORM_PART = 1 / 500  # Largest part of the time that this thread spends on the norm of the residuals.
_STATM = pathlib.Path("/proc/self/statm")


class MetricsCollector:
    """Makes the `WorkerMetrics` of this worker. The training thread only sets attributes; one other thread collects.

    Args:
      strategy: Strategy of the model that is trained.
      tally: Sums over its training steps.

    Attributes:
      base_step: Training steps of the model before this process.
      epoch: Epoch of the running `fit`.
      logs: Newest loss and metrics.
      progress: Progress of the running `fit`.
    """

    def __init__(self, strategy: Any, tally: StepTally) -> None:
        self.base_step = self.epoch = 0
        self.logs: Mapping[str, float] = {}
        self.progress = ProgressEstimate(None, None)
        self._memory: dict[str, int] = {}
        self._memory_after: int | None = None  # Steps after which the memory is counted; `None` if it has been.
        self._strategy, self._tally = strategy, tally
        self._norm: float | None = None
        self._norm_due = 0.0
        self._before: Tally = tally.latest
        self._traffic_before: Any = None
        self._means: dict[str, Any] = {}  # Means over the last interval with a step.

    def begin_fit(self, progress: ProgressEstimate) -> None:
        """Begins a `fit`. Its variables are counted after its first step, which makes the last of them."""
        self.progress = progress
        self._memory, self._memory_after = {}, self._tally.latest.work.steps

    def collect(self) -> WorkerMetrics:
        """Returns the figures of this moment."""
        now, before = self._tally.latest, self._before
        communication = getattr(self._strategy, "communication", None)
        traffic = None if communication is None else communication.traffic()
        if now.work.steps > before.work.steps:
            self._means = self._of_interval(now, before, traffic)
            self._before, self._traffic_before = now, traffic
        return WorkerMetrics(
            time=time.time(),
            step=self.base_step + now.work.steps,
            epoch=self.epoch,
            steps=now.work.steps,
            restarts=int(os.environ.get(ATTEMPT) or 0),
            resident_bytes=_resident_bytes(),
            cpu_seconds=time.process_time(),
            progress=self.progress.done,
            remaining_seconds=self.progress.remaining_seconds,
            committed_at=newest_commit_at(),
            model_bytes=self._of_model(now),
            logs=dict(self.logs),
            **self._means,
            **self._of_steps(now),
            **({} if traffic is None else self._of_gradients(communication, traffic)),
            **self._of_network(),
            **self._of_reports(),
        )

    def _of_interval(self, now: Tally, before: Tally, traffic: Any) -> dict[str, Any]:
        """Returns the means over the time since the last figures that had a new step."""
        means: dict[str, Any] = {"step_seconds": mean_step_seconds(now, before)}
        if is_reported(now):
            means |= {"share": share_of(now, before), "imbalance": (now.work - before.work).imbalance}
        if traffic is not None:
            recent = traffic if self._traffic_before is None else traffic - self._traffic_before
            means["compression_ratio"] = recent.ratio if recent.sent_bytes else None
        return means

    def _of_model(self, now: Tally) -> dict[str, int]:
        """Returns the memory of the variables. Python looks at each of them, so it is counted once for each `fit`."""
        report = getattr(self._strategy, "memory_report", None)
        if report is not None and self._memory_after is not None and now.work.steps > self._memory_after:
            self._memory_after = None  # First, so that an error costs the figures of one moment only.
            self._memory = report().kinds
        return self._memory

    def _of_steps(self, now: Tally) -> dict[str, Any]:
        if not is_reported(now):
            return {}
        return {"rows": now.rows, "global_rows": now.work.rows, "phase_seconds": now.phase_seconds}

    def _of_gradients(self, communication: Any, traffic: Any) -> dict[str, Any]:
        return {
            "raw_bytes": traffic.raw_bytes,
            "sent_bytes": traffic.sent_bytes,
            "residual_norm": self._residual_norm(communication) if traffic.steps else None,
        }

    def _residual_norm(self, communication: Any) -> float | None:
        """Returns the norm. It costs a pass over the residuals, so it is computed more seldom the longer it takes."""
        began = time.monotonic()
        if began >= self._norm_due:
            self._norm = communication.residual_norm()
            now = time.monotonic()
            self._norm_due = now + (now - began) / _NORM_PART
        return self._norm

    def _of_network(self) -> dict[str, Any]:
        count = getattr(getattr(self._strategy, "extended", None), "sent_and_received_bytes", None)
        counted = None if count is None else count()
        return {} if counted is None else {"network_sent_bytes": counted[0], "network_received_bytes": counted[1]}

    def _of_reports(self) -> dict[str, Any]:
        stragglers = getattr(getattr(self._strategy, "reports", None), "stragglers", None)
        return {} if stragglers is None else {"straggler": stragglers.own_causes()}


def _resident_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
