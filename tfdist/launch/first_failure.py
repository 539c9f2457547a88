"""Finds the failure that caused all others in a group of workers, and describes it for the user and for restarts."""

import dataclasses
import json
import math
import pathlib
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import CHIEF_IS_GONE, CHIEF_SAYS, WAIT_FOR_CHIEF
from tfdist.events.event_file import START, read_header
from tfdist.exit_codes import PREEMPTED, STALLED
from tfdist.failure_kinds import (
    Cause,
    FailureKind,
    exception_in_log,
    is_refusal,
    kind_of_exception,
    telling_line,
    told_kind,
    user_line,
)
from tfdist.failure_report import LEFT
from tfdist.launch.line_splitter import LineSplitter
from tfdist.launch.terminal_filter import is_library_line, without_library_line
from tfdist.launch.worker_group import WorkerExit, describe_exit, signal_name
from tfdist.run_files import RunFiles, log_path

_TAIL_LINES = 30
_TAIL_BYTES = 1 << 16
_FROM_REPORT = ("exception", "message", "stack", "suspect", "step", "section")
_COLOR = re.compile(r"\x1b\[[0-9;]*[mK]")
_EARLIER_SECONDS = 5.0  # A worker may write its events so long before its failure report.
_ARGUMENT_ERROR = 2  # Exit code of argparse, and of Python for a wrong command line.
# Errors that TensorFlow raises in a worker after the loss of a peer.
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError")
_CONSEQUENCE_TEXTS = (
    *("Collective ops is aborted", "Agent must be in CONNECTED state"),
    *(WAIT_FOR_CHIEF, CHIEF_IS_GONE, f"{CHIEF_SAYS}: "),
)
_WITHOUT_HEARTBEATS = re.compile(r"stopped sending heartbeats\):\s*/job:worker/replica:0/task:(\d+)")

FROM_PEER = 2
"""The doubt of a failure that follows from that of a peer."""


def is_consequence(exception: str | None, message: str) -> bool:
    """Returns whether a worker's exception, given by class name and message, only follows from a peer's failure."""
    return exception in _CONSEQUENCES or any(text in message for text in _CONSEQUENCE_TEXTS)


def without_heartbeats(message: str) -> int | None:
    """Returns the worker that, by TensorFlow's message, sends no heartbeats any more; the first of several."""
    found = _WITHOUT_HEARTBEATS.search(message)
    return int(found[1]) if found else None


