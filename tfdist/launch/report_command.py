"""The command `tfdist report`: says in the terminal what happened in a run, from the files in its folder."""

import argparse
import dataclasses
import pathlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from tfdist.events.asked_by_signal import process_start
from tfdist.events.event_file import ASKED, EXCHANGE, LOST_PEER, START, Call, EventFile
from tfdist.failure_kinds import user_line
from tfdist.launch.first_failure import FROM_PEER, Failure
from tfdist.launch.goodput_table import account_of, lines_of_account
from tfdist.launch.missing_workers import (
    LastExchange,
    LastPosition,
    MissedExchange,
    elsewhere,
    last_exchange,
    last_position,
    missed_exchanges,
)
from tfdist.launch.recorded_run import RecordedRun, WorkerFiles, attempt_in, read_run
from tfdist.launch.run_summary import duration, named

_MOST_EXCHANGES = 5
_MOST_WORKERS = 10_000
_LONG_SECONDS = 5.0
"""How long a worker of a job that runs must have waited for the report to name it."""

_NO_FAILURE_REPORT = "no failure.json, so it still goes on, had no failure, lost its supervisor, or had none"
_WELL = ("done", "preempted", "resized")
"""Outcomes of attempts whose workers had no reason to write events."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist report`."""
    parser.add_argument(
        "run_dir",
        type=pathlib.Path,
        metavar="RUN_DIR",
        help="folder of the run: that of --log-dir, or the one that `tfdist run` has named",
    )
    parser.add_argument("--stacks", action="store_true", help="print the stacks of all threads of all workers")


def run(args: argparse.Namespace) -> int:
    """Runs `tfdist report`, and returns its exit code: 1 if the folder is no folder of a run."""
    try:
        recorded = read_run(args.run_dir)
    except (OSError, ValueError) as error:
        logging.error("%s", error)
        return 1
    for line in lines_of(recorded, stacks=args.stacks):
        print(line)
    return 0


def lines_of(recorded: RecordedRun, *, stacks: bool = False) -> Iterator[str]:
    """Yields the lines of the report of a run.

    Args:
      recorded: Content of the run's folder.
      stacks: Whether to add the stacks of all threads.
    """
    told = [_outcome(each) for each in recorded.summaries]
    yield f"run in {recorded.folder}: {'; '.join(dict.fromkeys(told)) or _NO_FAILURE_REPORT}"
    yield from _time_of(recorded)
    for number, workers in recorded.attempts.items():
        yield ""
        try:
            yield from list(_lines_of_attempt(number, workers, recorded.summaries, stacks))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            yield f"attempt {number}: its files are damaged, and have values of another type than expected ({error})"
    if recorded.problems:
        yield ""
        yield from (f"problem: {problem}" for problem in recorded.problems)


def _outcome(summary: Mapping[str, Any]) -> str:
    if summary.get("outcome") == "running" and summary.get("run_exit_code") is None:
        return "running, or its supervisor was killed"
    return f"{summary.get('outcome')}, exit code {summary.get('run_exit_code')}"


def _time_of(recorded: RecordedRun) -> Iterator[str]:
    """Yields lines about goodput, and what the time was spent on."""
    try:
        account = account_of(recorded)
        lines = list(lines_of_account(account)) if account else []
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        lines = [f"the time of the run is unknown: its files have values of another type than expected ({error})"]
    if lines:
        yield ""
        yield from lines


def _lines_of_attempt(
    number: int, workers: Mapping[int, WorkerFiles], summaries: Sequence[Mapping[str, Any]], stacks: bool
) -> Iterator[str]:
    attempts = [attempt for each in summaries if (attempt := attempt_in(each, number))]
    files = {worker: events for worker, each in workers.items() if (events := each.events) and _has_position(events)}
    count = max([*(_workers_in(each.events) for each in workers.values()), *(i + 1 for i in workers)], default=0)
    yield _title(number, attempts, count)
    failure = _first_failure(attempts, workers)
    if failure is not None:
        step = "" if failure.step is None else f", after step {failure.step}"
        yield f"  first failure: {failure.describe()} [{_clock(failure.time)} on {failure.host}{step}]"
    present = {worker: events for worker, events in files.items() if not _is_before(events, failure)}
    yield from (f"  {line}" for line in _missing(present, range(count), failure))
    ended_well = any(each.get("outcome") in _WELL for each in attempts)
    for worker in range(count):
        if ended_well and worker not in files:
            continue
        yield f"  worker {worker}: {_place_of(workers.get(worker, WorkerFiles()))}"
        events = files.get(worker)
        if events is not None:
            yield from (f"    {line}" for line in (_all_calls(events) if stacks else _user_calls(events)))


def _title(number: int, attempts: Sequence[Mapping[str, Any]], count: int) -> str:
    parts = [f"{count} worker{'' if count == 1 else 's'}"]
    for attempt in attempts[:1]:
        if isinstance(attempt.get("seconds"), int | float):
            parts.append(duration(attempt["seconds"]))
        if attempt.get("committed") is not None:
            parts.append(f"newest backup step-{attempt['committed']}")
        parts.append(str(attempt.get("outcome")))
    return f"attempt {number}: {', '.join(parts)}"


def _is_before(events: EventFile, failure: Failure | None) -> bool:
    """Whether a worker wrote its events before a failure, so that they tell nothing of it."""
    return failure is not None and events.header.get("why") == ASKED and events.header["time"] < failure.time


