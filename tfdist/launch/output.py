"""Where a worker's output goes: to its log file, and for some to the terminal too."""

import contextlib
import os
import pathlib
import pty
import subprocess
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from typing import IO

__all__ = ["Lines", "Output"]

_CHUNK_BYTES = 1 << 16
_LINE_BYTES = 1 << 16
_STDOUT, _STDERR = 1, 2
_terminal = threading.Lock()


class Output:
    """The standard output and error of one worker, from before its start until after its end.

    Open it, start the worker with `stdout` and `stderr`, then call `begin`; when the worker is gone, `finish`.

    Args:
      path: The log file. It is appended to.
      show: "no": only the log. "as it is": its bytes also to this process's own output and error; if that is a
        terminal, the worker has one too, so that progress bars work. "by line": its lines also to this process's own
        output, after `name`; a progress bar, which goes back to the start of its line, is a line each time.
      name: What to print before a line.

    Raises:
      OSError: If the log cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, show: str, name: str = ""):
        self._name = f"{name} ".encode()
        self._by_line = show == "by line"
        self._log: IO[bytes] = path.open("ab", buffering=0)
        self._ends: list[int] = []  # of the worker
        self._sources: list[tuple[int, int | None]] = []  # to read from, and where to show it
        self._pumps: list[threading.Thread] = []
        self.stderr: int = subprocess.STDOUT
        # Also what goes to the log alone is copied: a full disk is then no error of the worker.
        if show == "as it is":
            self.stdout = self._open_source(_STDOUT, terminal=os.isatty(_STDOUT))
            self.stderr = self._open_source(_STDERR, terminal=os.isatty(_STDERR))
        else:
            self.stdout = self._open_source(_STDOUT if self._by_line else None, terminal=False)

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

    def _open_source(self, shown: int | None, *, terminal: bool) -> int:
        """The worker's end of a new channel whose bytes go to the log, and to the descriptor `shown`."""
        if terminal and shown is not None:
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

    def _pump(self, source: int, shown: int | None) -> None:
        """Copies until the end, whatever fails: the worker must not block on a full pipe.

        A reader that is gone (`| head`) is left out from then on; a disk that is full may have room again.
        """
        with open(source, "rb", buffering=0) as stream:
            lines = Lines()
            for chunk in _chunks(stream):
                _put(self._log.fileno(), chunk)
                shown = self._show(shown, lines.split(chunk) if self._by_line else [chunk])
            self._show(shown, lines.rest())

    def _show(self, place: int | None, pieces: Sequence[bytes]) -> int | None:
        if place is None:  # nor wait for others at a terminal that does not move
            return None
        if self._by_line:
            pieces = [self._name + line + b"\n" for line in pieces]
        with _terminal:
            return _put(place, b"".join(pieces))


class Lines:
    """Cuts bytes into lines as they come, also at carriage returns, and what is longer than 64 KiB."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._may_go_on = False  # after a carriage return at the end of a chunk

    def split(self, chunk: bytes) -> list[bytes]:
        """The lines that end with this chunk, without their ends."""
        if self._may_go_on:
            chunk = chunk.removeprefix(b"\n")
        self._may_go_on = chunk.endswith(b"\r")
        lines = []
        for piece in chunk.splitlines(keepends=True):
            line = piece.rstrip(b"\r\n")
            self._rest += line
            while len(self._rest) > _LINE_BYTES:
                lines.append(bytes(self._rest[:_LINE_BYTES]))
                del self._rest[:_LINE_BYTES]
            if piece != line and (self._rest or not piece.endswith(b"\r")):  # a bar begins with a return
                lines += self.rest() or [b""]
        return lines

    def rest(self) -> list[bytes]:
        """What came after the last end of a line, as a line if it is not empty."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest else []


def _put(place: int | None, data: bytes) -> int | None:
    """Writes to a place; gives it back, or None once it fails."""
    if place is not None:
        try:
            _write_all(place, data)
        except OSError:
            return None
    return place


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
