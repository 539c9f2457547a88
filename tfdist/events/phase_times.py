"""Adds up the seconds that this worker spends in each phase, so that `tfdist report` accounts for all its time.

The training thread changes the phase. TensorFlow reports the end of each step in a thread of its own. Both cost a few
microseconds, and nothing if off. Does not load TensorFlow.
"""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping

from absl import logging

from tfdist.events.phase_names import CALLBACK, COMPUTE, EXCHANGE, INPUT, START, TRACING
from tfdist.events.time_record import (
    BEGINNING,
    TIMED_PHASES,
    UNDECIDED,
    SaveMoment,
    SignOfLife,
    TimeRecord,
    TimeRecordFile,
)

STEP = "step"
"""Phase of a running training step. At its end it is divided into input, computation and exchanges."""


class PhaseTimes:
    """The seconds of this process by phase, and the file that has them.

    Attributes:
      is_on: Whether times are kept.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.RLock()  # A signal handler may run in a change.
        self._file: TimeRecordFile | None = None
        self._seconds = dict.fromkeys(TIMED_PHASES, 0.0)
        self._phase, self._nested = START, ""  # The phase; one in which it is nested, which counts instead.
        self._has_stepped = self._has_traced = False  # Since the running training function began.
        self._steps, self._resumed = 0, (UNDECIDED, 0)
        self._since = self._begun = 0.0
        self._start, self._pid = 0.0, 0

    def begin(self, path: pathlib.Path) -> None:
        """Begins to keep times in the file `path`. A file that cannot be written is not needed for training."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = TimeRecordFile(path)
            self._start, self._pid, self._begun = time.time(), os.getpid(), time.monotonic()
            self._since = self._begun
            self.is_on = True
        except OSError as error:
            logging.warning("The times of this worker are not recorded: %s", error)
            return
        with self._lock:
            self._write()

    def switch(self, phase: str) -> None:
        """Notes that another phase begins."""
        if not self.is_on or phase == self._phase:
            return
        with self._lock:
            self._count()
            if phase == STEP:  # After Python's trace, TensorFlow optimizes the graph.
                self._has_stepped, self._has_traced = False, self._phase == TRACING
            self._phase = phase
            self._write()

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`, and changes in it later, such as a `switch` in an exchange of a save."""
        if not self.is_on or self._nested:
            yield
            return
        self._nest(phase)
        try:
            yield
        finally:
            self._nest("")

    def _nest(self, phase: str) -> None:
        with self._lock:
            self._count()
            self._nested = phase
            self._write()

    def stepped(self, parts: Mapping[str, float]) -> None:
        """Notes the end of a training step.

        Args:
          parts: Seconds of the step for input, computation and exchanges. The rest of the time is of Python.
        """
        with self._lock:
            self._steps += 1
            now = time.monotonic()
            left = now - self._since
            scale = min(1.0, left / max(sum(parts.values()), 1e-9))
            for phase in (INPUT, COMPUTE, EXCHANGE):
                self._seconds[phase] += parts[phase] * scale
                left -= parts[phase] * scale
            self._seconds[TRACING if self._has_traced and not self._has_stepped else CALLBACK] += max(left, 0.0)
            self._since, self._has_stepped = now, True
            self._write()

    def count_steps(self, steps: int) -> None:
        """Notes the number of finished training steps, including those in the commit from which training continued."""
        if self.is_on and steps != self._steps:
            with self._lock:
                self._steps = steps
                self._write()

    def resumed(self, commit: int | None, steps: int) -> None:
        """Notes from which commit this process continues, and the number of steps in it; without one, the beginning."""
        if not self.is_on or (commit is None and self._resumed[0] != UNDECIDED):
            return  # A later `fit` of this process.
        with self._lock:
            self._count()
            self._resumed = (BEGINNING if commit is None else commit, steps)
            self._steps = steps
            self._write()

    def saved(self, commit: int, steps: int) -> None:
        """Notes that the state for a commit has been copied."""
        if not self.is_on or self._file is None:
            return
        with self._lock:
            self._count()
            self._steps = steps
            try:
                self._file.add_save(SaveMoment(commit, steps, self._seconds))
            except OSError as error:
                self._stop(error)
            self._write()

    def show_life(self, phase: str | None, steps: int) -> None:
        """Writes what this process does now. Takes no lock, so a thread that hangs in a write does not stop it."""
        self._write_sign(SignOfLife(time.time(), steps, phase))

    def end_signs(self) -> None:
        """Withdraws the last sign of life, since no more will follow, so that this process does not seem frozen."""
        self._write_sign(SignOfLife(0.0, 0, None))

    def _write_sign(self, sign: SignOfLife) -> None:
        file = self._file
        if not self.is_on or file is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):  # The next change of the phase notices the error, too.
            file.write_sign(sign)

    def _count(self) -> None:
        """Adds the time since the last change to the phase that has ended."""
        now = time.monotonic()
        phase = self._nested or self._phase
        if phase == STEP:
            phase = CALLBACK if self._has_stepped else COMPUTE
        self._seconds[phase] += now - self._since
        self._since = now

    def _write(self) -> None:
        if self._file is None or os.getpid() != self._pid:
            return
        phase = self._nested or self._phase
        record = TimeRecord(
            self._start,
            self._start + self._since - self._begun,
            COMPUTE if phase == STEP else phase,
            self._steps,
            *self._resumed,
            self._seconds,
        )
        try:
            self._file.write(record)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.is_on, self._file = False, None
        logging.warning("The times of this worker are not recorded any more: %s", error)


TIMES = PhaseTimes()
"""The times of this process."""