def _first_failure(attempts: Sequence[Mapping[str, Any]], workers: Mapping[int, WorkerFiles]) -> Failure | None:
    """Returns the first failure of an attempt: as the supervisors found it, or else by the reports of workers."""
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


def _missing(files: Mapping[int, EventFile], workers: Sequence[int], failure: Failure | None) -> Iterator[str]:
    """Yields lines that name the workers missing from exchanges."""
    missed = missed_exchanges(files)
    if failure is None:  # The workers of a job that runs wait for each other in every step.
        missed = [each for each in missed if max(each.waiting.values()) >= _LONG_SECONDS]
    for each in missed[:_MOST_EXCHANGES]:
        yield _missed(each)
    if len(missed) > _MOST_EXCHANGES:
        yield f"and {len(missed) - _MOST_EXCHANGES} more exchanges were not complete"
    absent = {worker for each in missed for worker in each.absent}
    if failure is not None and not missed:
        culprit = failure.suspect if failure.doubt == FROM_PEER else failure.culprit
        absent.update(elsewhere(files, workers, culprit))
        if absent:
            yield f"{named(sorted(absent))} did not take part in what the other workers waited for"
    for worker in sorted(absent | (set(workers) - files.keys() if failure is not None else set())):
        last = last_exchange(files, worker)
        if last is not None:
            yield f"worker {worker} last took part in {_last(last)}"


def _last(last: LastExchange) -> str:
    what = f"exchange {last.key} (group {last.group}), in step {last.step + 1}"
    if last.seconds is None:
        return f"{what}: its part had arrived at worker {last.peer}, which lacked others"
    return f"{what}: worker {last.peer} had all parts {duration(last.seconds)} before it wrote its events"


def _missed(exchange: MissedExchange) -> str:
    what = f"exchange {exchange.key} (group {exchange.group}, {exchange.bytes} bytes) in step {exchange.step + 1}"
    waiting = ", ".join(f"worker {worker} waited {duration(sec)}" for worker, sec in exchange.waiting.items())
    if exchange.absent:
        be = "was" if len(exchange.absent) == 1 else "were"
        return f"{named(exchange.absent)} {be} missing from {what}: {waiting}"
    return f"bytes of {named(exchange.unheard)} had not arrived in {what}, which all had begun: {waiting}"


def _place_of(files: WorkerFiles) -> str:
    """Describes the last position of a worker."""
    events = files.events
    if events is None:
        return f"has left no events{f'; its log: {files.log}' if files.log else ''}"
    header = events.header
    process = f"process {header.get('pid')} on {header.get('host')}"
    if not _has_position(events):
        if _runs_here(header):
            how = (
                f"`kill -USR2 {header['pid']}` makes it write its events"
                if header.get("hears") is True
                else ("it cannot be asked for its events, since its program handles SIGUSR2 or began in another thread")
            )
            return f"runs as {process}; {how}"
        return f"has left no events: it had no failure, or was killed ({process})"
    return f"{_described(last_position(events))}; {_why(header)} [{_clock(header['time'])}, {process}]"


def _described(position: LastPosition) -> str:
    step = f"in step {position.step + 1}, for {duration(position.seconds)}"
    if position.phase is None:
        where = f"after a step that failed with {position.error}" if position.error else "in no call of the strategy"
        return f"{where}, {step}"
    return f"{position.phase}{f' of `{position.call}`' if position.call else ''}, {step}"


def _why(header: Mapping[str, Any]) -> str:
    """Describes why a worker has written its events."""
    why = header.get("why")
    if why == ASKED:
        return "written on request (SIGUSR2)"
    if why == "stall":
        suspect = header.get("suspect")
        return f"the watchdog ended it{'' if suspect is None else f', with worker {suspect} as the probable cause'}"
    if why == "exception":
        return f"it raised {header.get('exception')}"
    if why == LOST_PEER:
        return f"the process of worker {header.get('peer')} ended"
    return f"its exchange failed: {header.get('message')}" if why == EXCHANGE else f"it ended by {why}"


def _user_calls(events: EventFile) -> Iterator[str]:
    """Yields the innermost line of the user's code in each thread."""
    for thread, calls in events.stacks.items():
        line = user_line("\n".join(_traceback(calls)))
        if line:
            yield f"{thread}: {line}"


def _all_calls(events: EventFile) -> Iterator[str]:
    for thread, calls in events.stacks.items():
        yield f"{thread}:"
        yield from _traceback(calls)


def _traceback(calls: Sequence[Call]) -> list[str]:
    """Returns calls as Python prints them, the innermost last."""
    return [f'  File "{file}", line {line}, in {function}' for file, line, function in reversed(calls)]


def _has_position(events: EventFile) -> bool:
    return events.header.get("why") != START


def _workers_in(events: EventFile | None) -> int:
    """Returns the number of workers in an event file; 0 without a credible one, as the file may be damaged."""
    value = events.header.get("workers") if events else None
    return value if type(value) is int and 0 < value <= _MOST_WORKERS else 0


def _runs_here(header: Mapping[str, Any]) -> bool:
    """Whether the process of a worker, and not a later one with its number, runs on this host."""
    pid, start = header.get("pid"), header.get("process_start")
    if not isinstance(pid, int) or start is None or header.get("host") != socket.gethostname():
        return False
    return bool(process_start(pid) == start)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
