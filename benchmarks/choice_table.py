"""Compares `compression="auto"` with each codec that it may choose, from results of a step's time.

    python -m benchmarks.choice_table auto.json [another.json ...]      # prints Markdown

The files are of `benchmarks.train_step` or `benchmarks.scaling`. Ratios are medians of the ratios within rounds. The
best fixed codec is the one with the shortest median step, no codec included. "Trials" are the steps in which tfdist
chose, without the first one, and their time. The last column has the first 1000 steps with these trials, divided by
1000 steps without a codec.
"""

import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence

from benchmarks.report import ResultError, Row, read_result, rows_of

FIXED = {"tfdist": "none", "tfdist+float16": "float16", "tfdist+bfloat16": "bfloat16", "tfdist+int8": "int8"}
AUTO = ("tfdist-auto", "tfdist+auto")
_STEPS = 1000  # Steps of a program, for the last column.
COLUMNS = (
    "model",
    "workers",
    "link",
    "K",
    *FIXED.values(),
    "auto, ms",
    "MB a step",
    "auto / best",
    "auto / none",
    "trials",
    f"{_STEPS} steps / none",
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The rows of one model, number of workers and link.

    Attributes:
      auto: The row with the automatic choice.
      fixed: The rows with a fixed codec, by its name.
    """

    auto: Row
    fixed: dict[str, Row]

    @property
    def best(self) -> str:
        """The fixed codec with the shortest step."""
        return min(self.fixed, key=lambda name: _step(self.fixed[name]))

    def ratio(self, name: str) -> float:
        """The time of a step with the automatic choice, divided by that with a fixed codec."""
        pairs = zip(self.auto.block_seconds, self.fixed[name].block_seconds, strict=False)
        return statistics.median(mine / other for mine, other in pairs)

    def with_trials(self) -> float:
        """The time of the first steps, trials included, divided by that without a codec."""
        seconds, steps = self.auto.trial_seconds or 0.0, self.auto.trial_steps or 0
        later = (_STEPS - steps) * self.ratio("none") * _step(self.fixed["none"])
        return (seconds + later) / (_STEPS * _step(self.fixed["none"]))

    def texts(self) -> list[str]:
        """The cell as a row of the table."""
        auto = self.auto
        times = [f"{1e3 * _step(self.fixed[name]):.0f}" if name in self.fixed else "" for name in FIXED.values()]
        trials = f"{auto.trial_steps} steps, {auto.trial_seconds:.1f} s" if auto.trial_seconds is not None else ""
        return [
            *(auto.model, str(auto.workers), auto.link, f"{auto.dilation:g}"),
            *times,
            f"{1e3 * _step(auto):.0f}",
            f"{(auto.bytes_per_step or 0) / 1e6:.2f}",
            f"{self.ratio(self.best):.2f} ({self.best})",
            f"{self.ratio('none'):.2f}" if "none" in self.fixed else "",
            trials,
            f"{self.with_trials():.2f}" if "none" in self.fixed else "",
        ]


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """The cells that have an automatic choice and at least one fixed codec, in the order of the rows."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row.is_measured:
            found.setdefault((row.model, row.workers, row.link, row.dilation), {})[row.variant] = row
    cells = []
    for variants in found.values():
        auto = next((variants[name] for name in AUTO if name in variants), None)
        fixed = {name: variants[variant] for variant, name in FIXED.items() if variant in variants}
        if auto is not None and fixed:
            cells.append(Cell(auto, fixed))
    return cells


def markdown_table(cells: Sequence[Cell]) -> str:
    """The table as Markdown, without columns that are empty in all rows."""
    rows = [each.texts() for each in cells]
    kept = [any(row[place] not in ("", "1") for row in rows) or name != "K" for place, name in enumerate(COLUMNS)]
    kept = [keep and any(row[place] for row in rows) for place, keep in enumerate(kept)]
    lines = [list(itertools.compress(line, kept)) for line in [COLUMNS, ["---"] * len(COLUMNS), *rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _step(row: Row) -> float:
    assert row.step_seconds is not None
    return row.step_seconds[1]


def main() -> None:
    """Prints the cells of all given files as one table."""
    if not sys.argv[1:]:
        sys.exit("Give files that `benchmarks.train_step` or `benchmarks.scaling` has written with --json.")
    try:
        rows = [row for name in sys.argv[1:] for row in rows_of(read_result(pathlib.Path(name)))]
    except ResultError as error:
        sys.exit(str(error))
    print(markdown_table(cells_of(rows)))


if __name__ == "__main__":
    main()
