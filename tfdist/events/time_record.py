"""The file with the seconds that a worker has spent in each phase so far. It keeps them if the worker is killed.

    head: format, phase now, steps, where training continued, start, time of the last write, seconds by phase
    sign: time of the last sign of life, the step then, and the part of the step
    saves: for each of the newest saves, the number of its commit, its step, and the seconds by phase at that moment

All have a fixed place, so a write is one call of the system, without a flush to the disk. Does not load TensorFlow.
"""

import dataclasses
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence

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
from tfdist.symlink_safe_file import no_follow

TIMED_PHASES = (
    *(START, BUILDING, TRACING, INPUT, COMPUTE, EXCHANGE, OWN_LOOP, CALLBACK, VALIDATION, SAVE, RESTORE, OUTSIDE),
)
"""The phases of a process. It is in one of them at each moment."""

BEGINNING = -1
"""In place of the number of a commit: training began at its first step."""

UNDECIDED = -2
"""In place of the number of a commit: the worker has not decided yet where training continues, or has no backups."""

KEPT_SAVES = 4

_FORMAT = b"tfdtime2"
_HEAD = struct.Struct(f"<8s4q2d{len(TIMED_PHASES)}d")
_SIGN = struct.Struct("<dq40s")
_SAVE = struct.Struct(f"<2q{len(TIMED_PHASES)}d")


@dataclasses.dataclass(frozen=True)
class SaveMoment:
    """The moment at which a worker had copied its state for a commit, which may have failed later.

    Attributes:
      commit: Number of the commit.
      steps: Number of training steps in the commit.
      seconds: Seconds of the process by phase until then.
    """

    commit: int
    steps: int
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class SignOfLife:
    """The activity of a worker at one moment. A thread writes it every second, also while a step hangs.

    Attributes:
      time: The moment, in seconds since the epoch.
      step: Number of training steps that it had finished.
      phase: Its phase, such as "exchange"; `None` outside of Keras' calls, and in steps that do not report.
    """

    time: float
    step: int
    phase: str | None


@dataclasses.dataclass(frozen=True)
class TimeRecord:
    """The seconds of a worker by phase.

    Attributes:
      start: Begin of the record, in seconds since the epoch.
      time: Last write of the record, in seconds since the epoch.
      phase: Phase at that time.
      steps: Number of finished training steps, including those in the commit from which training continued.
      resumed_commit: Number of that commit, `BEGINNING` or `UNDECIDED`.
      resumed_steps: Number of training steps in that commit.
      seconds: Seconds by phase from `start` to `time`.
      saves: The newest saves.
      sign: The last sign of life; `None` if there is none, or if the worker needs to write none any more.
    """

    start: float
    time: float
    phase: str
    steps: int
    resumed_commit: int
    resumed_steps: int
    seconds: Mapping[str, float]
    saves: Sequence[SaveMoment] = ()
    sign: SignOfLife | None = None

    @property
    def hides_steps(self) -> bool:
        """Whether the worker trains in a loop of the script's own that has not told any steps. Backups tell them."""
        return not self.steps and (self.phase == OWN_LOOP or self.seconds[OWN_LOOP] > 0)


class TimeRecordFile:
    """The file of the own process.

    Raises:
      OSError: If the file cannot be made.
    """

    def __init__(self, path: pathlib.Path):
        self._descriptor = no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        self._saves = 0

    def write(self, record: TimeRecord) -> None:
        """Replaces the head. Raises `OSError` if the file cannot be written."""
        head = _HEAD.pack(
            *(_FORMAT, TIMED_PHASES.index(record.phase), record.steps, record.resumed_commit, record.resumed_steps),
            *(record.start, record.time, *record.seconds.values()),
        )
        os.pwrite(self._descriptor, head, 0)

    def write_sign(self, sign: SignOfLife) -> None:
        """Replaces the sign of life. Raises `OSError` if the file cannot be written."""
        os.pwrite(self._descriptor, _SIGN.pack(sign.time, sign.step, (sign.phase or "").encode()), _HEAD.size)

    def add_save(self, save: SaveMoment) -> None:
        """Replaces the oldest save. Raises `OSError` if the file cannot be written."""
        place = _HEAD.size + _SIGN.size + self._saves % KEPT_SAVES * _SAVE.size
        os.pwrite(self._descriptor, _SAVE.pack(save.commit, save.steps, *save.seconds.values()), place)
        self._saves += 1


def read_time_record(path: pathlib.Path) -> TimeRecord:
    """Reads the file of a worker.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If it is damaged.
    """
    content = path.read_bytes()
    if len(content) < _HEAD.size or not content.startswith(_FORMAT):
        raise ValueError("has no times of a worker")
    _, phase, steps, commit, resumed, start, time, *seconds = _HEAD.unpack_from(content)
    saves, rest = [], content[_HEAD.size + _SIGN.size :]
    for place in range(0, len(rest) - len(rest) % _SAVE.size, _SAVE.size):
        number, saved, *parts = _SAVE.unpack_from(rest, place)
        saves.append(SaveMoment(number, saved, dict(zip(TIMED_PHASES, parts, strict=True))))
    if not 0 <= phase < len(TIMED_PHASES) or not all(0 <= each < 1e10 for each in (start, time, *seconds)):
        raise ValueError("has impossible times")
    by_phase = dict(zip(TIMED_PHASES, seconds, strict=True))
    sign = _sign_in(content[_HEAD.size : _HEAD.size + _SIGN.size])
    return TimeRecord(start, time, TIMED_PHASES[phase], steps, commit, resumed, by_phase, saves, sign)


def _sign_in(content: bytes) -> SignOfLife | None:
    if len(content) < _SIGN.size:
        return None
    time, step, phase = _SIGN.unpack(content)
    if not 0 < time < 1e10 or step < 0:
        return None
    return SignOfLife(time, step, phase.rstrip(b"\0").decode(errors="replace") or None)
