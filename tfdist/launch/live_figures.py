"""Policy: what a person who watches a run sees of each worker, by its recorded times. No files and no clock."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.events.phase_names import (
    BUILDING,
    CALLBACK,
    COMPUTE,
    EXCHANGE,
    OUTSIDE,
    OWN_LOOP,
    RESTORE,
    SAVE,
    START,
    TRACING,
    VALIDATION,
)
from tfdist.events.straggler_file import COMPUTATION, StragglerRecord, pairs_of
from tfdist.events.time_record import TimeRecord
from tfdist.launch.recent_steps import IN_STEPS, NOT_RECENT, Recent
from tfdist.readable_numbers import counted, short_duration

_NAMES = {
    START: "start-up",
    BUILDING: "building",
    TRACING: "tracing",
    CALLBACK: "callback",
    VALIDATION: "validation",
    SAVE: "saving",
    RESTORE: "restoring",
    OUTSIDE: "script",
}
_LONG_PHASE_SECONDS, _LONG_STEP_SECONDS = 3.0, 10.0
_SILENT_SECONDS = 5.0  # A worker gives a sign of life every second.
_JUST_NOW_SECONDS = 2.0
_URGENT_END, _URGENT_SLOW, _URGENT_WAIT, _CALM = range(4)


@dataclasses.dataclass(frozen=True)
class SeenWorker:
    """The state of a worker at one moment, as its files and its process show it.

    Attributes:
      worker: Id of the worker.
      record: Its times; `None` if it has none, say because its script does not use tfdist.
      recent: How it trained lately.
      memory: Memory of its process in bytes.
      ended: End of the process, such as "SIGKILL"; `None` if it runs.
      slow: Cause for which the worker is a straggler, such as "input"; `None` if it is no straggler.
    """

    worker: int
    record: TimeRecord | None = None
    recent: Recent = NOT_RECENT
    memory: int | None = None
    ended: str | None = None
    slow: str | None = None


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    """A row of the live table.

    Attributes:
      worker: Id of the worker.
      state: Its activity, such as "training", "validation 12 s", "slow: input", "no sign of life 12 s", "exit code 1".
      kind: The activity without its duration, such as "validation".
      step: Number of finished training steps; `None` if unknown.
      steps_per_second: Steps for each second of training; `None` while the worker does not train.
      parts: Parts of computation, exchanges and input in the time of training, from 0 to 1.
      memory: Memory of its process in bytes.
      urgency: Place in the choice of rows if there is no room for all, lowest first.
    """

    worker: int
    state: str
    kind: str
    step: int | None
    steps_per_second: float | None
    parts: Mapping[str, float]
    memory: int | None
    urgency: int

    @property
    def is_calm(self) -> bool:
        """Whether the worker trains like its peers."""
        return self.urgency == _CALM

    @property
    def holds_up_others(self) -> bool:
        """Whether it is slow, or gives no sign of life."""
        return self.urgency == _URGENT_SLOW

    @property
    def has_failed(self) -> bool:
        """Whether its process has ended, and not because it was done."""
        return self.urgency == _URGENT_END


def row_of(seen: SeenWorker, now: float) -> WorkerRow:
    """Returns the row of a worker at the time `now`, in seconds since the epoch."""
    record, recent = seen.record, seen.recent
    activity = _activity(seen, now)
    trains = activity.trains
    urgency = _CALM if trains or seen.ended == DONE else _URGENT_WAIT
    if seen.ended is not None:
        urgency = _CALM if seen.ended == DONE else _URGENT_END
    elif activity.kind == NO_SIGN:
        urgency = _URGENT_SLOW
    elif trains and seen.slow:
        activity, urgency = _Activity(f"slow: {seen.slow}"), _URGENT_SLOW
    return WorkerRow(
        worker=seen.worker,
        state=activity.text,
        kind=activity.kind,
        step=_step(record) if record else None,
        steps_per_second=recent.steps_per_second if trains else None,
        parts=recent.parts if trains else {},
        memory=None if seen.ended else seen.memory,
        urgency=urgency,
    )


def _step(record: TimeRecord) -> int | None:
    return None if record.hides_steps else record.steps


UNKNOWN = "running"
"""The kind of activity of a worker without a record of its times."""

DONE = "done"
"""The kind of activity of a worker whose process has ended with exit code 0."""

NO_SIGN = "no sign of life"
"""The kind of activity of a worker that is stopped, swapped out or cut off from its disk."""

_TRAINING = "training"


class _Activity(NamedTuple):
    """The activity of a worker: its kind, its seconds if they are worth telling, and whether the worker trains."""

    kind: str
    seconds: float | None = None
    trains: bool = False

    @property
    def text(self) -> str:
        return self.kind if self.seconds is None else f"{self.kind} {short_duration(self.seconds)}"


def _activity(seen: SeenWorker, now: float) -> _Activity:
    record, rate = seen.record, seen.recent.steps_per_second
    if seen.ended is not None:
        return _Activity(seen.ended)
    if record is None:
        return _Activity(UNKNOWN)
    if record.sign is not None:
        silent = now - max(record.sign.time, record.time)
        if silent >= _SILENT_SECONDS:
            return _Activity(NO_SIGN, silent)
    idle = max(0.0, now - record.time)
    has_stepped = record.steps > record.resumed_steps and idle < _JUST_NOW_SECONDS
    if record.phase in IN_STEPS or (record.phase == CALLBACK and has_stepped):
        if idle < max(_LONG_STEP_SECONDS, 3 / rate if rate else 0.0):
            return _Activity(_TRAINING, trains=True)
        return _Activity(_part_of_step(record), idle)
    if record.phase == OWN_LOOP:  # Its steps are not seen, so it may well train.
        is_long = idle >= _LONG_STEP_SECONDS
        return _Activity("own loop", idle, trains=True) if is_long else _Activity(_TRAINING, trains=True)
    return _Activity(_NAMES[record.phase], idle if idle >= _LONG_PHASE_SECONDS else None)


def _part_of_step(record: TimeRecord) -> str:
    """Returns the part of a step that a worker is in, as the last sign of life tells it, or "in a step"."""
    if record.phase != COMPUTE:  # Python waits for a batch, or for workers to agree that they have one.
        return record.phase
    sign = record.sign
    is_of_step = sign is not None and sign.time > record.time and sign.step == record.steps
    return sign.phase if is_of_step and sign and sign.phase in IN_STEPS else "in a step"


def slow_workers(records: Sequence[StragglerRecord]) -> Mapping[int, str]:
    """Returns the workers that hold up the others now, and why: "compute", "input", "link" or "callback"."""
    last = [begun for begun, end in pairs_of(records) if end is None and not begun.is_balanced]
    return {each.worker: COMPUTE if each.cause == COMPUTATION else each.cause for each in last}


def chosen_rows(rows: Sequence[WorkerRow], most: int) -> Sequence[WorkerRow]:
    """Returns at most so many rows, by worker: first those that ended, are slow or do not train, then the slowest.

    A worker that waits little for exchanges holds up the others. Small differences do not count, so that the choice
    stays the same for a while.
    """
    if len(rows) <= most:
        return rows

    def place(row: WorkerRow) -> tuple[int, int, int]:
        return row.urgency, round(10 * row.parts.get(EXCHANGE, 1.0)), row.worker

    return sorted(sorted(rows, key=place)[:most], key=lambda row: row.worker)


def rest_line(rows: Sequence[WorkerRow], chosen: Sequence[WorkerRow]) -> str | None:
    """Returns a line about the workers without a row: "and 12 more, training at step 1200", or `None`."""
    rest = [row for row in rows if row not in chosen]
    if not rest:
        return None
    kinds = {row.kind for row in rest}
    steps = sorted(row.step for row in rest if row.step is not None)
    told = f", {kinds.pop()}" if len(kinds) == 1 else ""
    at = ""
    if steps and steps[-1]:
        at = f" at step {steps[0]}" if steps[0] == steps[-1] else f" at steps {steps[0]} to {steps[-1]}"
    return f"and {len(rest)} more{told}{at}"


def progress_line(rows: Sequence[WorkerRow]) -> str | None:
    """Returns a line for a log: "step 1200, 3.1 steps/s, 4 workers"; `None` if the workers do not record times."""
    told = [row for row in rows if row.kind != UNKNOWN]
    known = [row for row in told if row.step is not None]
    count = counted(len(rows), "worker")
    if not told:
        return None
    if not known:
        first = min(told, key=lambda row: (row.urgency, row.kind == DONE, row.kind == _TRAINING))
        return f"{_shown(first, are_alike=len({row.kind for row in rows}) == 1)}, {count}"
    step = min(row.step or 0 for row in known)
    rates = [row.steps_per_second for row in known if row.steps_per_second is not None]
    last = min(known, key=lambda row: (row.urgency, row.kind == EXCHANGE, row.step or 0))
    are_alike = len(known) > 1 and len({row.kind for row in known}) == 1  # All wait if one of them hangs.
    what = f"{min(rates):.3g} steps/s" if rates and last.is_calm else _shown(last, are_alike=are_alike)
    return f"step {step}, {what}, {count}"


def _shown(row: WorkerRow, *, are_alike: bool) -> str:
    """Returns the state of a worker, with its number unless the others are in the same state."""
    return row.state if are_alike else f"worker {row.worker}: {row.state}"