def reason_in(message: str) -> str:
    """Returns the cause that the message of a worker's exception states, in one line; of a silent peer, what to do."""
    silent = without_heartbeats(message)
    if silent is None:
        return telling_line(message)
    return (
        f"worker {silent} sent no more heartbeats. It is frozen, cut off from the network, or was killed; "
        "look at its machine"
    )


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a worker, from its exit and, if it wrote one, its failure report.

    Attributes:
      attempt: Number of the attempt.
      worker: Id of the worker; None if the group could not start for a reason that concerns no single worker.
      host: Name of the worker's machine.
      time: Time of the failure, in seconds since the epoch.
      kind: "exception", "stall" (or another word of the report), "signal", "exit", "start".
      exit_code: Exit code, as a shell shows it: 128 + n for signal n.
      signal: Name of the signal that killed the worker.
      exception: Name of the exception's class.
      category: Kind of the failure, a `FailureKind`, from which the supervisor decides whether to restart.
      message: Message of the exception.
      reason: Line of the message that states the cause.
      line: Innermost line of the user's own code: "train.py:12 in load".
      stack: Stack of the worker.
      suspect: The peer that the worker believes to be the cause.
      step: Number of training steps that the worker had finished; `None` if it is not known.
      section: Part of the next step.
      has_backups: Whether `step` counts on from backups, so that it tells whether another attempt came further.
      log: Path of the worker's log file.
      output: End of the log file, without lines of libraries.
    """

    attempt: int
    worker: int | None
    host: str
    time: float
    kind: str
    exit_code: int
    signal: str | None = None
    exception: str | None = None
    category: FailureKind = FailureKind.UNKNOWN
    message: str | None = None
    reason: str | None = None
    line: str | None = None
    stack: str | None = None
    suspect: int | None = None
    step: int | None = None
    section: str | None = None
    has_backups: bool = False
    log: str | None = None
    output: str = ""

    @property
    def culprit(self) -> int | None:
        """The worker to leave out of the next attempt if this failure repeats: the suspect, else the failed worker."""
        return self.worker if self.suspect is None else self.suspect

    @property
    def doubt(self) -> int:
        """A number from 0 to 2, to find the first failure: the higher, the more likely a peer caused this failure."""
        if self.kind == LEFT or is_consequence(self.exception, self.message or ""):
            return FROM_PEER
        return 1 if self.kind == "exit" or self.signal == "SIGABRT" else 0

    @property
    def place(self) -> str | None:
        """A text that is equal if the same failure repeats, which limits restarts; None if a peer may be the cause."""
        if self.kind == "exception":
            at = f" at step {self.step}" if self.has_backups else ""
            if told_kind(self.message or ""):  # A peer's failure. Supervisors of other hosts see the same text.
                return f"{telling_line(self.message or '')}{at}"
            lines = re.findall(r'^ *File ".*", line \d+.*$', self.stack or "", re.MULTILINE)
            return f"{self.exception} {lines[-1].strip()}{at}" if self.doubt == 0 and lines else None
        if self.kind == "exit":  # Without the worker, since a peer may be the first to exit next time.
            return f"exit code {self.exit_code}"
        if self.signal:
            return None if self.doubt else f"{self.signal} of worker {self.worker}"
        return f"stall in {self.section} of step {self.step}" if self.kind == "stall" else None

    @property
    def place_has_step(self) -> bool:
        """Whether `place` includes the step. A commit before the next failure at such a place is then no progress."""
        return self.step is not None and (self.kind == "stall" or (self.kind == "exception" and self.has_backups))

    def describe(self) -> str:
        """Describes the failure in one line: "worker 1 was killed by SIGKILL"."""
        if self.worker is None or self.kind == "start":
            return self.message or "the workers could not be started"
        if self.kind == "exception":
            where = f" ({self.line})" if self.line else ""
            return f"worker {self.worker} raised {self.exception}: {self.reason or ''}{where}"
        if self.kind == "exit":
            return f"worker {self.worker} {describe_exit(self.exit_code)}"
        if self.kind == LEFT:
            return f"worker {self.worker} was done, but another worker had failed"
        if self.signal:
            return f"worker {self.worker} was killed by {self.signal}"
        because = "" if self.suspect in (None, self.worker) else f", probably because of worker {self.suspect}"
        return f"worker {self.worker} ended by {self.kind}{because}: {self.message or describe_exit(self.exit_code)}"


def first_failure(
    run_dir: pathlib.Path, attempt: int, by_themselves: Sequence[WorkerExit], asked: Sequence[WorkerExit], since: float
) -> Failure:
    """Returns the failure most likely to have caused all failures of an attempt; among equals, the earliest.

    Args:
      run_dir: Folder of the run.
      attempt: Number of the attempt.
      by_themselves: Workers that ended before the supervisor asked any worker to end. At least one has failed.
      asked: Workers that ended later. Such a worker failed by itself only if it had reported a failure before.
      since: Time when the workers were asked to end, in seconds since the epoch.
    """
    failures = [
        _failure(run_dir, attempt, each, each.returncode, _report(run_dir, attempt, each.index, each.pid))
        for each in by_themselves
        if each.returncode not in (0, PREEMPTED)
    ]
    for each in asked:
        report = _report(run_dir, attempt, each.index, each.pid)
        if report and report["time"] <= since:
            # The exit code that the worker would have had if the supervisor had not ended the worker first.
            returncode = STALLED if report.get("kind") == "stall" else 1
            failures.append(_failure(run_dir, attempt, each, returncode, report))
    return min(failures, key=lambda failure: (failure.doubt, failure.time))


def with_step(failure: Failure, run_dir: pathlib.Path, workers: Sequence[int]) -> Failure:
    """Returns a failure with its step, by the events of the worker; or else of its peers, which finish the same steps.

    Args:
      failure: The failure, after which the workers have written their events.
      run_dir: Folder of the run.
      workers: The workers of this supervisor.
    """
    if failure.step is not None or failure.worker is None:
        return failure
    headers = {worker: read_header(RunFiles(run_dir).events(failure.attempt, worker)) for worker in workers}
    steps = {
        worker: step
        for worker, header in headers.items()
        if header.get("why") != START and header.get("time", 0.0) >= failure.time - _EARLIER_SECONDS
        if isinstance(step := header.get("step"), int)
    }
    # No step may also mean that the worker does not train by Keras' `fit`.
    return dataclasses.replace(failure, step=steps.get(failure.worker, max(steps.values(), default=0)) or None)


def reported_since(run_dir: pathlib.Path, attempt: int, pids: Mapping[int, int]) -> Mapping[int, float]:
    """Returns the times of the reports of workers with these process ids, in seconds since the epoch, by worker."""
    reports = {worker: _report(run_dir, attempt, worker, pid) for worker, pid in pids.items()}
    return {worker: report["time"] for worker, report in reports.items() if report}


def reported_stack(run_dir: pathlib.Path, attempt: int, worker: int) -> str:
    """Returns the traceback in a worker's failure report, or an empty string."""
    return str(_read(RunFiles(run_dir).report(attempt, worker)).get("stack") or "")


