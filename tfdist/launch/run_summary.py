"""Texts that summarize a run of `tfdist run` when it ends: the outcome, the duration, details of a failure."""

from collections.abc import Sequence

from tfdist.exit_codes import PREEMPTED
from tfdist.launch.first_failure import Failure

_CRASH = "Fatal Python error: "


def duration(seconds: float) -> str:
    """Formats a time span for people: "7.2 s", "72 s", "12 min 5 s", "3 h 12 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Formats a number of bytes for people: "512 B", "1.2 MB"."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:,.3g} TB"


def short_duration(seconds: float) -> str:
    """Formats a time span in little room: "7 s", "12 min", "3 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.0f} h"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
            return f"saved and stopped after {took}; start the same command again to continue"
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
