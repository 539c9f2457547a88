"""Decides whether, when and with how many workers a failed job restarts. Uses no processes and no clock."""

import enum

from tfdist.failure_kinds import FailureKind

_LONGEST_PAUSE_SECONDS = 30.0


class Chance(enum.Enum):
    """How often to restart a job after failures of one kind: `chance_of` chooses, and `Restarts` applies it."""

    NEVER = enum.auto()
    """Never, since the job would fail again."""
    ELSEWHERE = enum.auto()
    """Until the job fails at the same place again."""
    OFTEN = enum.auto()
    """As often as the limits of the job allow."""


def chance_of(kind: FailureKind, *, is_exception: bool, has_commit: bool) -> Chance:
    """Returns how often to restart the job after a failure, by the chance that a restart helps.

    Args:
      kind: Kind of the failure.
      is_exception: Whether a Python exception ended the worker, so that the place of the failure is known.
      has_commit: Whether a commit exists from which a restart resumes. Without a commit, the job reaches the same wrong
        data after the same time.
    """
    if kind in (FailureKind.CONFIGURATION, FailureKind.PROGRAM):
        return Chance.NEVER
    if kind == FailureKind.DATA:
        return Chance.ELSEWHERE if has_commit else Chance.NEVER
    return Chance.ELSEWHERE if kind == FailureKind.UNKNOWN and is_exception else Chance.OFTEN


class Restarts:
    """Counts the restarts of a job, and determines the pauses before them.

    The first restart comes at once. The pauses before the next are 1 s, 2 s, 4 s and so on up to 30 s, on all hosts.
    Counts the restarts since the last `progress` that are within the window. Repeated failures at the same place count
    regardless of the window, since waiting does not fix them.

    Args:
      limit: Largest number of counted restarts; a further failure ends the job.
      window_seconds: Time after which a restart no longer counts.
    """

    def __init__(self, limit: int, window_seconds: float):
        self._limit = limit
        self._window_seconds = window_seconds
        self._failures: list[tuple[float, str | None]] = []

    def progress(self, but: str | None = None) -> None:
        """Resets the count of restarts after progress, except for failures at the place `but`."""
        self._failures = [failure for failure in self._failures if but is not None and failure[1] == but]

    def pause(self, now: float, place: str | None = None, chance: Chance = Chance.OFTEN) -> float | None:
        """Records a failure, and returns the pause before the next start of the workers, if any.

        Args:
          now: Time of the failure, in seconds.
          place: Place of the failure, or None if the place is unknown.
          chance: How often to restart.

        Returns:
          Seconds to wait before the next start, or None for no next start.
        """
        recent = sum(now - then < self._window_seconds for then, _ in self._failures)
        repeats = self._repeats(place)
        count = max(recent, repeats)
        self._failures.append((now, place))
        if count >= self._limit or chance == Chance.NEVER or (chance == Chance.ELSEWHERE and repeats):
            return None
        return 0.0 if count == 0 else min(2.0 ** (count - 1), _LONGEST_PAUSE_SECONDS)

    def _repeats(self, place: str | None) -> int:
        """Returns how many of the latest recorded failures in a row were at this place."""
        others = [number for number, (_, before) in enumerate(self._failures) if place is None or before != place]
        return len(self._failures) - (others[-1] + 1 if others else 0)


class Commits:
    """The commits (complete backups) of one attempt: pairs of a step and a folder. Each folder has its own steps.

    Args:
      former: Commits of the previous attempt, or None.
    """

    def __init__(self, former: "Commits | None" = None):
        self._before: dict[str, int] = {**former._before, **former._own} if former else {}
        self._own: dict[str, int] = {}  # Step of the newest commit, by folder.
        self.newest: tuple[int, str] | None = former.newest if former else None
        self._last = self.newest
        self.again = False
        """Whether this attempt commits steps that an earlier attempt had committed, so it repeats training.

        This happens after a finished `fit` that removed its own backups, which it does on remote storage.
        """

    def see(self, newest: tuple[int, str] | None) -> None:
        """Records the newest commit that workers have reported: its step and folder, or None."""
        if newest is not None and newest != self._last:
            step, folder = newest
            if folder not in self._own:
                self.again |= step < self._before.get(folder, step)
            self._own[folder] = step
        self.newest = newest

    @property
    def any(self) -> bool:
        """Whether this attempt has made a commit (a complete backup), and so progress."""
        return self.newest is not None and self.newest != self._last


class Size:
    """Decides which workers the next attempt has. Each worker has a slot, a number that it keeps in all attempts.

    The next attempt has one worker fewer if a worker cannot come back. Such a worker failed first twice in a row with
    no commit in between, or its process did not start. The next restart after a commit has all workers again.

    Args:
      full: Desired number of workers.
      least: Smallest allowed number of workers.
      regrow_seconds: Time that a reduced job runs before it tries all workers again. Doubles after each failed try.
    """

    def __init__(self, full: int, least: int, regrow_seconds: float):
        self._full = full
        self._least = least
        self._regrow_seconds = regrow_seconds
        self._shrunk = 0  # How often the job went below `full`.
        self._culprit: int | None = None  # Slot of the worker that failed first.
        self.slots = list(range(full))

    @property
    def current(self) -> int:
        """The number of workers of the next attempt."""
        return len(self.slots)

    def failed(self, culprit: int | None, *, started: bool, progressed: bool) -> bool:
        """Records a failed attempt, and decides whether the next one leaves out a worker.

        Args:
          culprit: Index in `slots` of the worker that failed first, or None if unknown.
          started: Whether the process of that worker was started.
          progressed: Whether the attempt made a commit.

        Returns:
          Whether the next attempt has one worker fewer.
        """
        # A report may blame a worker that does not exist.
        slot = self.slots[culprit] if culprit is not None and culprit in range(self.current) else None
        is_lost = slot is not None and not progressed and (not started or slot == self._culprit)
        if progressed:
            self.slots = list(range(self._full))
        if slot is None or not is_lost or self.current == self._least:
            self._culprit = slot
            return False
        self._shrunk += self.current == self._full
        self._culprit = None
        self.slots.remove(slot)
        return True

    def regrow(self) -> None:
        """Plans the next attempt with all workers again, after attempts with fewer."""
        self._culprit = None
        self.slots = list(range(self._full))

    def is_due(self, seconds: float) -> bool:
        """Returns whether an attempt with fewer workers must end, after `seconds`, so that the next has all workers."""
        return self.current < self._full and seconds >= self._regrow_seconds * 2 ** (self._shrunk - 1)
