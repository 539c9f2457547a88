"""Where a worker's output goes: to its log file, and for some to the terminal too."""

import contextlib
import os
import pathlib
import pty
import subprocess
import termios
import threading
import tty
from collections.abc import Iterator
from typing import IO

__all__ = ["Output"]

_CHUNK_BYTES = 1 << 16
_STDOUT, _STDERR = 1, 2
_terminal = threading.Lock()


class Output:
    """The standard output and error of one worker, from before its start until after its end.

    Open it, start the worker with `stdout` and `stderr`, then call `begin`; when the worker is gone, `finish`.

    Args:
      path: The log file. It is appended to.
      show: "no": only the log. "as it is": its bytes also to this process's own output and error; if that is a
        terminal, the worker has one too, so that progress bars work. "by line": its lines also to this process's own
        output, after `name`.
      name: What to print before a line.

    Raises:
      OSError: If the log cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, show: str, name: str = ""):
        self._name = f"{name} ".encode()
        self._by_line = show == "by line"
        self._log: IO[bytes] = path.open("ab", buffering=0)
        self._ends: list[int] = []  # of the worker
        self._sources: list[tuple[int, int]] = []  # to read from, and where to show it
        self._pumps: list[threading.Thread] = []
        self.stdout: int | IO[bytes] = self._log
        self.stderr: int = subprocess.STDOUT
        if show != "no":
            self.stdout = self._open_source(_STDOUT, terminal=show == "as it is" and os.isatty(_STDOUT))
        if show == "as it is":
            self.stderr = self._open_source(_STDERR, terminal=os.isatty(_STDERR))

    def begin(self) -> None:
        """Starts to copy, now that the worker has its ends. Starts threads: fork before, not after."""
        self._close_ends()
        self._pumps = [
            threading.Thread(target=self._pump, args=source, name="tfdist-output", daemon=True)
            for source in self._sources
        ]
        for pump in self._pumps:
            pump.start()

    def finish(self, seconds: float) -> None:
        """Waits for the last words, but not for ever: what escaped from the worker's session may hold its output."""
        self._close_ends()
        if not self._pumps:
            for source, _ in self._sources:
                os.close(source)
            self._sources = []
        for pump in self._pumps:
            pump.join(seconds)
        if not any(pump.is_alive() for pump in self._pumps):
            self._log.close()

    def _open_source(self, shown: int, *, terminal: bool) -> int:
        """The worker's end of a new channel whose bytes go to the descriptor `shown`."""
        if terminal:
            ours, theirs = pty.openpty()
            tty.setraw(theirs)  # the real terminal does what is to be done about line ends
            with contextlib.suppress(termios.error):
                termios.tcsetwinsize(theirs, termios.tcgetwinsize(shown))
        else:
            ours, theirs = os.pipe()
        self._sources.append((ours, shown))
        self._ends.append(theirs)
        return theirs

    def _close_ends(self) -> None:
        while self._ends:
            os.close(self._ends.pop())

    def _pump(self, source: int, shown: int) -> None:
        """Copies until the end. A place that fails is left out from then on: the worker must not block on a full pipe.

        A full disk is such a place, or a reader that is gone (`| head`).
        """
        places = [self._log.fileno(), shown]
        with open(source, "rb", buffering=0) as stream:
            for piece in _lines(stream) if self._by_line else _chunks(stream):
                for place in list(places):
                    try:
                        self._put(place, piece)
                    except OSError:
                        places.remove(place)

    def _put(self, place: int, piece: bytes) -> None:
        if place != self._log.fileno():
            if self._by_line:
                piece = self._name + piece.rstrip(b"\n") + b"\n"
            with _terminal:
                _write_all(place, piece)
        else:
            _write_all(place, piece)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in _chunks(stream):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest
