"""Copies a worker's output to its log file and, for some workers, to the terminal."""

import contextlib
import fcntl
import os
import pathlib
import pty
import select
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Callable
from typing import IO, NamedTuple

from tfdist.launch.line_splitter import LineSplitter
from tfdist.launch.output_target import OutputTarget, write_all
from tfdist.launch.terminal_filter import OutputFilter, TerminalFilter
from tfdist.symlink_safe_file import no_follow

_CHUNK_BYTES = 1 << 16
_IDLE_MILLISECONDS = 50  # After this time, an incomplete line is shown.
_LONGEST_DRAIN_SECONDS = 10.0  # For output that the reader of this process's output does not take.
_STDOUT, _STDERR = 1, 2


class WorkerOutput:
    """The standard output and error of one worker, from before its start until after its end.

    Create the object, start the worker with `stdout` and `stderr`, then call `begin`, and after the worker's end
    `finish`. The log file gets every byte, also the bytes that are not shown.

    Args:
      path: Path of the log file, to which output is appended.
      show: "no": log only. "calm": this process's standard output and error show the worker's, without the lines that
        `TerminalFilter` removes. On a terminal, the worker gets a terminal too, so that progress bars work. "by line":
        this process's standard output shows all lines of the worker, each after `name`.
      name: Text to print before each line.
      reported_stack: See `TerminalFilter`.
      target: Returns what shows the output for a descriptor of this process, or nothing for None.

    Raises:
      OSError: If the log cannot be written.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        show: str,
        name: str = "",
        reported_stack: Callable[[], str] = str,
        target: Callable[[int | None], OutputTarget] = OutputTarget,
    ):
        self._log: IO[bytes] = open(path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115 (see `finish`)
        self._ends: list[int] = []  # The worker's descriptors.
        self._sources: list[_Source] = []
        self._target = target
        self._pumps: list[threading.Thread] = []
        self.stderr: int = subprocess.STDOUT
        # This process also copies output that goes only to the log, so that a full disk is no error in the worker.
        if show == "calm":
            self.stdout = self._open_source(_STDOUT, OutputFilter(), terminal=os.isatty(_STDOUT))
            self.stderr = self._open_source(_STDERR, TerminalFilter(reported_stack), terminal=os.isatty(_STDERR))
        else:
            shown = _STDOUT if show == "by line" else None
            self.stdout = self._open_source(shown, _NamedLines(f"{name} ".encode()), terminal=False)

    def begin(self) -> None:
        """Starts to copy output, once the worker has its descriptors. Starts threads, so fork before, not after."""
        self._close_ends()
        for source in self._sources:
            pump = threading.Thread(target=self._pump, args=(source,), name="tfdist-output", daemon=True)
            pump.start()
            self._pumps.append(pump)

    def finish(self, seconds: float) -> None:
        """Waits up to `seconds` for the last output, since a process outside the worker's session may keep it open.

        Waits longer while output is unread, because a busy machine may start the copying threads late.
        """
        self._close_ends()
        for source in self._sources[len(self._pumps) :]:  # No thread was started for them.
            os.close(source.descriptor)
        del self._sources[len(self._pumps) :]
        deadline = time.monotonic() + _LONGEST_DRAIN_SECONDS
        for source, pump in zip(self._sources, self._pumps, strict=True):
            pump.join(seconds)
            while pump.is_alive() and source.has_unread() and time.monotonic() < deadline:
                pump.join(seconds)
        if not any(pump.is_alive() for pump in self._pumps):
            self._log.close()

    def _open_source(self, shown: int | None, view: OutputFilter, *, terminal: bool) -> int:
        """Opens a channel, returns the worker's end. The output goes to the log and, filtered by `view`, to `shown`."""
        if terminal and shown is not None:
            ours, theirs = pty.openpty()
            tty.setraw(theirs)  # The real terminal converts line ends.
        else:
            ours, theirs = os.pipe()
        source = _Source(ours, self._target(shown), view, shown if terminal else None)
        source.follow_size()
        self._sources.append(source)
        self._ends.append(theirs)
        return theirs

    def follow_size(self) -> None:
        """Gives the worker's terminals the present size of the terminals that show them. Costs two system calls."""
        for source, pump in zip(self._sources, self._pumps, strict=False):
            if pump.is_alive():  # A pump closes its descriptor at the end.
                source.follow_size()

    def _close_ends(self) -> None:
        while self._ends:
            os.close(self._ends.pop())

    def _pump(self, source: "_Source") -> None:
        """Copies a worker's output until its end even if writes fail, because the worker must not block on a full pipe.

        Shows no more output once its reader is gone (`| head`), but keeps writing the log: a full disk may get room.
        """
        target, view = source.target, source.view
        # A terminal ends with an error.
        with open(source.descriptor, "rb", buffering=0) as stream, contextlib.suppress(OSError):
            ready = select.poll()
            ready.register(stream, select.POLLIN)
            while True:
                if view.has_rest and not ready.poll(_IDLE_MILLISECONDS):
                    target.write(view.flush())
                    ready.poll()
                if not (chunk := stream.read(_CHUNK_BYTES)):
                    break
                write_all(self._log.fileno(), chunk)
                target.write(view.feed(chunk))
        target.write(view.end())
        target.end()


class _Source(NamedTuple):
    """The end of a channel that this process reads.

    Attributes:
      descriptor: Its descriptor.
      target: Shows the output.
      view: Filters the output that is shown.
      terminal: Descriptor of the terminal that the worker's end resembles; `None` if it is a pipe.
    """

    descriptor: int
    target: OutputTarget
    view: OutputFilter
    terminal: int | None

    def has_unread(self) -> bool:
        """Returns whether the worker has written bytes that were not read yet."""
        unread = bytearray(4)
        with contextlib.suppress(OSError):  # The reader has closed it.
            fcntl.ioctl(self.descriptor, termios.FIONREAD, unread)
        return any(unread)

    def follow_size(self) -> None:
        """Gives the worker's end the size of the terminal that it resembles."""
        if self.terminal is None:
            return
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self.terminal, termios.TIOCGWINSZ, bytes(8))
            if size != fcntl.ioctl(self.descriptor, termios.TIOCGWINSZ, bytes(8)):
                fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)


class _NamedLines(OutputFilter):
    """Shows whole lines of a worker's output, each after the worker's name."""

    def __init__(self, name: bytes):
        self._name, self._lines = name, LineSplitter()

    def feed(self, chunk: bytes) -> bytes:
        return self._named(self._lines.split(chunk))

    def end(self) -> bytes:
        return self._named(self._lines.rest())

    def _named(self, lines: list[bytes]) -> bytes:
        return b"".join(self._name + line + b"\n" for line in lines)
