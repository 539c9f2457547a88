"""The attempts of a run: the result of each, and the files `run.json` and `failure.json` with all of them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from tfdist.launch.absences import Absence
from tfdist.launch.first_failure import Failure
from tfdist.readable_numbers import counted
from tfdist.run_files import RunFiles
from tfdist.symlink_safe_file import write_whole


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all workers by `tfdist run`, with its result.

    Attributes:
      number: Number of earlier attempts.
      workers: Number of workers started here.
      time: Start of the attempt, in seconds since the epoch.
      seconds: Duration of the attempt.
      outcome: "done", "failed" or "stopped" (by a signal). Or the job has saved: "preempted" (to be started again) or
        "resized" (to continue with more workers).
      exit_code: Exit code of the attempt, as a shell shows it.
      committed: Step of the newest commit, None before the first commit.
      progressed: Whether the attempt made a commit.
      again: Whether the attempt repeated steps that an earlier attempt had committed.
      failure: First failure of a failed attempt.
      ended: Workers that still ran when another worker failed, and that the supervisor then ended.
      absences: In a job that goes on without lost workers, the time without each of these workers.
    """

    number: int
    workers: int
    time: float
    seconds: float
    outcome: str
    exit_code: int
    committed: int | None
    progressed: bool
    again: bool
    failure: Failure | None = None
    ended: tuple[int, ...] = ()
    absences: tuple[Absence, ...] = ()

    def describe(self, *, reason: bool = True) -> str:
        """Describes the attempt in one line, with or without the reason of a failure."""
        committed = "" if self.committed is None else f", newest backup step-{self.committed}"
        why = f": {self.failure.describe()}" if self.failure and reason else ""
        workers = counted(self.workers, "worker")
        return f"attempt {self.number}: {workers}, {self.seconds:.1f} s{committed}, {self.outcome}{why}"


class Attempts:
    """The ended attempts of a run, and the files about them.

    Args:
      files: The files of the run.

    Attributes:
      ended: The ended attempts, in their order.
    """

    def __init__(self, files: RunFiles):
        self._files = files
        self.ended: list[Attempt] = []

    @property
    def last(self) -> Attempt:
        """The last ended attempt."""
        return self.ended[-1]

    def add(self, attempt: Attempt) -> None:
        """Adds an attempt that has ended."""
        self.ended.append(attempt)

    def run_start(self, attempt_start: float) -> float:
        """Returns the start of the run, if the present attempt started at `attempt_start`."""
        return self.ended[0].time if self.ended else attempt_start

    def write(
        self,
        outcome: str,
        exit_code: int | None,
        running: Mapping[str, Any] | None = None,
        absences: Sequence[Absence] = (),
    ) -> None:
        """Writes `run.json`, with all attempts; `running` describes the one that runs, with its `absences`."""
        attempts = self._described()
        if running:
            told = [dataclasses.asdict(absence) for absence in absences]
            attempts.append({**running, "outcome": "running", "absences": told})
        try:
            text = json.dumps({"outcome": outcome, "run_exit_code": exit_code, "attempts": attempts}, indent=1)
            write_whole(self._files.outcome, text)
        except OSError as error:
            logging.error("run.json could not be written: %s", error)  # The job continues.

    def write_failures(self, outcome: str, exit_code: int | None) -> None:
        """Writes `failure.json` after a failure, with the failure of the last failed attempt and all attempts."""
        failures = [attempt.failure for attempt in self.ended if attempt.failure]
        if not failures:
            return
        run = {"outcome": outcome, "run_exit_code": exit_code}
        try:
            text = json.dumps({**run, **dataclasses.asdict(failures[-1]), "attempts": self._described()}, indent=1)
            write_whole(self._files.summary, text)
        except OSError as error:
            logging.error("failure.json could not be written: %s", error)  # The job continues.

    def _described(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(attempt) for attempt in self.ended]
