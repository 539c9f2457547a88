"""The first failure of a recorded attempt, as the text and the page of `tfdist report` tell it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.first_failure import Failure
from tfdist.readable_numbers import clock
from tfdist.report.recorded_run import WorkerFiles

_HINTS = {
    "SIGKILL": "SIGKILL comes from outside of the program: from a person, a scheduler, or the kernel when memory runs "
    "out. The command dmesg on its host names the processes that the kernel has killed.",
    "SIGSEGV": "SIGSEGV is a crash in native code; the log of the worker has the Python stack.",
    "SIGABRT": "SIGABRT is an abort in native code; the log of the worker has its message.",
    "SIGBUS": "SIGBUS is often a full /dev/shm or a file that was cut while it was mapped into memory.",
}


def first_failure_of(attempts: Sequence[Mapping[str, Any]], workers: Mapping[int, WorkerFiles]) -> Failure | None:
    """Returns the first failure of an attempt: as the supervisors found it, or else by the reports of workers.

    Args:
      attempts: The entry of the attempt in the list of each supervisor.
      workers: The files of each worker in the attempt.
    """
    found: list[Mapping[str, Any]] = [failure for each in attempts if isinstance(failure := each.get("failure"), dict)]
    if not found:
        found = [each.failure for each in workers.values() if each.failure]
    failures = [failure for each in found if (failure := _failure(each)) is not None]
    return min(failures, key=lambda failure: (failure.doubt, failure.time), default=None)


def _failure(content: Mapping[str, Any]) -> Failure | None:
    """Returns the failure in a `failure.json` or in the report of a worker; `None` if it is damaged."""
    names = {field.name for field in dataclasses.fields(Failure)}
    known = {name: value for name, value in content.items() if name in names}
    if not isinstance(known.get("time"), int | float):
        return None
    reason = known.get("reason") or known.get("message")
    defaults = {"attempt": 0, "worker": None, "host": "?", "kind": "exit", "exit_code": 1}
    return Failure(**{**defaults, **known, "reason": reason})


def line_of(failure: Failure) -> str:
    """Returns a line with a failure, its time, host and step."""
    step = "" if failure.step is None else f", after step {failure.step}"
    return f"{failure.describe()} [{clock(failure.time)} on {failure.host}{step}]"


def cause_of(failure: Failure) -> str:
    """Returns the cause of a failure: its exception, its message or the usual cause; empty if nothing is known."""
    if failure.kind == "exception":
        place = f", in {failure.line}" if failure.line else ""
        return f"{failure.exception}: {failure.reason or 'no message'}{place}"
    return failure.reason or _HINTS.get(failure.signal or "", "")
