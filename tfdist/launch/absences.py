"""The absences of workers in a job that goes on without lost workers. Uses no processes and no clock."""

import dataclasses
from collections.abc import Sequence

from tfdist.members_record import MembersRecord


@dataclasses.dataclass(frozen=True)
class Absence:
    """The time without a lost worker in a job that goes on without it, until it has joined again.

    Attributes:
      worker: Id of the worker.
      host: Name of the worker's machine.
      time: When its end was noticed, in seconds since the epoch.
      reasons: Why it ended, and why each later process of it ended before it had joined.
      starts: When it was started again alone, in seconds since the epoch.
      has_joined: Whether it has joined again.
      missed_steps: Number of steps of worker 0 in the synchronizations without this worker.
    """

    worker: int
    host: str
    time: float
    reasons: Sequence[str]
    starts: Sequence[float] = ()
    has_joined: bool = False
    missed_steps: int = 0


class Absences:
    """All absences of an attempt, by what the supervisor sees and what worker 0 tells."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Absence] = {}  # By worker, and by how often it had joined before.

    @property
    def all(self) -> tuple[Absence, ...]:
        """The absences, oldest first."""
        return tuple(self._found.values())

    def lose(self, worker: int, host: str, time: float, reason: str, told: MembersRecord) -> None:
        """Adds the end of a worker. It continues the worker's absence if it has not joined since the last end."""
        key = worker, told.joins.get(worker, 0)
        known = self._found.get(key)
        reasons = [*(known.reasons if known else ()), reason]
        first = known or Absence(worker, host, time, ())
        self._found[key] = dataclasses.replace(first, reasons=reasons)

    def start(self, worker: int, time: float) -> None:
        """Adds a start of a worker that is absent."""
        key = max((key for key in self._found if key[0] == worker), key=lambda key: key[1])
        absence = self._found[key]
        self._found[key] = dataclasses.replace(absence, starts=[*absence.starts, time])

    def see(self, told: MembersRecord) -> bool:
        """Takes what worker 0 has told, and returns whether workers have joined since the last call."""
        have_joined = False
        for (worker, before), absence in list(self._found.items()):
            later = [joins for number, joins in self._found if number == worker and joins > before]
            until = min(later, default=float("inf"))
            missed = sum(
                steps
                for (number, joins), steps in told.missed_steps.items()
                if number == worker and before <= joins < until
            )
            has_joined = told.joins.get(worker, 0) > before
            have_joined |= has_joined and not absence.has_joined
            seen = dataclasses.replace(absence, has_joined=has_joined, missed_steps=missed)
            self._found[worker, before] = seen
        return have_joined
