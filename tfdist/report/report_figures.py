"""Policy: the figures of the page of `tfdist report`, from the files of a run. Pure functions, without a clock."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.events.time_record import TimeRecord
from tfdist.launch.first_failure import Failure
from tfdist.report.goodput import AGAIN, LOST, RESTART, TimeAccount
from tfdist.report.goodput_table import account_of
from tfdist.report.recorded_failure import first_failure_of
from tfdist.report.recorded_run import RecordedRun, WorkerFiles, attempt_in, number_of_workers
from tfdist.report.training_speed import StepSpeed, combined, rows_of, speed_of, steps_of
from tfdist.telemetry.telemetry_file import TelemetryFile

Telemetry = Mapping[int, Mapping[int, TelemetryFile]]
"""Files of figures by number of the attempt and by worker."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a failure.

    Attributes:
      steps: Training steps that were done again, or that the job ended without.
      lost_seconds: Time of these steps.
      restart_seconds: Time from the failure to the next attempt.
      again_seconds: Time of the next attempt for start-up, tracing and restoring.
    """

    steps: int
    lost_seconds: float
    restart_seconds: float
    again_seconds: float

    @property
    def seconds(self) -> float:
        """All of the time."""
        return self.lost_seconds + self.restart_seconds + self.again_seconds


@dataclasses.dataclass(frozen=True)
class AttemptFigures:
    """One attempt.

    Attributes:
      number: Its number.
      workers: Its number of workers.
      start: Its start, in seconds since the epoch; `None` without a supervisor's record.
      seconds: Its duration; `None` if unknown.
      outcome: Its outcome, as in `Attempt`; empty if unknown.
      committed: Number of the newest backup at its end.
      steps: Steps of the model before its first step and after its last.
      speed: How fast it trained; `None` if it did not train.
      saves: Times of backups, in seconds since the epoch, as far as they are known.
      failure: Its first failure.
      cost: Cost of this failure; `None` without a failure or without times.
      hides_steps: Whether it trained in a loop of the script's own that has not told any steps.
    """

    number: int
    workers: int
    start: float | None
    seconds: float | None
    outcome: str
    committed: int | None
    steps: tuple[int, int]
    speed: StepSpeed | None
    saves: Sequence[float]
    failure: Failure | None
    cost: Cost | None
    hides_steps: bool = False

    @property
    def end(self) -> float | None:
        """Its end, in seconds since the epoch."""
        return None if self.start is None or self.seconds is None else self.start + self.seconds


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """The figures of a run.

    Attributes:
      recorded: The files.
      telemetry: The figures of workers.
      account: The time of the run by part; `None` if it is unknown.
      attempts: The attempts.
      kept_rows: Rows of kept steps; `None` if they are unknown.
      repeated_rows: Rows of the steps that were lost.
    """

    recorded: RecordedRun
    telemetry: Telemetry
    account: TimeAccount | None
    attempts: Sequence[AttemptFigures]
    kept_rows: float | None
    repeated_rows: float | None

    @property
    def outcome(self) -> str:
        """Outcome of the run, as in `run.json`; "running" if its supervisor has not written its end; may be empty."""
        told = [str(each.get("outcome")) for each in self.recorded.summaries if each.get("outcome")]
        return next((each for each in told if each == "failed"), told[0] if told else "")

    @property
    def speed(self) -> StepSpeed | None:
        """How fast the whole run trained; `None` if it did not train."""
        return combined([each.speed for each in self.attempts if each.speed is not None])

    @property
    def start(self) -> float | None:
        """Start of the first attempt, in seconds since the epoch."""
        return next((each.start for each in self.attempts if each.start is not None), None)

    @property
    def seconds(self) -> float | None:
        """Time from the start of the first attempt to the end of the last."""
        ends = [each.end for each in self.attempts if each.end is not None]
        return None if self.start is None or not ends else max(ends) - self.start


def figures_of(recorded: RecordedRun, telemetry: Telemetry) -> RunFigures:
    """Returns the figures of a run.

    Raises:
      TypeError: If damaged files have impossible values; also `ValueError`, `LookupError` and other built-in errors.
    """
    account = account_of(recorded)
    attempts = []
    for number, workers in recorded.attempts.items():
        told = [attempt for each in recorded.summaries if (attempt := attempt_in(each, number))]
        told = told or [each.attempt for each in workers.values() if each.attempt]
        attempts.append(_attempt(number, workers, told, telemetry.get(number, {}), account))
    lost = {each.attempt: each.steps for each in account.lost} if account else {}
    rows = [rows_of(each.steps, lost.get(each.number, 0), telemetry.get(each.number, {})) for each in attempts]
    known = [each for each in rows if each is not None]
    is_known = bool(known) and len(known) == len(rows)
    return RunFigures(
        recorded,
        telemetry,
        account,
        attempts,
        sum(kept for kept, _ in known) if is_known else None,
        sum(repeated for _, repeated in known) if is_known else None,
    )


def _attempt(
    number: int,
    workers: Mapping[int, WorkerFiles],
    told: Sequence[Mapping[str, Any]],
    telemetry: Mapping[int, TelemetryFile],
    account: TimeAccount | None,
) -> AttemptFigures:
    records = [each.times for each in workers.values() if each.times is not None]
    failure = first_failure_of(told, workers)
    start, seconds, committed = (_first(told, name) for name in ("time", "seconds", "committed"))
    if seconds is None and start is not None and records:
        seconds = max(max(each.time for each in records) - start, 0.0)
    return AttemptFigures(
        number=number,
        workers=number_of_workers(workers),
        start=start,
        seconds=seconds,
        outcome=str(next((each["outcome"] for each in told if each.get("outcome")), "")),
        committed=None if committed is None else int(committed),
        steps=steps_of(records),
        speed=speed_of(records, telemetry),
        saves=_saves(records, telemetry, start),
        failure=failure,
        cost=None if failure is None or account is None else _cost(number, account),
        hides_steps=any(each.hides_steps for each in records) and not any(each.steps for each in records),
    )


def _first(told: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns the number that the first supervisor with one has told."""
    values = [each.get(name) for each in told]
    return next((each for each in values if isinstance(each, int | float) and not isinstance(each, bool)), None)


def _saves(records: Sequence[TimeRecord], telemetry: Mapping[int, TelemetryFile], start: float | None) -> list[float]:
    """Returns the times of backups: of all with telemetry, otherwise of the newest."""
    told = {each.committed_at for file in telemetry.values() for each in file.figures if each.committed_at}
    own = sorted(each for each in told if start is None or each > start)
    # The record has the moment when the worker had copied its state.
    return own or sorted({record.start + sum(save.seconds.values()) for record in records[:1] for save in record.saves})


def _cost(number: int, account: TimeAccount) -> Cost | None:
    """Returns the cost of the failure of an attempt; `None` if the times of the attempt are not recorded."""
    parts = account.attempts.get(number)
    if parts is None:
        return None
    after = min((each for each in account.attempts if each > number), default=None)
    return Cost(
        sum(each.steps for each in account.lost if each.attempt == number),
        parts.get(LOST, 0.0),
        parts.get(RESTART, 0.0),
        account.attempts[after].get(AGAIN, 0.0) if after is not None else 0.0,
    )
