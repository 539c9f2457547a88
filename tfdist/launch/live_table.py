"""Renders the live table of workers with `rich`, as lines for the present size of the terminal."""

import dataclasses
import io
from collections.abc import Callable, Sequence

import rich.console
import rich.table
import rich.text

from tfdist.events.phase_names import COMPUTE, EXCHANGE, INPUT
from tfdist.launch.live_figures import NO_SIGN, WorkerRow, chosen_rows, rest_line
from tfdist.readable_numbers import size

_LEAST_WIDTH, _LEAST_HEIGHT = 32, 10
_MOST_WIDTH = 1000
_GAP, _NARROW_GAP = 2, 1
_NARROW = 90
_ROOMY, _MORE_STATE = 94, 4  # Columns of a terminal that has room for longer states, and how much longer they are.
_SHORT_NO_SIGN = "no sign"
_SECONDARY = "dim"


@dataclasses.dataclass(frozen=True)
class _Column:
    header: str
    width: int
    least_terminal: int  # Narrower terminals leave the column out.
    text: Callable[[WorkerRow], str]
    is_left: bool = False


def _share(phase: str) -> Callable[[WorkerRow], str]:
    return lambda row: f"{row.parts[phase]:.0%}" if phase in row.parts else ""


_COLUMNS = (
    _Column("worker", 6, 0, lambda row: str(row.worker)),
    _Column("state", 16, 0, lambda row: row.state, is_left=True),
    _Column("step", 7, 0, lambda row: "" if row.step is None else str(row.step)),
    _Column("steps/s", 7, 40, lambda row: _rate(row.steps_per_second)),
    _Column("compute", 7, 77, _share(COMPUTE)),
    _Column("exchange", 8, 77, _share(EXCHANGE)),
    _Column("input", 5, 77, _share(INPUT)),
    _Column("other", 5, 77, lambda row: f"{max(0.0, 1 - sum(row.parts.values())):.0%}" if row.parts else ""),
    _Column("memory", 7, 48, lambda row: "" if row.memory is None else size(row.memory)),
)


class LiveTable:
    """Renders tables for a terminal with its colors; without colors if NO_COLOR is set."""

    def __init__(self) -> None:
        self._console = rich.console.Console(
            file=io.StringIO(),
            width=_MOST_WIDTH,
            force_terminal=True,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )

    def lines(self, title: str, rows: Sequence[WorkerRow], width: int, height: int) -> list[str]:
        """Returns the lines of the table; none if the terminal is too small for one."""
        if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
            return []
        room = width - 1  # A terminal may wrap a line that fills it.
        chosen = chosen_rows(rows, height // 2 - 3)  # The other half is for the output.
        rest = rest_line(rows, chosen)
        with self._console.capture() as capture:
            self._console.print(_table(chosen, width), width=room)
            for line in (rest, title):
                if line:
                    self._console.print(rich.text.Text(line, style=_SECONDARY), width=room, no_wrap=True, crop=True)
        drawn: str = capture.get()
        return drawn.splitlines()


def _table(rows: Sequence[WorkerRow], width: int) -> rich.table.Table:
    gap = _NARROW_GAP if width < _NARROW else _GAP
    table = rich.table.Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style=_SECONDARY)
    columns = [column for column in _COLUMNS if width >= column.least_terminal]
    for column in columns:
        wide = column.width + (_MORE_STATE if column.is_left and width >= _ROOMY else 0)
        table.add_column(column.header, width=wide, justify="left" if column.is_left else "right", no_wrap=True)
    for row in rows:
        style = "bold red" if row.has_failed else "yellow" if row.holds_up_others else ""
        cells = [
            rich.text.Text(_cell(column, row, width), style=style if column.header == "state" else "")
            for column in columns
        ]
        table.add_row(*cells)
    return table


def _cell(column: _Column, row: WorkerRow, width: int) -> str:
    text = column.text(row)
    is_long = column.is_left and row.kind == NO_SIGN
    return text.replace(NO_SIGN, _SHORT_NO_SIGN) if is_long and width < _ROOMY else text


def _rate(steps_per_second: float | None) -> str:
    if steps_per_second is None:
        return ""
    decimals = 0 if steps_per_second >= 99.5 else 1 if steps_per_second >= 9.95 else 2
    return f"{steps_per_second:.{decimals}f}"
