"""Text about one recorded attempt: its first failure, the missing workers, and where each worker was."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.events.event_file import ASKED, EXCHANGE, LOST_PEER, START, Call, EventFile
from tfdist.events.phase_names import COMPUTE, OUTSIDE
from tfdist.events.phase_names import START as START_UP
from tfdist.events.straggler_file import StragglerRecord, pairs_of
from tfdist.events.time_record import TimeRecord
from tfdist.failure_kinds import user_call
from tfdist.launch.first_failure import FROM_PEER, Failure, reason_in
from tfdist.launch.run_summary import named
from tfdist.readable_numbers import clock, counted, duration
from tfdist.report.absent_workers import absences_of, lines_of_absences
from tfdist.report.missing_workers import (
    LastExchange,
    LastPosition,
    MissedExchange,
    elsewhere,
    held_up,
    last_exchange,
    last_position,
    missed_exchanges,
)
from tfdist.report.recorded_failure import first_failure_of
from tfdist.report.recorded_run import WorkerFiles, attempt_in, number_of_workers

_MOST_EXCHANGES = 5
_LONG_SECONDS = 5.0
"""How long a worker of a job that runs must have waited, or done one thing, for the report to say so."""

_WELL = ("done", "preempted", "resized", "stopped")
"""Outcomes of attempts whose workers had no reason to write events."""


@dataclasses.dataclass(frozen=True)
class AttemptText:
    """The text about an attempt.

    Attributes:
      title: Its number, size, duration, newest backup and outcome.
      failure: Its first failure; `None` without one.
      absent: Lines about workers without which the attempt went on.
      missing: Lines that name workers missing from exchanges.
      positions: Lines with the last position of each worker that had a reason to write one, and its stacks.
      slow: Lines that name slow workers and links.
    """

    title: str
    failure: Failure | None
    absent: Sequence[str]
    missing: Sequence[str]
    positions: Sequence[str]
    slow: Sequence[str]


def text_of(
    number: int,
    workers: Mapping[int, WorkerFiles],
    summaries: Sequence[Mapping[str, Any]],
    *,
    stragglers: Sequence[StragglerRecord] = (),
    stacks: bool = False,
) -> AttemptText:
    """Describes an attempt.

    Args:
      number: Its number.
      workers: The files of its workers.
      summaries: The records of the supervisors.
      stragglers: The verdicts about its slow workers.
      stacks: Whether to add the stacks of all threads.

    Raises:
      TypeError: If damaged files have impossible values; also `ValueError`, `LookupError` and other built-in errors.
    """
    attempts = [attempt for each in summaries if (attempt := attempt_in(each, number))]
    files = {worker: events for worker, each in workers.items() if (events := each.events) and _has_position(events)}
    count = number_of_workers(workers)
    failure = first_failure_of(attempts, workers)
    present = {worker: events for worker, events in files.items() if not _is_before(events, failure)}
    ended_well = any(each.get("outcome") in _WELL for each in attempts)
    positions = []
    for worker in range(count):
        if ended_well and worker not in files:
            continue
        was_killed = failure is not None and failure.worker == worker and failure.signal is not None
        positions.append(f"worker {worker}: {_place_of(workers.get(worker, WorkerFiles()), was_killed)}")
        events = files.get(worker)
        if events is not None:
            positions += [f"  {line}" for line in (_all_calls(events) if stacks else _user_calls(events))]
    missing = list(_missing(present, range(count), failure))
    absent = list(lines_of_absences(absences_of(attempts)))
    return AttemptText(_title(number, attempts, count), failure, absent, missing, positions, list(_slow(stragglers)))


def _title(number: int, attempts: Sequence[Mapping[str, Any]], count: int) -> str:
    parts = [counted(count, "worker")]
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


def _slow(records: Sequence[StragglerRecord]) -> Iterator[str]:
    """Yields lines about the workers and links that were slow, as they were found; what to do if they still are."""
    for record, end in pairs_of(records):
        yield f"{verdict_text(record, end)} [{clock(record.time)}]"
        if end is None and record.remedy:
            yield f"  {record.remedy}"


def verdict_text(record: StragglerRecord, end: StragglerRecord | None) -> str:
    """Returns the verdict of a record, and the step until which it was true, by the record that ends it."""
    return record.text if end is None else f"{record.text}, until step {end.step}"


def _missing(files: Mapping[int, EventFile], workers: Sequence[int], failure: Failure | None) -> Iterator[str]:
    """Yields lines that name the workers missing from exchanges."""
    missed = missed_exchanges(files)
    if failure is None:  # The workers of a job that runs wait for each other in every step.
        missed = [each for each in missed if max(each.waiting.values()) >= _LONG_SECONDS]
    held = held_up(missed)
    missed.sort(key=lambda each: not set(each.absent) - held.keys())  # First those that made the others wait.
    for each in missed[:_MOST_EXCHANGES]:
        yield _missed(each, held)
    if len(missed) > _MOST_EXCHANGES:
        yield f"and {len(missed) - _MOST_EXCHANGES} more exchanges were not complete"
    absent = {worker for each in missed for worker in each.absent} - held.keys()
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
    what = f"exchange {last.key} (group {last.group}){_in_step(last.step, ', ')}"
    if last.seconds is None:
        return f"{what}: its part had arrived at worker {last.peer}, which lacked others"
    return f"{what}: worker {last.peer} had all parts {duration(last.seconds)} before it wrote its events"


def _missed(exchange: MissedExchange, held: Mapping[int, Sequence[int]]) -> str:
    """Describes an incomplete exchange; `held` are the workers that were missing since they waited, each with whom."""
    group = f"group {exchange.group}{f' of {named(exchange.workers)}' if exchange.workers else ''}"
    what = f"exchange {exchange.key} ({group}, {exchange.bytes} bytes){_in_step(exchange.step, ' ')}"
    waiting = ", ".join(f"worker {worker} waited {duration(sec)}" for worker, sec in exchange.waiting.items())
    absent = [worker for worker in exchange.absent if worker not in held]
    if exchange.absent and not absent:
        cause = named(sorted({peer for worker in exchange.absent for peer in held[worker]}))
        return f"{named(exchange.absent)} had not begun {what}, waiting for {cause}: {waiting}"
    if absent:
        be = "was" if len(absent) == 1 else "were"
        return f"{named(absent)} {be} missing from {what}: {waiting}"
    return f"bytes of {named(exchange.unheard)} had not arrived in {what}, which all had begun: {waiting}"


def _place_of(files: WorkerFiles, was_killed: bool) -> str:
    """Describes the last position of a worker."""
    events = files.events
    if events is None:
        has = "has written no events yet" if files.attempt.get("outcome") == "running" else "has left no events"
        return f"{has}{f'; its log: {files.log}' if files.log else ''}"
    header = events.header
    process = f"process {header.get('pid')} on {header.get('host')}"
    if not _has_position(events):
        if files.seen is not None:
            how = (
                f"`kill -USR2 {header['pid']}` makes it write its events"
                if header.get("hears") is True
                else ("it cannot be asked for its events, since its program handles SIGUSR2 or began in another thread")
            )
            return f"runs as {process}{_idle(files.times, files.seen)}; {how}"
        why = "it was killed" if was_killed else "it had no failure, was frozen, or was killed"
        return f"has left no events: {why}{_last_phase(files.times)} ({process})"
    return f"{_described(last_position(events))}; {_why(header)} [{clock(header['time'])}, {process}]"


def _last_phase(times: TimeRecord | None) -> str:
    """Describes what a worker did last by its times, which are all that a frozen or killed worker leaves."""
    if times is None:
        return ""
    if times.sign is not None and times.sign.time > times.time:
        return f"; its last sign of life: {_phase_and_step(times)} [{clock(times.sign.time)}]"
    return f"; its times end in {_phase_and_step(times)} [{clock(times.time)}]"


def _idle(times: TimeRecord | None, now: float) -> str:
    """Describes for how long a worker that runs has been in its phase, if that is long, and whether it is frozen."""
    if times is None or now - times.time < _LONG_SECONDS:
        return ""
    where = f", for {duration(now - times.time)} in {_phase_and_step(times)}"
    if times.sign is None or now - times.sign.time < _LONG_SECONDS:
        return where
    return f"{where}, without a sign of life since {clock(times.sign.time)}, so it may be frozen"


def _phase_and_step(times: TimeRecord) -> str:
    """Names the last known phase. The times know the parts of a step at its end only; a sign of life may know one."""
    if times.phase == START_UP:
        return START_UP
    if times.phase == OUTSIDE:
        return f"the script outside of Keras' calls{f', after step {times.steps}' if times.steps else ''}"
    step = None if times.hides_steps else times.steps
    if times.phase != COMPUTE:
        return f"{times.phase}{_in_step(step, ', ')}"
    sign = times.sign
    is_of_step = sign is not None and sign.time > times.time and sign.step == times.steps
    return f"{sign.phase}{_in_step(step, ', ')}" if is_of_step and sign and sign.phase else f"step {times.steps + 1}"


def _in_step(finished: int | None, before: str) -> str:
    """Names the step after so many finished ones; nothing if their number is not known."""
    return "" if finished is None else f"{before}in step {finished + 1}"


def _described(position: LastPosition) -> str:
    step = f"{_in_step(position.step, ', ')}, for {duration(position.seconds)}"
    if position.phase is None:
        where = f"after a step that failed with {position.error}" if position.error else "in no call of the strategy"
        return f"{where}{step}"
    return f"{position.phase}{f' of `{position.call}`' if position.call else ''}{step}"


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
    if why == EXCHANGE:
        return f"its exchange failed: {reason_in(str(header.get('message') or ''))}"
    return f"it ended by {why}"


def _user_calls(events: EventFile) -> Iterator[str]:
    """Yields the innermost line of the user's code in each thread."""
    for thread, calls in events.stacks.items():
        line = user_call(calls)
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