def reported_messages(run_dir: pathlib.Path, attempt: int) -> list[str]:
    """Returns the error messages in the failure reports of all workers of an attempt."""
    return [str(_read(path).get("message") or "") for path in RunFiles(run_dir).reports(attempt)]


def not_started(attempt: int, worker: int | None, error: Exception, time: float) -> Failure:
    """Returns the failure of a group of workers that could not be started, because of one worker or in general."""
    return Failure(
        attempt=attempt,
        worker=worker,
        host=socket.gethostname(),
        time=time,
        kind="start",
        exit_code=1,
        exception=type(error).__name__,
        # A port or a process limit may be used up only temporarily.
        category=FailureKind.ENVIRONMENT,
        message=str(error),
        reason=telling_line(str(error)),
    )


def _failure(
    run_dir: pathlib.Path, attempt: int, ended: WorkerExit, returncode: int, report: Mapping[str, Any]
) -> Failure:
    path = log_path(RunFiles(run_dir).attempt(attempt), ended.index)
    output = _end_of(path)
    if not report and returncode == 1:
        report = _report_from_log(output)
    if report.get("kind") == "exception" and returncode < 0:
        returncode = 1  # A signal ended it later, such as SIGKILL because a thread kept it alive.
    message, stack = report.get("message"), report.get("stack")
    reported: dict[str, Any] = {name: report.get(name) for name in _FROM_REPORT}
    if reported["suspect"] is None:
        reported["suspect"] = without_heartbeats(message or "")
    failure = Failure(
        attempt=attempt,
        worker=ended.index,
        host=report.get("host") or socket.gethostname(),
        time=report.get("time", ended.time),
        kind=report.get("kind") or ("signal" if returncode < 0 else "stall" if returncode == STALLED else "exit"),
        exit_code=returncode if returncode >= 0 else 128 - returncode,
        signal=signal_name(-returncode) if returncode < 0 else None,
        log=str(path),
        reason=reason_in(message) if message else None,
        line=report.get("line") or (user_line(stack) if stack and report.get("kind") == "exception" else None),
        output="\n".join(last_lines(output)),
        has_backups=report.get("step") is not None,
        **reported,
    )
    return dataclasses.replace(failure, category=_category(failure, report.get("causes") or (), output))


def _category(failure: Failure, causes: Sequence[Mapping[str, Any]], output: str) -> FailureKind:
    """Returns the kind of a worker's failure, from which the supervisor decides whether to restart."""
    if failure.kind == "exception":
        told = told_kind(failure.message or "")
        return told or kind_of_exception([Cause(tuple(cause["names"]), cause["text"]) for cause in causes])
    if failure.signal or failure.kind in ("stall", LEFT):
        return FailureKind.MACHINE
    if failure.exit_code in (1, _ARGUMENT_ERROR) and is_refusal(output):
        return FailureKind.CONFIGURATION
    return FailureKind.UNKNOWN


def _report_from_log(output: str) -> Mapping[str, Any]:
    """Makes a failure report from the exception in a worker's log, for a worker that failed before `import tfdist`."""
    found = exception_in_log("\n".join(line for line in output.splitlines() if not is_library_line(line)))
    if found is None:
        return {}
    cause, stack = found
    return {
        "kind": "exception",
        "exception": cause.names[0],
        "causes": [dataclasses.asdict(cause)],
        "message": cause.text,
        "stack": stack,
    }


def _report(run_dir: pathlib.Path, attempt: int, worker: int, pid: int) -> Mapping[str, Any]:
    """Returns a worker's failure report. Empty if the report is missing, incomplete or of another process."""
    report = _read(RunFiles(run_dir).report(attempt, worker))
    return report if report.get("pid") == pid and isinstance(report.get("time"), int | float) else {}


def _read(path: pathlib.Path) -> Mapping[str, Any]:
    """Returns the failure report in a file. Empty if the file is missing or incomplete."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def last_lines(output: str) -> list[str]:
    """Returns the last lines of output without colors and lines of libraries; of a progress bar, its last state."""
    splitter = LineSplitter(bar_seconds=math.inf)
    lines = [*splitter.split(output.encode()), *splitter.rest()]
    own = [without_library_line(line.decode(errors="replace")) for line in lines]
    return [_COLOR.sub("", line).rstrip() for line in own if line is not None][-_TAIL_LINES:]


def _end_of(path: pathlib.Path) -> str:
    """Returns the end of a worker's log, at most 64 KiB."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
