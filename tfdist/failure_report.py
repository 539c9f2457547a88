"""Failure reports: a failing worker of `tfdist run` writes one JSON file for the supervisor that started it.

Does not load TensorFlow and, before a failure, loads only the standard library.
"""

import dataclasses
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tfdist.run_files import ATTEMPT, RunFiles, is_supervised
from tfdist.symlink_safe_file import write_whole

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
    """Records the current global step, for the failure report if an exception ends this worker. Costs an assignment."""
    global _step
    _step = step


def write_report(
    kind: str,
    *,
    exception: str | None = None,
    causes: Sequence[Mapping[str, Any]] = (),
    message: str | None = None,
    stack: str | None = None,
    line: str | None = None,
    suspect: int | None = None,
    step: int | None = None,
    section: str | None = None,
) -> bool:
    """Writes the failure report of this worker: why it ends. Keeps only a worker's first report in an attempt.

    Args:
      kind: "exception", "stall", or another word.
      exception: Name of the exception's class.
      causes: The exception and the chain of its causes, with the attributes of `failure_kinds.Cause`.
      message: Message of the exception or stall.
      stack: Stack of this worker.
      line: Line of the user's code at which the suspect, or else this worker, hangs.
      suspect: The peer believed to be the cause, if any.
      step: Step of this worker.
      section: Part of that step.

    Returns:
      Whether this process is a worker of `tfdist run`. If not, no file is written.

    Raises:
      OSError: If the file cannot be written.
    """
    files = RunFiles.of_worker()
    if files is None or not is_supervised():
        return False
    from tfdist.cluster import ClusterSpec  # Imported late to keep `import tfdist` fast.

    spec = ClusterSpec.from_env()
    worker = spec.worker_id if spec else 0
    path = files.report(int(os.environ[ATTEMPT]), worker)
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
            "line": line,
            "suspect": suspect,
            "step": step,
            "section": section,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(report, indent=1))
    return True
