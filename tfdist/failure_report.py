"""What a worker of `tfdist run` leaves behind when it fails: one JSON file, for the supervisor that started it.

And the file by which that asks for room. Without `tfdist run` nothing is written. Loads neither TensorFlow nor, before
a failure, anything beside the standard library.
"""

import dataclasses
import json
import os
import pathlib
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

__all__ = [
    "ATTEMPT",
    "LEFT",
    "RUN_DIR",
    "install_hook",
    "is_restarted",
    "is_supervised",
    "note_step",
    "report_path",
    "restored_path",
    "room_path",
    "write_report",
    "write_whole",
]

RUN_DIR = "TFDIST_RUN_DIR"
"""The environment variable with the folder of this run, shared by all its attempts on this host."""

ATTEMPT = "TFDIST_ATTEMPT"
"""The environment variable with the number of restarts so far."""

LEFT = "left"
"""The kind of report of a worker that was done, and ends as a failure since another has failed."""

_step: int | None = None


def install_hook() -> None:
    """Reports the exception that ends this process, if it is a worker of `tfdist run`. A user's own hook still runs."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if not isinstance(error, KeyboardInterrupt):  # asked to end
                from tfdist.failure_kinds import causes_of  # takes time that `import tfdist` need not

                stack = "".join(traceback.format_exception(kind, error, trace))
                write_report(
                    "exception",
                    exception=kind.__name__,
                    causes=[dataclasses.asdict(cause) for cause in causes_of(error)],
                    message=str(error),
                    stack=stack,
                    step=_step,
                )
        finally:
            before(kind, error, trace)

    sys.excepthook = hook


def note_step(step: int) -> None:
    """Takes note of the global step that training has come to, for the report of an exception. Costs an assignment."""
    global _step
    _step = step


def write_report(
    kind: str,
    *,
    exception: str | None = None,
    causes: Sequence[Mapping[str, Any]] = (),
    message: str | None = None,
    stack: str | None = None,
    suspect: int | None = None,
    step: int | None = None,
    section: str | None = None,
) -> bool:
    """Says why this worker ends. The first report of a process counts, later ones are dropped.

    Args:
      kind: "exception", "stall", or another word.
      exception: The name of its class.
      causes: The exception and those that it was raised from, as `failure_kinds.Cause` has them.
      message: What it says.
      stack: Where this worker was.
      suspect: The worker that is believed to be the cause, if another.
      step: The step this worker was in.
      section: The part of that step.

    Returns:
      Whether this process is a worker of `tfdist run`; no file is written elsewhere.

    Raises:
      OSError: If the file cannot be written.
    """
    if not is_supervised():
        return False
    from tfdist.cluster import ClusterSpec  # takes time that `import tfdist` need not

    spec = ClusterSpec.from_env()
    worker = spec.worker_id if spec else 0
    path = report_path(pathlib.Path(os.environ[RUN_DIR]), int(os.environ[ATTEMPT]), worker)
    if not path.exists():
        report = {
            "worker": worker,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "kind": kind,
            "exception": exception,
            "causes": list(causes),
            "message": message,
            "stack": stack,
            "suspect": suspect,
            "step": step,
            "section": section,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(report, indent=1))
    return True


def is_supervised() -> bool:
    """Whether this process is a worker of `tfdist run`."""
    # A worker leads its session. What it starts has the same environment, but its end is the worker's to judge.
    return RUN_DIR in os.environ and os.getsid(0) == os.getpid()


def is_restarted() -> bool:
    """Whether `tfdist run` has started this worker after the failure of another attempt."""
    return os.environ.get(ATTEMPT, "0") != "0"


def report_path(run_dir: pathlib.Path, attempt: int, worker: int) -> pathlib.Path:
    """The file of a worker's report."""
    return run_dir / f"attempt-{attempt}" / f"failure-{worker}.json"


def room_path(run_dir: pathlib.Path, attempt: int | str) -> pathlib.Path:
    """The file by which the supervisor asks workers to save and leave, to start again with more of them."""
    return run_dir / f"attempt-{attempt}" / "make-room"


def restored_path(run_dir: pathlib.Path) -> pathlib.Path:
    """The file by which workers tell that they have restored a backup, of this run or one before."""
    return run_dir / "restored"


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      OSError: If it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with partial.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
