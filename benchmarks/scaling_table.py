"""Tables of the results of `benchmarks.scaling`, for a terminal and in Markdown.

python -m benchmarks.scaling_table scaling.json [another.json ...]       # prints Markdown
"""

import pathlib
import sys
from collections.abc import Sequence

from benchmarks.report import ResultError, Row, in_order, read_result, rows_of

# Published speeds of TensorFlow's strategy on 4, 8 and 16 workers, as multiples of one worker.
PUBLISHED = {4: 3.6, 8: 6.0, 16: 9.0}
COLUMNS = (
    "workers",
    "link",
    "variant",
    "K",
    "step, ms [quartiles]",
    "compute, ms",
    "exposed, ms",
    "MB a step",
    "floor, ms",
    "step / floor",
    "efficiency",
    "speed",
    "processors: workers / all",
)


def efficiency(row: Row) -> float | None:
    """The scaling efficiency: the time of a worker that trains alone divided by the time of the step."""
    if row.step_seconds is None or row.compute_seconds is None:
        return None
    return row.compute_seconds / row.step_seconds[1]


def cells(row: Row) -> list[str]:
    """A row of the table, as text."""
    names = [str(row.workers), row.link, row.variant, f"{row.dilation:g}"]
    share = efficiency(row)
    if row.error is not None or row.step_seconds is None or share is None:
        return [*names, f"failed: {row.error or 'not measured'}", *[""] * (len(COLUMNS) - len(names) - 1)]
    low, middle, high = (f"{1e3 * seconds:.0f}" for seconds in row.step_seconds)
    return [
        *names,
        f"{middle} [{low} to {high}]",
        f"{1e3 * (row.compute_seconds or 0):.0f}",
        f"{1e3 * (row.waiting_seconds or 0):.0f}",
        f"{(row.bytes_per_step or 0) / 1e6:.2f}",
        f"{1e3 * (row.floor_seconds or 0):.0f}",
        f"{row.over_floor:.2f}",
        f"{share:.2f}",
        f"{share * row.workers:.1f}",
        f"{row.worker_share or 0:.0%} / {row.busy_share or 0:.0%}",
    ]


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows by number of workers, rate of the link and factor of time, each in the order of the measurements."""
    return sorted(in_order(rows), key=lambda row: (row.workers, row.link_bits_per_second or 0.0, row.dilation))


def markdown_table(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in sorted_rows(rows))]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |" for line in lines)


def published_note(rows: Sequence[Row]) -> str:
    """The published speeds for the measured numbers of workers."""
    known = [f"{PUBLISHED[count]} with {count}" for count in sorted({row.workers for row in rows} & PUBLISHED.keys())]
    return f"Published speeds of TensorFlow's strategy: {', '.join(known)} workers." if known else ""


def main() -> None:
    """Prints the rows of all given files as one table."""
    if not sys.argv[1:]:
        sys.exit("Give the files that `python -m benchmarks.scaling --json FILE` has written.")
    try:
        rows = [row for name in sys.argv[1:] for row in rows_of(read_result(pathlib.Path(name)))]
    except ResultError as error:
        sys.exit(str(error))
    print(markdown_table(rows), published_note(rows), sep="\n\n")


if __name__ == "__main__":
    main()
