"""A terminal for tests, with the few escape sequences that `tfdist run` uses."""

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|.", re.DOTALL)
_BEGUN = re.compile(r"\x1b(?:\[[0-9;?]*)?\Z")


class EmulatedTerminal:
    """The rows of a terminal, also those that have scrolled out, and the place of the cursor."""

    def __init__(self, width=80, height=24):
        self.width, self.height = width, height
        self.rows = [""]
        self.row = self.column = 0
        self._held = ""  # The first part of an escape sequence.

    @property
    def text(self):
        """All rows without blanks at their ends."""
        return [row.rstrip() for row in self.rows]

    @property
    def screen(self):
        """The rows that are visible now, without empty rows at the end."""
        return "\n".join(self.text[-self.height :]).rstrip().split("\n")

    def feed(self, output):
        output = self._held + output
        begun = _BEGUN.search(output)
        self._held = begun[0] if begun else ""
        output = output[: len(output) - len(self._held)]
        for token in _TOKEN.finditer(output):
            if token[2]:
                self._control(token[1], token[2])
            elif not token[0].startswith("\x1b"):
                self._put(token[0])

    def resize(self, width):
        """Wraps rows again as modern terminals do; the cursor must be in the last row."""
        cursor = self.column
        rows = [
            [row[place : place + width] for place in range(0, max(1, len(row.rstrip())), width)] for row in self.rows
        ]
        self.rows = [part for row in rows for part in row]
        self.width, self.row, self.column = width, len(self.rows) - 1, cursor % width if cursor else 0

    def _put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\n":
            self._down()
        elif character >= " ":
            if self.column == self.width:
                self.column = 0
                self._down()
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    def _down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def _control(self, argument, kind):
        top = max(0, len(self.rows) - self.height)
        if kind == "A":
            self.row = max(top, self.row - int(argument or 1))
        elif kind in "JK":
            self.rows[self.row] = self.rows[self.row][: self.column]
            if kind == "J":
                del self.rows[self.row + 1 :]
        else:
            assert kind == "m", (argument, kind)
