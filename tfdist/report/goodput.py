"""Policy: divides the time of a run into parts, by the attempts and the workers' times. No files and no clock.

    attempt 0                                              pause   attempt 1
    ├ start-up ┼ tracing ┼ steps ┼ save ┼ steps ┼ failure ┼       ┼ start-up, tracing ┼ steps ...
                 first      kept            lost  restart  restart  repeated            kept

Steps after the commit from which the next attempt continued are lost, with the callbacks and validations between them.
The steps of a loop of the script's own are not known one by one, so all of its time counts as steps. If it has no
commits, it is not known how much of it was lost.
All parts sum to the time from the start of the first attempt to the end of the last.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tfdist.events.phase_names import (
    BUILDING,
    CALLBACK,
    COMPUTE,
    EXCHANGE,
    INPUT,
    OUTSIDE,
    OWN_LOOP,
    RESTORE,
    SAVE,
    START,
    TRACING,
    VALIDATION,
)
from tfdist.events.time_record import BEGINNING, UNDECIDED, TimeRecord

LOST, RESTART, AGAIN = "lost", "restart", "repeated start-up"
UNFINISHED, UNRECORDED, REST = "unfinished step", "not recorded", "rest"

PARTS = {
    COMPUTE: "training steps: computation",
    EXCHANGE: "training steps: exchanges and waits for workers",
    INPUT: "training steps: waits for input",
    OWN_LOOP: "training loop of your own",
    CALLBACK: "callbacks, and Python between steps",
    VALIDATION: "validation, prediction",
    SAVE: "saves",
    START: "start-up",
    BUILDING: "building and comparing models",
    TRACING: "tracing",
    LOST: "lost work",
    RESTART: "from failures to restarts",
    AGAIN: "start-up, tracing and restoring after restarts",
    RESTORE: "restoring a backup at the start",
    OUTSIDE: "the script outside of Keras' calls",
    UNFINISHED: "a step or callback that has not ended yet",
    UNRECORDED: "not recorded",
    REST: "rest",
}
"""All parts of the time of a run, in the order of reports, with their descriptions."""

SMALLEST = 0.005
"""Smaller shares of the time do not matter, and are not listed."""

_KEPT = (COMPUTE, EXCHANGE, INPUT, OWN_LOOP)
_LOSABLE = (*_KEPT, CALLBACK, VALIDATION)
_REPEATED = (START, BUILDING, TRACING, RESTORE)
_GOES_ON = "running"


@dataclasses.dataclass(frozen=True)
class WorkerAttempt:
    """One worker in one attempt.

    Attributes:
      worker: Number of the worker.
      attempt: Number of the attempt.
      start: Start of the attempt, in seconds since the epoch.
      seconds: Duration of the attempt.
      outcome: Outcome of the attempt.
      failed_at: First failure of the attempt, in seconds since the epoch; `None` without one.
      committed: Number of the newest commit at the end of the attempt.
      record: Times of the worker; `None` if there are none.
    """

    worker: int
    attempt: int
    start: float
    seconds: float
    outcome: str
    failed_at: float | None = None
    committed: int | None = None
    record: TimeRecord | None = None


@dataclasses.dataclass(frozen=True)
class LostWork:
    """The training steps of an attempt that a later attempt repeats.

    Attributes:
      attempt: Number of the attempt.
      last_step: Last step that a worker of the attempt had finished.
      steps: Number of lost steps.
      commit: Number of the commit from which the job continued; `BEGINNING` without one.
    """

    attempt: int
    last_step: int
    steps: int
    commit: int


@dataclasses.dataclass(frozen=True)
class TimeAccount:
    """The time of a run, divided into parts such as training steps, saves and lost work.

    Attributes:
      seconds: Time from the start of the first attempt to the end of the last.
      parts: Seconds by part, as means over the workers. Their sum is `seconds`.
      workers: For each worker, its seconds by part in the attempts in which it took part.
      lost: Lost work of each attempt that lost any.
      unknown: Numbers of the attempts of which it is not known how much work was lost.
      attempts: For each attempt, its seconds by part, as means over its workers. The pause after it belongs to it.
    """

    seconds: float
    parts: Mapping[str, float]
    workers: Mapping[int, Mapping[str, float]]
    lost: Sequence[LostWork]
    unknown: Sequence[int] = ()
    attempts: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        """The part of the time in training steps that were kept; `None` if no worker has recorded its time."""
        if not self.seconds or self.parts.get(UNRECORDED, 0.0) > self.seconds / 2:
            return None
        return sum(self.parts.get(part, 0.0) for part in _KEPT) / self.seconds

    @property
    def is_at_most(self) -> bool:
        """Whether the goodput may be lower: it has all time of a loop of the script's own, or lost work is unknown."""
        has_loop = self.parts.get(OWN_LOOP, 0.0) >= SMALLEST * self.seconds
        return self.goodput is not None and (has_loop or bool(self.unknown))


