"""The last lines of a terminal, which change in place while complete lines scroll by above them.

`rich.live` hides the cursor, which a killed process cannot show again. It also takes the height of its lines for fixed,
but a terminal wraps them when it becomes narrower.
"""

import math
from collections.abc import Callable, Sequence

from tfdist.launch.ansi_text import crop, width_of

_ERASE_BELOW, _ERASE_TO_END = "\x1b[J", "\x1b[K"


class LiveRegion:
    """Draws some lines at the end of a terminal. The cursor stays at the end of the last one, or in an empty line.

    Args:
      put: Writes to the terminal.
    """

    def __init__(self, put: Callable[[bytes], None]):
        self._put = put
        self._lines: list[str] = []  # On the screen.
        self._width = 0

    def draw(self, lines: Sequence[str], *, width: int, above: bytes = b"") -> None:
        """Replaces the lines.

        Args:
          lines: Lines with colors, without line ends. They are cut at the width of the terminal.
          width: Present width of the terminal.
          above: Complete lines of output, each with its line end, to scroll above the region.
        """
        new = [crop(line, width - 1) for line in lines]
        data = frame(self._lines, new, is_same_width=width == self._width, width=width, above=above)
        self._lines, self._width = new, width
        if data:
            self._put(data)

    def forget(self) -> None:
        """Leaves the lines on the screen, since another program has written below them."""
        self._lines = []


def frame(old: Sequence[str], new: Sequence[str], *, is_same_width: bool, width: int, above: bytes) -> bytes:
    """Returns the bytes that replace `old` lines on the screen by output `above` and `new` lines."""
    kept = 0
    if is_same_width and not above:
        if list(old) == list(new):
            return b""
        while kept < min(len(old), len(new)) - 1 and old[kept] == new[kept]:
            kept += 1
    up = sum(max(1, math.ceil(width_of(line) / width)) for line in old[kept:]) - 1
    start = ("\r" + (f"\x1b[{up}A" if up > 0 else "")) if old else ""
    if old and (above or not is_same_width or not new):
        start += _ERASE_BELOW
    # Erases behind the text, not before it, so that nothing flickers.
    body = (_ERASE_TO_END + "\r\n").join(new[kept:]) + (_ERASE_TO_END + _ERASE_BELOW if new else "")
    return start.encode() + above + body.encode()
