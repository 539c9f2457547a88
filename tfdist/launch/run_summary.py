"""Texts that summarize a run of `tfdist run` when it ends: the outcome, and details of a failure."""

from collections.abc import Sequence

from tfdist.exit_codes import PREEMPTED
from tfdist.launch.first_failure import Failure
from tfdist.readable_numbers import counted, duration

_CRASH = "Fatal Python error: "


def named(workers: Sequence[int]) -> str:
    """Lists workers for a message: "worker 1, worker 3"."""
    return ", ".join(f"worker {worker}" for worker in workers)


def outcome_line(outcome: str, exit_code: int, seconds: float, attempts: int) -> str:
    """Returns a line with the outcome of a run (as in `Attempt`), its duration and its number of attempts."""
    took = f"{duration(seconds)}, {counted(attempts, 'attempt')}"
    if outcome == "done":
        return f"done in {took}"
    if outcome == "preempted":
        return f"gave up after {took}, the last ones without a commit"
    if outcome == "stopped":
        if exit_code == PREEMPTED:
            return f"stopped after {took}; start the same command again to continue from the newest backup"
        return f"stopped without saving after {took}"
    return f"failed after {took}"


def details_of(failure: Failure, *, is_shown: bool, is_reported: bool) -> str:
    """Returns the traceback, crash dump or last lines of the worker that ended a run; empty if already on the terminal.

    Args:
      failure: Failure of the worker.
      is_shown: Whether the terminal shows this worker's output, without the parts that `TerminalFilter` removes.
      is_reported: Whether the worker has reported its traceback. `TerminalFilter` removes reported tracebacks.
    """
    if failure.kind == "exception" and failure.stack:
        return failure.stack.rstrip() if is_reported or not is_shown else ""
    if failure.kind not in ("exit", "signal"):
        return ""  # The message of a stall names the waiting workers. The log has all stacks.
    if not is_shown:
        return failure.output
    _, found, dump = failure.output.partition(_CRASH)
    return found + dump
