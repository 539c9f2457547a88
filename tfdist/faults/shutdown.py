"""Workers that are done leave together: one that is early would be an error to those that still need it."""

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

__all__ = ["leave_together"]

_FAREWELL_SECONDS = 2.0
_TELL_SECONDS = 20.0  # Workers of a healthy run, which end within seconds of each other, wait in silence.
_LINE_LENGTH = 500
_installed = False


def leave_together(board: CoordinationStore, lifelines: PeerLiveness, timeout_seconds: float) -> None:
    """Lets this process wait for the others when its program is over; once in a process.

    A program that ends by an exception does not wait, and others do not wait for it. A program that calls `sys.exit`
    waits, whatever the code, which no process can read of itself; a worker that waits for it meanwhile asks, see
    `CoordinationStore.absent`. A worker that is done ends with exit code 0 if all are done, or are still busy at the
    deadline, and with 1 if another has failed. Without that code, a job whose workers are started one by one could not
    start again.

    Args:
      board: Where workers meet.
      lifelines: By which others would take the end of this process for a loss.
      timeout_seconds: How long to wait for a worker that is not done. One that is gone is not waited for.
    """
    global _installed
    if not _installed:
        _installed = True
        _tell_of_exceptions(board, lifelines)
        atexit.register(_leave, board, lifelines, timeout_seconds, os.getpid())


def hear_aloud(board: CoordinationStore, subject: str, worker: int, timeout_seconds: float) -> Any:
    """What another worker says at its end; says in the log for whom this worker waits, and whom it gives up.

    Raises:
      tf.errors.OpError: If it says nothing in time, or the service is out of reach.
    """
    soon = min(_TELL_SECONDS, timeout_seconds)
    with contextlib.suppress(tf.errors.DeadlineExceededError):
        return board.hear(subject, worker, soon)
    left = timeout_seconds - soon
    logging.warning("worker %d is done, and waits %.0f s more for worker %d, which is not", board.worker, left, worker)
    try:
        return board.hear(subject, worker, left)
    except tf.errors.DeadlineExceededError:
        logging.warning("worker %d leaves without worker %d, which did not come to its end", board.worker, worker)
        raise


def _tell_of_exceptions(board: CoordinationStore, lifelines: PeerLiveness) -> None:
    """Lets others know at once: a thread that does not end keeps this process from its end, and its `atexit`."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            goes_on = sys.flags.interactive or hasattr(sys, "ps1")
            if os.getpid() == pid and threading.current_thread() is threading.main_thread() and not goes_on:
                _report(board, lifelines, error)

    sys.excepthook = hook


def _report(board: CoordinationStore, lifelines: PeerLiveness, error: BaseException) -> None:
    if 0 in lifelines.silent:  # A message to it would be waited for without end.
        return
    with contextlib.suppress(tf.errors.OpError):  # it may have been told already
        # Else the others notice by its heartbeats, after seconds.
        words = f"worker {board.worker} ended by {type(error).__name__}: {telling_line(str(error))[:_LINE_LENGTH]}"
        board.report_error(tell_kind(words, error))


def _leave(board: CoordinationStore, lifelines: PeerLiveness, timeout_seconds: float, pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked is no worker
        return
    error = getattr(sys, "last_value", None)
    done = error is None
    if error is not None:
        _report(board, lifelines, error)
    may_leave = False
    try:
        if 0 not in lifelines.silent:
            board.say_over(done)
            may_leave = done and _wait_for_others(board, timeout_seconds)
    except tf.errors.DeadlineExceededError:
        may_leave = True  # Who is not done may be busy for long, as the chief that saves alone.
    except tf.errors.OpError:  # who keeps the board is gone, or cut off: it may have waited long enough
        may_leave = lifelines.left >= {0} if board.worker else lifelines.left >= set(board.others)
    lifelines.say_goodbye(done=may_leave)
    if not done:
        end_with(1)
    elif not may_leave:
        logging.error("worker %d is done, but another has failed: it ends with exit code 1", board.worker)
        with contextlib.suppress(OSError):
            write_report(LEFT, message="done, but another worker has failed")
        end_with(1, if_none=True)


def _wait_for_others(board: CoordinationStore, timeout_seconds: float) -> bool:
    """Returns once all are done, or one has failed; says whether all are done.

    Raises:
      tf.errors.DeadlineExceededError: If one is not done in time.
      tf.errors.OpError: If worker 0 has failed.
    """
    if board.worker:
        together = hear_aloud(board, "leave", 0, timeout_seconds)
        with contextlib.suppress(tf.errors.OpError):  # It does not wait for long.
            board.say("left", True)
        return together
    # Worker 0 keeps the board, so it goes last.
    deadline = time.monotonic() + timeout_seconds
    together = all(hear_aloud(board, DONE, worker, max(0.1, deadline - time.monotonic())) for worker in board.others)
    board.say("leave", together)
    with contextlib.suppress(tf.errors.OpError):
        for worker in board.others if together else ():
            board.hear("left", worker, _FAREWELL_SECONDS)
    return together
