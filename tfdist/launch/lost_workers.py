"""Decides which lost workers start again alone, in a job that goes on without them. Uses no processes and no clock."""

from tfdist.failure_kinds import FailureKind
from tfdist.launch.restart_policy import Chance, Restarts, chance_of
from tfdist.members_record import MembersRecord

_TRIES_OF_KILLED = 5


class LostWorkers:
    """Which workers that have ended start again alone, and when.

    Worker 0 is needed by all: if it fails, all workers start again. A worker that has taken part in a round since its
    last start has its restarts back, but not those from an exception at the same place, such as a wrong row of its
    share: this one restarts it once. Without restarts left, the job goes on without the worker. A worker that is killed
    while it starts says nothing about its next start, and the others lose nothing by it. So it has five times as many
    restarts.

    Args:
      limit: Largest number of restarts of a worker that fails, and takes part in no round in between.
      window_seconds: Time after which a restart no longer counts.
    """

    def __init__(self, limit: int, window_seconds: float):
        self._limit, self._window_seconds = limit, window_seconds
        self._restarts: dict[tuple[int, bool], Restarts] = {}
        self._joins: dict[int, int] = {}
        self._took_part: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self._starting: dict[int, tuple[float, int]] = {}  # Time of the start, and number of earlier connections.

    @staticmethod
    def concerns_all(worker: int, kind: FailureKind, *, is_exception: bool) -> bool:
        """Whether all workers must end after the failure of a worker: worker 0, or an error that comes again."""
        chance = chance_of(kind, is_exception=is_exception, has_commit=True)
        return worker == 0 or chance == Chance.NEVER

    def lose(
        self,
        worker: int,
        now: float,
        place: str | None,
        told: MembersRecord,
        *,
        was_killed: bool,
        chance: Chance = Chance.OFTEN,
    ) -> float | None:
        """Records the end of a worker, and returns the pause before its next start; `None` for no next start.

        Args:
          worker: The worker.
          now: The time, in seconds.
          place: The place of the failure, or `None` if it is unknown.
          told: The newest record of worker 0.
          was_killed: Whether a signal ended the worker.
          chance: How often to restart after this failure.
        """
        took_part = told.took_part.get(worker, 0)
        if took_part > self._took_part.get(worker, 0):
            for killed in (False, True):
                self._of(worker, was_killed=killed).progress(but=place if chance == Chance.ELSEWHERE else None)
        self._took_part[worker] = took_part
        self._joins[worker] = told.joins.get(worker, 0)
        self._starting.pop(worker, None)
        pause = self._of(worker, was_killed=was_killed).pause(now, place, chance)
        if pause is not None:
            self._due[worker] = now + pause
        return pause

    def start_due(self, now: float, told: MembersRecord) -> list[int]:
        """Returns the workers that are to start now, each once. They have time to connect from now on."""
        workers = [worker for worker, then in self._due.items() if then <= now]
        for worker in workers:
            del self._due[worker]
            self._starting[worker] = now, told.connections.get(worker, 0)
        return workers

    def overdue(self, now: float, told: MembersRecord) -> list[int]:
        """Returns the workers that have not connected to worker 0 in time after their start, each once."""
        late = []
        for worker, (then, before) in list(self._starting.items()):
            if told.connections.get(worker, 0) > before:
                del self._starting[worker]
            elif now - then > told.start_seconds:
                del self._starting[worker]
                late.append(worker)
        return late

    def outside(self, told: MembersRecord) -> list[int]:
        """Returns the workers that were lost and have not joined since."""
        return [worker for worker, before in self._joins.items() if told.joins.get(worker, 0) <= before]

    def is_due(self, now: float) -> bool:
        """Whether a worker is to start now."""
        return any(then <= now for then in self._due.values())

    def _of(self, worker: int, *, was_killed: bool) -> Restarts:
        limit = self._limit * (_TRIES_OF_KILLED if was_killed else 1)
        return self._restarts.setdefault((worker, was_killed), Restarts(limit, self._window_seconds))
