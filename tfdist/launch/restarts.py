"""Whether a job that failed is started again, when, and with how many workers. No processes and no clock in here."""

import enum

from tfdist.failure_kinds import FailureKind

__all__ = ["Chance", "Commits", "Restarts", "Size", "chance_of"]

_LONGEST_PAUSE_SECONDS = 30.0


class Chance(enum.Enum):
    """How often to try again after a failure of one kind."""

    NEVER = enum.auto()
    """Not once: it would fail again."""
    ELSEWHERE = enum.auto()
    """Until it fails at the same place again."""
    OFTEN = enum.auto()
    """As often as the limits of the job allow."""


def chance_of(kind: FailureKind, *, is_exception: bool, has_commit: bool) -> Chance:
    """The chance that a restart heals a failure.

    Args:
      kind: The kind of the failure.
      is_exception: Whether a Python exception ended the worker, so that the place of the failure is known.
      has_commit: Whether there is a commit from which a restart goes on. Without one, wrong data come again after as
        long a time.
    """
    if kind in (FailureKind.CONFIGURATION, FailureKind.PROGRAM):
        return Chance.NEVER
    if kind == FailureKind.DATA:
        return Chance.ELSEWHERE if has_commit else Chance.NEVER
    return Chance.ELSEWHERE if kind == FailureKind.UNKNOWN and is_exception else Chance.OFTEN


class Restarts:
    """How often, and after which pauses, to start again.

    The first restart comes at once, the next after 1 s, 2 s, 4 s and so on up to 30 s, the same on all hosts of a job.
    Restarts count from the last `progress`, those of the window; a failure that comes again and again at the same place
    counts however long that takes, since waiting will not mend it.

    Args:
      limit: How many restarts may count.
      window_seconds: After which time a restart counts no more.
    """

    def __init__(self, limit: int, window_seconds: float):
        self._limit = limit
        self._window_seconds = window_seconds
        self._failures: list[tuple[float, str | None]] = []

    def progress(self, but: str | None = None) -> None:
        """Starts to count anew, but for failures at the place `but`."""
        self._failures = [failure for failure in self._failures if but is not None and failure[1] == but]

    def pause(self, now: float, place: str | None = None, chance: Chance = Chance.OFTEN) -> float | None:
        """Takes note of a failure.

        Args:
          now: When it was, in seconds.
          place: Where it was, None if that says nothing.
          chance: How often to try again.

        Returns:
          Seconds to wait before the next start; None if there is to be none.
        """
        recent = sum(now - then < self._window_seconds for then, _ in self._failures)
        repeats = self._repeats(place)
        count = max(recent, repeats)
        self._failures.append((now, place))
        if count >= self._limit or chance == Chance.NEVER or (chance == Chance.ELSEWHERE and repeats):
            return None
        return 0.0 if count == 0 else min(2.0 ** (count - 1), _LONGEST_PAUSE_SECONDS)

    def _repeats(self, place: str | None) -> int:
        """How many failures came from this place, without another in between."""
        others = [number for number, (_, before) in enumerate(self._failures) if place is None or before != place]
        return len(self._failures) - (others[-1] + 1 if others else 0)


class Commits:
    """The commits of one attempt, as they are seen: pairs of a step and a folder, each of which has steps of its own.

    Args:
      former: Those of the attempt before, None if there was none.
    """

    def __init__(self, former: "Commits | None" = None):
        self._before: dict[str, int] = {**former._before, **former._own} if former else {}
        self._own: dict[str, int] = {}  # the step of the newest, by folder
        self.newest: tuple[int, str] | None = former.newest if former else None
        self._last = self.newest
        self.again = False
        """Whether they are of steps that an attempt before had committed: what was trained is trained again.

        So it is after a `fit` that was done and has removed its backups itself, those on other storage than a disk.
        """

    def see(self, newest: tuple[int, str] | None) -> None:
        """Takes note of the newest commit."""
        if newest is not None and newest != self._last:
            step, folder = newest
            if folder not in self._own:
                self.again |= step < self._before.get(folder, step)
            self._own[folder] = step
        self.newest = newest

    @property
    def any(self) -> bool:
        """Whether there is one of this attempt."""
        return self.newest is not None and self.newest != self._last


class Size:
    """How many workers the next attempt has, and which: each has a slot, a number that it keeps over all attempts.

    One fewer when a worker cannot come back: it was the first failure twice in a row with no commit in between, or its
    process could not be started. All again at the next restart after a commit.

    Args:
      full: How many there are to be.
      least: How many there must be.
      regrow_seconds: How long a reduced job runs before all are tried again. Twice as long after each time that failed.
    """

    def __init__(self, full: int, least: int, regrow_seconds: float):
        self._full = full
        self._least = least
        self._regrow_seconds = regrow_seconds
        self._shrunk = 0  # how often all were too many
        self._culprit: int | None = None  # its slot
        self.slots = list(range(full))

    @property
    def current(self) -> int:
        """How many."""
        return len(self.slots)

    def failed(self, culprit: int | None, *, started: bool, progressed: bool) -> bool:
        """Takes note of a failed attempt.

        Args:
          culprit: The worker that failed first, by its place in `slots`, None if not known.
          started: Whether its process ran.
          progressed: Whether the attempt committed.

        Returns:
          Whether the next attempt has one worker fewer.
        """
        # A report may name whomever as the cause.
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
        """Has all workers in the next attempt."""
        self._culprit = None
        self.slots = list(range(self._full))

    def is_due(self, seconds: float) -> bool:
        """Whether an attempt that has run for `seconds` is to make room for one with all workers."""
        return self.current < self._full and seconds >= self._regrow_seconds * 2 ** (self._shrunk - 1)
