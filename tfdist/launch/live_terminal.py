"""The output of `tfdist run` on a terminal: output above a table of the workers, the chief's progress bar below it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from absl import logging

from tfdist.launch.attempt_watch import AttemptWatch
from tfdist.launch.live_screen import LiveScreen, ScreenStream
from tfdist.launch.live_table import LiveTable
from tfdist.launch.output_target import OutputTarget, write_all
from tfdist.launch.run_terminal import RunTerminal, repeating

_STDOUT, _STDERR = 1, 2
_LOOK_SECONDS = 0.25  # Output appears after this time at the latest.
_TABLE_SECONDS = 1.0
_UNKNOWN_SIZE = (80, 24)


class LiveTerminal(RunTerminal):
    """Shows a live table of the workers, below all complete lines of output and above incomplete lines."""

    def __init__(self) -> None:
        super().__init__(tells_progress=False)
        self._screen = LiveScreen(_write, terminal_size)
        self._table = LiveTable()
        self._lines: Sequence[str] = ()
        self._read_at, self._lines_size = 0.0, (0, 0)

    def target(self, descriptor: int | None) -> OutputTarget:
        """Returns what shows output for a descriptor of this process; None shows nothing."""
        if descriptor is None or not _is_same_terminal(descriptor):
            return OutputTarget(descriptor)
        return self._screen.stream()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Shows messages of this process on the screen too, during the block. Call it in the main thread."""
        before = signal.signal(signal.SIGCONT, self._note_return)
        handler = logging.get_absl_handler().python_handler
        stream = handler.setStream(_MessageStream(self._screen.stream())) if _is_same_terminal(_STDERR) else None
        try:
            yield
        finally:
            if stream is not None:
                handler.setStream(stream)
            self._screen.refresh(())
            signal.signal(signal.SIGCONT, before)

    @contextlib.contextmanager
    def watching(self, watch: AttemptWatch) -> Iterator[None]:
        """Shows the table of an attempt during the block. Uses a thread, so start workers before."""
        self._read_at = 0.0
        try:
            with repeating(_LOOK_SECONDS, lambda: self._look(watch)):
                yield
        finally:
            self._screen.refresh(())

    def _look(self, watch: AttemptWatch) -> None:
        now, size = time.monotonic(), terminal_size()
        if now - self._read_at >= _TABLE_SECONDS or size != self._lines_size:
            self._read_at, self._lines_size = now, size
            self._lines = self._table.lines(watch.title(), watch.rows(), *size) if _is_in_foreground() else ()
        self._screen.refresh(self._lines)

    def _note_return(self, signum: int, frame: FrameType | None) -> None:
        self._screen.was_left()


class _MessageStream:
    """A text stream for log messages, each of which ends with a line end."""

    def __init__(self, stream: ScreenStream):
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write_now(text.encode(errors="replace"))

    def flush(self) -> None:
        pass


def terminal_size() -> tuple[int, int]:
    """Returns the columns and lines of the terminal of standard output."""
    with contextlib.suppress(OSError):
        columns, lines = os.get_terminal_size(_STDOUT)
        if columns and lines:
            return columns, lines
    return _UNKNOWN_SIZE


def _write(data: bytes) -> None:
    write_all(_STDOUT, data)


def _is_same_terminal(descriptor: int) -> bool:
    """Returns whether a descriptor is the terminal of standard output."""
    try:
        return os.isatty(descriptor) and os.fstat(descriptor).st_rdev == os.fstat(_STDOUT).st_rdev
    except OSError:
        return False


def _is_in_foreground() -> bool:
    """Returns whether this process may draw: not a background job of a shell, whose prompt a table would disturb."""
    try:
        return os.tcgetpgrp(_STDOUT) == os.getpgrp()
    except OSError:  # Not the terminal that controls this process.
        return True
