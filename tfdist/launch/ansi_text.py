"""Text with the escape sequences of terminals: its width, its first cells, and whether it moves the cursor."""

import re

from rich.cells import cell_len

_SEQUENCE = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,2000}\x1b?|[ -/]*)\Z")
# Colors, erasing in the line, a hidden or shown cursor, and texts for the terminal such as its title and links.
_HARMLESS = re.compile(rb"\x1b(?:\[[0-9;:]*[mK]|\(B|\[\?25[hl]|\].*)", re.DOTALL)
_ANY = re.compile(_SEQUENCE)
_STYLE = re.compile(r"(\x1b\[[0-9;:]*m)")
_OTHER = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b(?!\[)|[\x00-\x08\x0a-\x1a\x7f]")
_RESET = "\x1b[0m"


def moves_cursor(output: bytes) -> bool:
    """Returns whether output has a sequence that leaves the line or the screen, as of a display of several lines."""
    return b"\x1b" in output and any(not _HARMLESS.fullmatch(each) for each in _ANY.findall(output))


def begun_sequence(output: bytes) -> int:
    """Returns the number of bytes at the end of output that are the first part of an escape sequence."""
    found = _BEGUN.search(output[-2048:]) if b"\x1b" in output[-2048:] else None
    return len(found[0]) if found else 0


def as_line(output: bytes) -> str:
    """Returns one line of output as text with colors only, for a place that has room for one line."""
    return _OTHER.sub("", output.decode(errors="replace").expandtabs(8))


def width_of(line: str) -> int:
    """Returns the number of cells of a line with colors."""
    cells: int = cell_len(_STYLE.sub("", line))  # Without `rich`, mypy does not know the type.
    return cells


def crop(line: str, width: int) -> str:
    """Returns the first cells of a line with colors, and ends its colors."""
    kept, left = [], width
    for piece in _STYLE.split(line):
        if piece.startswith("\x1b"):
            kept.append(piece)
            continue
        if cell_len(piece) > left:
            piece = _first_cells(piece, left)
            kept.append(piece)
            break
        kept.append(piece)
        left -= cell_len(piece)
    text = "".join(kept)
    return text + _RESET if "\x1b" in text and not text.endswith(_RESET) else text


def _first_cells(text: str, width: int) -> str:
    used = 0
    for place, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:place]
    return text
