"""Workers that are done leave together: peers that still need a worker would report its early end as an error."""

import atexit
import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist.failure_kinds import tell_kind, telling_line
from tfdist.failure_report import LEFT, write_report
from tfdist.faults.coordination_store import DONE, CoordinationStore
from tfdist.faults.peer_liveness import PeerLiveness
from tfdist.faults.process_exit import end_with

_FAREWELL_SECONDS = 2.0
_TELL_SECONDS = 20.0  # Healthy workers end within seconds of each other, and log nothing.
_LINE_LENGTH = 500
_installed = False


def leave_together(board: CoordinationStore, liveness: PeerLiveness, timeout_seconds: float) -> None:
    """Makes this process wait for its peers at the end of its program. Only the first call in a process has an effect.

    After an exception a program does not wait, and its peers do not wait for it. After `sys.exit` a program waits with
    any exit code, since a process cannot read its own code. A peer that waits for this worker in the meantime checks
    `CoordinationStore.absent`. A worker that is done ends with exit code 0 if all peers are done, or are still busy at
    the deadline, and with 1 if a peer has failed. Code 1 allows a scheduler that starts workers one by one to restart
    the job.

    Args:
      board: The coordination store of this worker.
      liveness: The liveness connections, through which this worker says goodbye. Otherwise peers would report a loss.
      timeout_seconds: How long to wait for a worker that is not done. A worker that is gone is not waited for.
    """
    global _installed
    if not _installed:
        _installed = True
        _tell_of_exceptions(board, liveness)
        atexit.register(_leave, board, liveness, timeout_seconds, os.getpid())


def hear_aloud(board: CoordinationStore, subject: str, worker: int, timeout_seconds: float) -> Any:
    """Waits for the value that a peer stores when its program ends, and logs a long wait and a wait given up.

    Raises:
      tf.errors.OpError: If no value comes in time, or the coordination service is out of reach.
    """
    soon = min(_TELL_SECONDS, timeout_seconds)
    with contextlib.suppress(tf.errors.DeadlineExceededError):
        return board.hear(subject, worker, soon)
    left = timeout_seconds - soon
    logging.warning("worker %d is done, and waits up to %.0f s more for worker %d", board.worker, left, worker)
    try:
        return board.hear(subject, worker, left)
    except tf.errors.DeadlineExceededError:
        logging.warning("worker %d leaves before worker %d, which was not done in time", board.worker, worker)
        raise


def _tell_of_exceptions(board: CoordinationStore, liveness: PeerLiveness) -> None:
    """Reports an uncaught exception to the peers at once, since a running thread may delay the `atexit` functions."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            goes_on = sys.flags.interactive or hasattr(sys, "ps1")
            if os.getpid() == pid and threading.current_thread() is threading.main_thread() and not goes_on:
                _report(board, liveness, error)

    sys.excepthook = hook


def _report(board: CoordinationStore, liveness: PeerLiveness, error: BaseException) -> None:
    if 0 in liveness.silent:  # A message to worker 0 would wait forever.
        return
    with contextlib.suppress(tf.errors.OpError):  # The error may have been reported already.
        # Without this report, the peers notice only by missing heartbeats, after seconds.
        words = f"worker {board.worker} ended by {type(error).__name__}: {telling_line(str(error))[:_LINE_LENGTH]}"
        board.report_error(tell_kind(words, error))


def _leave(board: CoordinationStore, liveness: PeerLiveness, timeout_seconds: float, pid: int) -> None:
    if os.getpid() != pid:  # A forked child is not a worker.
        return
    error = getattr(sys, "last_value", None)
    done = error is None
    if error is not None:
        _report(board, liveness, error)
    may_leave = False
    try:
        if 0 not in liveness.silent:
            board.say_over(done)
            may_leave = done and _wait_for_others(board, timeout_seconds)
    except tf.errors.DeadlineExceededError:
        may_leave = True  # A peer may be busy for long, such as a chief that saves alone.
    except tf.errors.OpError:  # Worker 0 is gone or cut off. It may have left at its deadline.
        may_leave = liveness.left >= {0} if board.worker else liveness.left >= set(board.others)
    liveness.say_goodbye(done=may_leave)
    if not done:
        end_with(1)
    elif not may_leave:
        logging.error("worker %d is done, but another worker has failed: it ends with exit code 1", board.worker)
        with contextlib.suppress(OSError):
            write_report(LEFT, message="done, but another worker has failed")
        end_with(1, if_none=True)


def _wait_for_others(board: CoordinationStore, timeout_seconds: float) -> bool:
    """Waits until all workers are done or one has failed, and returns whether all are done.

    Raises:
      tf.errors.DeadlineExceededError: If a worker is not done in time.
      tf.errors.OpError: If worker 0 has failed.
    """
    if board.worker:
        together = bool(hear_aloud(board, "leave", 0, timeout_seconds))
        with contextlib.suppress(tf.errors.OpError):  # Worker 0 waits only 2 s for this message.
            board.say("left", True)
        return together
    # Worker 0 hosts the store, so it leaves last.
    deadline = time.monotonic() + timeout_seconds
    together = all(hear_aloud(board, DONE, worker, max(0.1, deadline - time.monotonic())) for worker in board.others)
    board.say("leave", together)
    with contextlib.suppress(tf.errors.OpError):
        for worker in board.others if together else ():
            board.hear("left", worker, _FAREWELL_SECONDS)
    return together
