"""The files by which the workers of `tfdist run` and their supervisor talk, and the variables that name their folder.

    <folder of the run>/
      attempt-<n>/          n: number of restarts so far
        worker-<i>.log        output of worker i
        failure-<i>.json      report of worker i about its failure
        events-<i>.jsonl      events and stacks of worker i, when it failed or was asked
        telemetry-<i>.jsonl   figures of worker i every few seconds, by `tfdist.callbacks.Telemetry`
        times-<i>.bin         seconds of worker i by phase so far
        stragglers.jsonl      verdicts about slow workers, by worker 0
        earlier-failure-<i>.json  that of an earlier process of worker i, if it has started again alone
        members.json          members of a job that goes on without lost workers, by worker 0
        make-room             the supervisor asks the workers to save and leave, to restart with more workers
      committed             step and folder of the newest commit, by the workers
      restored              the workers have restored a backup, of this run or an earlier run
      done-with-<hash>      a folder of backups that the supervisor removes when the job is done, by the workers
      run.json              outcome and all attempts, by the supervisor
      failure.json          the failure and all attempts, by the supervisor for the user
      report.html           page that `tfdist report` has written last
      earlier/              logs and reports of the run before, if it had the same folder

Without `tfdist run`, a worker only writes its events, to the folder in TFDIST_EVENTS_DIR. Does not load TensorFlow.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib

from tfdist.members_record import MembersRecord
from tfdist.symlink_safe_file import write_whole

RUN_DIR = "TFDIST_RUN_DIR"
"""Environment variable with the folder of this run, which all attempts on this host share."""

ATTEMPT = "TFDIST_ATTEMPT"
"""Environment variable with the number of restarts so far."""

PAGE = "report.html"
"""Name of the page of `tfdist report`."""


def is_supervised() -> bool:
    """Returns whether this process is a worker of `tfdist run`."""
    # Only the worker is a session leader. Its child processes have the same environment, but must not report failures.
    return RUN_DIR in os.environ and os.getsid(0) == os.getpid()


def is_restarted() -> bool:
    """Returns whether `tfdist run` started this worker after an earlier attempt failed."""
    return os.environ.get(ATTEMPT, "0") != "0"


def log_path(attempt: pathlib.Path, worker: int) -> pathlib.Path:
    """Returns the path of a worker's log in the folder of an attempt."""
    return attempt / f"worker-{worker}.log"


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Paths and contents of the files in the folder of a run, by which workers and supervisor talk."""

    run_dir: pathlib.Path

    @classmethod
    def of_worker(cls) -> "RunFiles | None":
        """Returns the files of the run that has started this process; `None` without `tfdist run`."""
        return cls(pathlib.Path(os.environ[RUN_DIR])) if RUN_DIR in os.environ else None

    def attempt(self, number: int | str) -> pathlib.Path:
        """Returns the folder of an attempt (a start of all workers), with its logs and failure reports."""
        return self.run_dir / f"attempt-{number}"

    def report(self, attempt: int, worker: int) -> pathlib.Path:
        """Returns the path of a worker's failure report, which says why it ended; see `failure_report.py`."""
        return self.attempt(attempt) / f"failure-{worker}.json"

    def earlier_report(self, attempt: int, worker: int) -> pathlib.Path:
        """Returns the path of the failure report of an earlier process of a worker that has started again alone."""
        return self.attempt(attempt) / f"earlier-failure-{worker}.json"

    def reports(self, attempt: int) -> list[pathlib.Path]:
        """Returns the paths of the failure reports that the workers of an attempt have written."""
        return list(self.attempt(attempt).glob("failure-*.json"))

    def events(self, attempt: int | str, worker: int) -> pathlib.Path:
        """Returns the path of a worker's events, with its position and stacks; see `events/event_file.py`."""
        return self.attempt(attempt) / f"events-{worker}.jsonl"

    def telemetry(self, attempt: int | str, worker: int) -> pathlib.Path:
        """Returns the path of a worker's figures; see `telemetry/json_lines_sink.py`."""
        return self.attempt(attempt) / f"telemetry-{worker}.jsonl"

    def times(self, attempt: int | str, worker: int) -> pathlib.Path:
        """Returns the path of a worker's seconds by phase; see `events/time_record.py`."""
        return self.attempt(attempt) / f"times-{worker}.bin"

    def stragglers(self, attempt: int | str) -> pathlib.Path:
        """Returns the path of the verdicts about slow workers; see `events/straggler_file.py`."""
        return self.attempt(attempt) / "stragglers.jsonl"

    def room(self, attempt: int | str) -> pathlib.Path:
        """Returns the path of the file that asks workers to save and leave, so that a larger attempt can follow."""
        return self.attempt(attempt) / "make-room"

    def done_with(self, folder: str) -> pathlib.Path:
        """Returns the path of the file that asks the supervisor to remove a folder of backups when the job is done."""
        return self.run_dir / f"done-with-{hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:16]}"

    @property
    def all_done_with(self) -> list[pathlib.Path]:
        """The paths of all files that ask the supervisor to remove a folder of backups. Each file names its folder."""
        return list(self.run_dir.glob("done-with-*"))

    @property
    def restored(self) -> pathlib.Path:
        """The path of the file that shows the supervisor that workers have restored a backup."""
        return self.run_dir / "restored"

    @property
    def summary(self) -> pathlib.Path:
        """The path of the supervisor's summary of all failures, for the user."""
        return self.run_dir / "failure.json"

    @property
    def outcome(self) -> pathlib.Path:
        """The path of the supervisor's list of all attempts, which exists from the first attempt on."""
        return self.run_dir / "run.json"

    @property
    def committed(self) -> tuple[int, str] | None:
        """The step and the folder of the newest commit (a complete backup); `None` if no worker has reported one."""
        with contextlib.suppress(OSError, ValueError):
            step, _, folder = (self.run_dir / "committed").read_text(errors="surrogateescape").partition("\n")
            return int(step), folder
        return None

    @property
    def committed_at(self) -> float | None:
        """When the newest commit was reported, in seconds since the epoch; `None` if no worker has reported one."""
        with contextlib.suppress(OSError):
            return (self.run_dir / "committed").stat().st_mtime
        return None

    def tell_of_commit(self, step: int, folder: str) -> None:
        """Reports a complete backup to the supervisor, as progress. Raises `OSError` if the file cannot be written."""
        write_whole(self.run_dir / "committed", f"{step}\n{folder}")

    def tell_of_members(self, attempt: int, record: MembersRecord) -> None:
        """Tells the supervisor that the job goes on without lost workers, and its members."""
        write_whole(self.attempt(attempt) / "members.json", json.dumps(record.to_json()))

    def members(self, attempt: int) -> MembersRecord | None:
        """Returns what `tell_of_members` has told; `None` if the job needs all workers."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return MembersRecord.from_json(json.loads((self.attempt(attempt) / "members.json").read_text()))
        return None

    @property
    def for_user(self) -> list[pathlib.Path]:
        """The paths of the files that stay in the folder of the run for the user, such as logs and failure reports."""
        of_workers = ("worker-*.log", "failure-*.json", "events-*.jsonl", "telemetry-*.jsonl", "times-*.bin")
        of_attempts = (*of_workers, "earlier-failure-*.json", "stragglers.jsonl")
        patterns = (*(f"attempt-*/{name}" for name in of_attempts), self.summary.name, self.outcome.name, PAGE)
        return [path for pattern in patterns for path in self.run_dir.glob(pattern)]

    def forget_messages(self) -> None:
        """Removes the files by which workers and supervisor have talked, as they would mislead the next run."""
        of_attempts = [
            path for name in ("make-room", "members.json") for path in self.run_dir.glob(f"attempt-*/{name}")
        ]
        for path in (*of_attempts, self.run_dir / "committed", self.restored, *self.all_done_with):
            path.unlink(missing_ok=True)
