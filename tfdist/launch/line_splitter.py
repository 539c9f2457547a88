"""Splits bytes into lines as a terminal would show them, with progress bars in their last state."""

import math
import re
import time
from collections.abc import Callable

_LINE_BYTES = 1 << 16
_BAR_SECONDS = 30.0
_UTF8_CONTINUATION = range(0x80, 0xC0)
_PIECES = re.compile(rb"[\r\n]|[\b]+|[^\r\n\b]+")


class LineSplitter:
    """Splits bytes into lines as a terminal would show them, and splits lines longer than 64 KiB.

    A progress bar, which uses carriage returns and backspaces, becomes one line with its last state. The current state
    of a long progress bar becomes a line every `bar_seconds` by `clock`, which returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, bar_seconds: float = _BAR_SECONDS) -> None:
        self._line = bytearray()
        self._back = 0.0  # Characters to remove before the next one; infinite after a carriage return.
        self._clock = clock
        self._bar_seconds = bar_seconds
        self._shown = clock()

    @property
    def incomplete(self) -> bytes:
        """The current state of the last line, which has no line end yet."""
        return bytes(self._line)

    def split(self, chunk: bytes) -> list[bytes]:
        """Returns the lines of output that this chunk completes, without line ends."""
        lines: list[bytes] = []
        for piece in _PIECES.findall(chunk):
            if piece == b"\n":
                lines.append(self._take())
            elif piece == b"\r":
                self._back = math.inf
                if self._line and self._clock() - self._shown >= self._bar_seconds:
                    lines.append(self._take())
            elif piece.startswith(b"\b"):
                self._back += len(piece)
            else:
                self._go_back()
                self._line += piece
                while len(self._line) > _LINE_BYTES:
                    lines.append(bytes(self._line[:_LINE_BYTES]))
                    del self._line[:_LINE_BYTES]
        return lines

    def rest(self) -> list[bytes]:
        """Returns the incomplete last line of the output, if it is not empty."""
        return [self._take()] if self._line else []

    def _take(self) -> bytes:
        line, self._line, self._back = bytes(self._line), bytearray(), 0.0
        self._shown = self._clock()
        return line

    def _go_back(self) -> None:
        while self._back > 0 and self._line:
            while self._line.pop() in _UTF8_CONTINUATION and self._line:
                pass
            self._back -= 1
        self._back = 0.0