def account_for(attempts: Iterable[WorkerAttempt]) -> TimeAccount:
    """Divides the time of a run into parts.

    Args:
      attempts: All workers in all attempts.
    """
    by_attempt: dict[int, list[WorkerAttempt]] = {}
    for each in attempts:
        by_attempt.setdefault(each.attempt, []).append(each)
    numbers = sorted(by_attempt)
    means: dict[int, dict[str, float]] = {number: {} for number in numbers}
    workers: dict[int, dict[str, float]] = {}
    lost: list[LostWork] = []
    unknown: list[int] = []
    before, end = 0, 0.0  # Number and end of the attempt before.
    for number in numbers:
        present = by_attempt[number]
        later = [record for each in numbers if each > number for record in _records(by_attempt[each])]
        origin = None
        if _has_loop_without_commits([*_records(present), *later], present):
            unknown.append(number)
        else:
            origin = _origin(present, later)
        if origin is not None:
            last = max((record.steps for record in _records(present)), default=0)
            if last > origin[1]:
                lost.append(LostWork(number, last, last - origin[1], origin[0]))
        for each in present:
            spent = _parts_of(each, origin, is_first=number == numbers[0])
            _add(workers.setdefault(each.worker, {}), spent)
            _add(means[number], {part: seconds / len(present) for part, seconds in spent.items()})
        start = sum(each.start for each in present) / len(present)
        if number != numbers[0]:
            _add(means[before], {RESTART: start - end})
            for each in present:
                _add(workers[each.worker], {RESTART: start - end})
        before, end = number, start + sum(each.seconds for each in present) / len(present)
    parts: dict[str, float] = {}
    for spent in means.values():
        _add(parts, spent)
    return TimeAccount(
        sum(parts.values()),
        _in_order(parts),
        {worker: _in_order(workers[worker]) for worker in sorted(workers)},
        lost,
        unknown,
        {number: _in_order(means[number]) for number in numbers},
    )


def _records(attempts: Iterable[WorkerAttempt]) -> list[TimeRecord]:
    return [each.record for each in attempts if each.record is not None]


def _has_loop_without_commits(records: Sequence[TimeRecord], present: Sequence[WorkerAttempt]) -> bool:
    """Whether an attempt that did not end well has trained in a loop of the script's own, without commits of tfdist."""
    if {each.outcome for each in present} <= {"done", _GOES_ON} or any(each.committed is not None for each in present):
        return False
    has_trained = any(record.seconds[OWN_LOOP] > 0 for record in _records(present))
    return has_trained and all(record.resumed_commit == UNDECIDED and not record.steps for record in records)


def _origin(present: Sequence[WorkerAttempt], later: Sequence[TimeRecord]) -> tuple[int, int] | None:
    """Returns commit and step from which the job went on or can go on after an attempt; `None` if nothing is lost."""
    outcomes = {each.outcome for each in present}
    if outcomes <= {"done", _GOES_ON}:
        return None
    for record in later:  # In the order of attempts.
        if record.resumed_commit != UNDECIDED:
            return record.resumed_commit, record.resumed_steps
        if record.steps:
            return BEGINNING, 0
    committed = max((each.committed for each in present if each.committed is not None), default=None)
    if committed is None:
        return BEGINNING, 0
    known = [save.steps for record in _records(present) for save in record.saves if save.commit == committed]
    known += [record.resumed_steps for record in _records(present) if record.resumed_commit == committed]
    return committed, known[0] if known else committed  # A commit has the number of its step, or a larger one.


def _parts_of(each: WorkerAttempt, origin: tuple[int, int] | None, *, is_first: bool) -> dict[str, float]:
    """Returns the seconds of a worker in an attempt by part."""
    record, has_failed = each.record, each.outcome == "failed"
    if record is None:
        early = START if is_first else AGAIN  # A worker that ended before it recorded anything.
        return {early if has_failed else UNRECORDED: each.seconds}
    end = each.start + each.seconds
    spent = dict(record.seconds)
    spent[START] += max(record.start - each.start, 0.0)
    until = min(max(each.failed_at or 0.0, record.time), end) if has_failed else end
    if until > record.time:
        goes_on = each.outcome == _GOES_ON and record.phase == COMPUTE  # Its parts are only known at its end.
        _add(spent, {UNFINISHED if goes_on else record.phase: until - record.time})
    spent[RESTART] = max(end - until, 0.0)
    if origin is not None:
        _move_lost(spent, record, origin)
    if not is_first:
        spent[AGAIN] = sum(spent.pop(phase) for phase in _REPEATED)
    spent[REST] = each.seconds - sum(spent.values())
    return spent


def _move_lost(spent: dict[str, float], record: TimeRecord, origin: tuple[int, int]) -> None:
    """Moves the time of training after the commit `origin` to lost work."""
    commit, steps = origin
    kept = next((save.seconds for save in reversed(record.saves) if save.commit == commit), None)
    trained = record.steps - max(record.resumed_steps, 0)
    share = 1.0
    if kept is None and commit not in (BEGINNING, record.resumed_commit) and trained > 0:
        # The commit is older than the saves in the record: by the number of steps.
        share = min(max((record.steps - steps) / trained, 0.0), 1.0)
    spent[LOST] = 0.0
    for phase in _LOSABLE:
        seconds = max(spent[phase] - kept[phase], 0.0) if kept else spent[phase] * share
        spent[phase] -= seconds
        spent[LOST] += seconds


def _add(total: dict[str, float], parts: Mapping[str, float]) -> None:
    for part, seconds in parts.items():
        total[part] = total.get(part, 0.0) + seconds


def _in_order(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: parts[part] for part in PARTS if parts.get(part)}
