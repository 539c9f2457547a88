"""Failure reports: a failing worker of `tfdist run` writes one JSON file for the supervisor that started it.

Also names the file with which the supervisor asks for room. Without `tfdist run`, no file is written. Does not load
TensorFlow and, before a failure, loads only the standard library.
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
"""Environment variable with the folder of this run, which all attempts on this host share."""

ATTEMPT = "TFDIST_ATTEMPT"
"""Environment variable with the number of restarts so far."""

LEFT = "left"
"""Report kind of a worker that had finished, but exits as a failure because another worker failed."""

_step: int | None = None


def install_hook() -> None:
    """Makes a worker of `tfdist run` report the exception that ends its process. A user's own hook still runs."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if not isinstance(error, KeyboardInterrupt):  # The supervisor or user asked it to end.
                from tfdist.failure_kinds import causes_of  # Imported late to keep `import tfdist` fast.

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
    """Records the current global step for the report of an exception. Costs one assignment."""
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
    """Writes why this worker ends. Keeps only the first report of a worker in an attempt.

    Args:
      kind: "exception", "stall", or another word.
      exception: Name of the exception's class.
      causes: The exception and the chain of its causes, with the attributes of `failure_kinds.Cause`.
      message: Message of the exception or stall.
      stack: Stack of this worker.
      suspect: The peer believed to be the cause, if any.
      step: Step of this worker.
      section: Part of that step.

    Returns:
      Whether this process is a worker of `tfdist run`. If not, no file is written.

    Raises:
      OSError: If the file cannot be written.
    """
    if not is_supervised():
        return False
    from tfdist.cluster import ClusterSpec  # Imported late to keep `import tfdist` fast.

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
    """Returns whether this process is a worker of `tfdist run`."""
    # Only the worker is a session leader. Its child processes have the same environment, but must not report failures.
    return RUN_DIR in os.environ and os.getsid(0) == os.getpid()


def is_restarted() -> bool:
    """Returns whether `tfdist run` started this worker after an earlier attempt failed."""
    return os.environ.get(ATTEMPT, "0") != "0"


def report_path(run_dir: pathlib.Path, attempt: int, worker: int) -> pathlib.Path:
    """Returns the path of a worker's report."""
    return run_dir / f"attempt-{attempt}" / f"failure-{worker}.json"


def room_path(run_dir: pathlib.Path, attempt: int | str) -> pathlib.Path:
    """Returns the path of the file with which the supervisor asks workers to save and leave, to restart with more."""
    return run_dir / f"attempt-{attempt}" / "make-room"


def restored_path(run_dir: pathlib.Path) -> pathlib.Path:
    """Returns the path of the file that shows that workers restored a backup, of this run or an earlier run."""
    return run_dir / "restored"


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: completely or not at all.

    Raises:
      OSError: If the file cannot be written.
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
