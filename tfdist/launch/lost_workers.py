"""Decides which lost workers start again alone, in a job that goes on without them. Uses no processes and no clock."""

from collections.abc import Mapping

from tfdist.failure_kinds import FailureKind
from tfdist.launch.restart_policy import Chance, Restarts, chance_of


class LostWorkers:
    """Which workers that have ended start again alone, and when.

    Worker 0 is needed by all: if it fails, all workers start again. A worker that has joined since its last start has
    its restarts back. Without restarts left, the job goes on without the worker.

    Args:
      limit: Largest number of restarts of a worker that does not join in between.
      window_seconds: Time after which a restart no longer counts.
    """

    def __init__(self, limit: int, window_seconds: float):
        self._limit, self._window_seconds = limit, window_seconds
        self._restarts: dict[int, Restarts] = {}
        self._joins: dict[int, int] = {}
        self._due: dict[int, float] = {}

    @staticmethod
    def concerns_all(worker: int, kind: FailureKind, *, is_exception: bool) -> bool:
        """Whether all workers must end after the failure of a worker: worker 0, or an error that comes again."""
        chance = chance_of(kind, is_exception=is_exception, has_commit=True)
        return worker == 0 or chance == Chance.NEVER

    def lose(self, worker: int, now: float, place: str | None, joins: Mapping[int, int]) -> float | None:
        """Records the end of a worker, and returns the pause before its next start; `None` for no next start.

        Args:
          worker: The worker.
          now: The time, in seconds.
          place: The place of the failure, or `None` if it is unknown.
          joins: How often each worker has joined.
        """
        restarts = self._restarts.setdefault(worker, Restarts(self._limit, self._window_seconds))
        if joins.get(worker, 0) > self._joins.get(worker, 0):
            restarts.progress()
        self._joins[worker] = joins.get(worker, 0)
        pause = restarts.pause(now, place)
        if pause is not None:
            self._due[worker] = now + pause
        return pause

    def due(self, now: float) -> list[int]:
        """Returns the workers that are to start now, each once."""
        workers = [worker for worker, then in self._due.items() if then <= now]
        for worker in workers:
            del self._due[worker]
        return workers

    def outside(self, joins: Mapping[int, int]) -> list[int]:
        """Returns the workers that were lost and have not joined since."""
        return [worker for worker, before in self._joins.items() if joins.get(worker, 0) <= before]

    def is_due(self, now: float) -> bool:
        """Whether a worker is to start now."""
        return any(then <= now for then in self._due.values())
