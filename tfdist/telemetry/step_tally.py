"""Adds up the rows and times of training steps, on the thread that ends a step. Does not load TensorFlow."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from tfdist.events.phase_names import CALLBACK, COMPUTE, EXCHANGE, INPUT, SAVE, VALIDATION
from tfdist.strategies.step_phases import StepPhases
from tfdist.telemetry.worker_metrics import FIT_START, PHASES


@dataclasses.dataclass(frozen=True)
class ReplicaWork:
    """Sums over some training steps of all replicas.

    Attributes:
      steps: Number of steps.
      rows: Rows of all replicas.
      mean_seconds: Compute time of a step, as the mean of all replicas.
      longest_seconds: Compute time of a step, as the longest of all replicas.
    """

    steps: int = 0
    rows: int = 0
    mean_seconds: float = 0.0
    longest_seconds: float = 0.0

    @classmethod
    def of(cls, report: Any) -> "ReplicaWork":
        """Returns the work of the step of a `StepReport`."""
        seconds = report.compute_seconds.tolist()  # A tenth of the time of NumPy's reductions.
        return cls(1, sum(report.rows.tolist()), sum(seconds) / len(seconds), max(seconds))

    def __add__(self, more: "ReplicaWork") -> "ReplicaWork":
        """The sum of two sums."""
        return ReplicaWork(
            self.steps + more.steps,
            self.rows + more.rows,
            self.mean_seconds + more.mean_seconds,
            self.longest_seconds + more.longest_seconds,
        )

    def __sub__(self, before: "ReplicaWork") -> "ReplicaWork":
        """The work since an earlier sum."""
        own, other = dataclasses.astuple(self), dataclasses.astuple(before)
        return ReplicaWork(*(now - then for now, then in zip(own, other, strict=True)))

    @property
    def imbalance(self) -> float:
        """The longest compute time of a step divided by the mean of all replicas; 1 is perfect."""
        return self.longest_seconds / self.mean_seconds if self.mean_seconds else 1.0


@dataclasses.dataclass(frozen=True)
class Tally:
    """Sums over all training steps so far.

    Attributes:
      work: Sums over all replicas.
      rows: Rows of this worker's replicas.
      phase_seconds: Seconds of this worker by phase.
      first_end, last_end: Ends of the first and of the last step, in seconds on the monotonic clock.
    """

    work: ReplicaWork
    rows: int
    phase_seconds: dict[str, float]
    first_end: float
    last_end: float


class StepTally:
    """Adds up training steps. One thread adds, another reads; a reader sees whole steps only.

    Args:
      own_replicas: Numbers of this worker's replicas.
    """

    def __init__(self, own_replicas: slice) -> None:
        self._own = own_replicas
        self._pauses = dict.fromkeys((VALIDATION, SAVE), 0.0)  # Since the last step.
        self._is_first = True
        now = self._since = time.monotonic()  # End of the last step, or begin of the `fit`.
        self.latest = Tally(ReplicaWork(), 0, dict.fromkeys(PHASES, 0.0), now, now)

    def begin(self) -> None:
        """Notes that a `fit` begins."""
        self._is_first, self._since = True, time.monotonic()
        self._pauses = dict.fromkeys(self._pauses, 0.0)

    def pause(self, phase: str, seconds: float) -> None:
        """Notes a part of the time since the last step: `VALIDATION` or `SAVE`."""
        self._pauses[phase] += seconds

    def add(self, report: Any, phases: StepPhases) -> None:
        """Adds a training step, by its `StepReport`."""
        now = time.monotonic()
        inside = {INPUT: phases.input, COMPUTE: phases.compute, EXCHANGE: phases.exchange}
        outside = now - self._since - sum(inside.values())
        self._add(now, self._divided(outside), inside, ReplicaWork.of(report), sum(report.rows[self._own].tolist()))
        self._is_first = False

    def add_batches(self, steps: int) -> None:
        """Adds training steps that do not report, so that only their number and time are known."""
        self._add(time.monotonic(), {}, {}, ReplicaWork(steps), 0)

    def end(self) -> None:
        """Notes that a `fit` ends, and counts the time since its last step."""
        now, before = time.monotonic(), self.latest
        if is_reported(before):
            self._add(now, self._divided(now - self._since), {}, ReplicaWork(), 0)

    def _divided(self, outside: float) -> dict[str, float]:
        if self._is_first:
            return {FIT_START: max(outside, 0.0)}
        return divide_outside(outside, self._pauses)

    def _add(self, now: float, outside: Any, inside: Any, work: ReplicaWork, rows: int) -> None:
        before, seconds = self.latest, {**outside, **inside}
        self.latest = Tally(  # One assignment, so that a reader needs no lock.
            before.work + work,
            before.rows + rows,
            {phase: before.phase_seconds[phase] + seconds.get(phase, 0.0) for phase in PHASES},
            before.first_end if before.work.steps else now,
            now if work.steps else before.last_end,
        )
        self._pauses = dict.fromkeys(self._pauses, 0.0)
        self._since = now


def divide_outside(seconds: float, pauses: Mapping[str, float]) -> dict[str, float]:
    """Divides the time outside of steps: pauses are known, the rest is of callbacks. Clocks may differ a little."""
    told = sum(pauses.values())
    scale = min(max(seconds, 0.0) / told, 1.0) if told else 1.0
    parts = {phase: each * scale for phase, each in pauses.items()}
    return {**parts, CALLBACK: max(seconds - told, 0.0)}


def mean_step_seconds(now: Tally, before: Tally) -> float | None:
    """Returns the mean seconds of the steps since `before`, from end to end; `None` without two ends."""
    steps = now.work.steps - before.work.steps
    since = before.last_end if before.work.steps else now.first_end
    counted = steps if before.work.steps else steps - 1
    return (now.last_end - since) / counted if counted > 0 else None


def share_of(now: Tally, before: Tally) -> float | None:
    """Returns the part of all rows since `before` that this worker had; `None` without rows."""
    rows = now.work.rows - before.work.rows
    return (now.rows - before.rows) / rows if rows else None


def is_reported(tally: Tally) -> bool:
    """Returns whether the steps have reported their rows and times."""
    return tally.work.rows > 0 or any(tally.phase_seconds.values())
