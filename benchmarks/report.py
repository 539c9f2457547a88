"""Tables and plots of the results of `benchmarks.train_step`.

    python -m benchmarks.report benchmarks/results/train_step.json

Beside the JSON file it writes a Markdown table and three kinds of plots: step time by link rate, bytes per step, and
step time divided into compute and waiting.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.record import write_whole

REFERENCE = "stock"
_MAKERS = (REFERENCE, "tf_keras", "ddp", "tfdist")
HOROVOD = "Horovod is missing: 0.28.1, its newest release, does not build against TensorFlow 2.21."
COLUMNS = (
    "model",
    "workers",
    "link",
    "variant",
    "step, ms [quartiles]",
    "compute, ms",
    "waiting, ms",
    "MB a step",
    "floor, ms",
    "step / floor",
    "times stock",
)
KEY = ("model", "workers", "link", "variant", "dilation")


class ResultError(ValueError):
    """A file has no results to show."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one variant on one link; without times if it failed before the first measurement.

    Attributes:
      model: Name of the model.
      workers: Number of workers.
      link: The requested rate of the link.
      variant: Name of the variant.
      link_bits_per_second: The measured rate, or None if it was not measured.
      error: The reason of a failure in one line, or None.
      step_seconds: Quartiles of the time between the ends of two steps; a step ends when its last worker does.
      compute_seconds: The median step of workers that train at the same time without an exchange.
      bytes_per_step: Bytes sent or received, whichever is more, on the interface of the busiest worker.
      block_seconds: The median step of each block.
      stock_block_seconds: The median step of `stock` in the same round as each block, None where it failed.
      dilation: The factor of time of the measurement, see `benchmarks.scaling`. The times above are divided by it.
      processor_seconds: Processor time of all workers in a step, not divided.
      worker_share: The part of the machine's processor time in a step that the workers took.
      busy_share: The part of it that was not idle.
      trial_seconds: Time of the steps in which `compression="auto"` chose codecs, without the first step.
      trial_steps: Number of these steps.
      reason: Why it chose these codecs, if known.
    """

    model: str
    workers: int
    link: str
    variant: str
    link_bits_per_second: float | None
    error: str | None = None
    step_seconds: tuple[float, float, float] | None = None
    compute_seconds: float | None = None
    bytes_per_step: float | None = None
    block_seconds: tuple[float, ...] = ()
    stock_block_seconds: tuple[float | None, ...] = ()
    dilation: float = 1.0
    processor_seconds: float | None = None
    worker_share: float | None = None
    busy_share: float | None = None
    trial_seconds: float | None = None
    trial_steps: int | None = None
    reason: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there are times and no error. Times of a variant that crashed later do not count."""
        return self.error is None and self.step_seconds is not None

    @property
    def waiting_seconds(self) -> float | None:
        """Time of a step beyond its computation: the exchange, and the work of the codec."""
        if self.step_seconds is None or self.compute_seconds is None:
            return None
        return self.step_seconds[1] - self.compute_seconds

    @property
    def floor_seconds(self) -> float | None:
        """Time of a step in which exchange and computation overlap perfectly; see `floor`."""
        if self.compute_seconds is None or self.bytes_per_step is None:
            return None
        return floor(self.compute_seconds, self.bytes_per_step, self.link_bits_per_second)

    @property
    def over_floor(self) -> float | None:
        """The median step divided by `floor_seconds`."""
        if self.step_seconds is None or not self.floor_seconds:
            return None
        return self.step_seconds[1] / self.floor_seconds

    @property
    def times_stock(self) -> float | None:
        """The speed relative to stock, as the median over rounds."""
        pairs = zip(self.block_seconds, self.stock_block_seconds, strict=False)  # no stock blocks if it did not run
        ratios = [stock / mine for mine, stock in pairs if stock is not None]
        return statistics.median(ratios) if ratios else None

    def to_json(self) -> dict[str, Any]:
        """The attributes and the derived values, as plain values."""
        derived = ("waiting_seconds", "floor_seconds", "over_floor", "times_stock")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        """Inverse of `to_json`.

        Raises:
          TypeError: If `values` are not those of a row.
        """
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


def floor(compute_seconds: float, bytes_per_step: float, bits_per_second: float | None) -> float:
    """The least time of a step: its computation or, if longer and the rate is known, the transfer of its bytes."""
    transfer = 8 * bytes_per_step / bits_per_second if bits_per_second else 0.0
    return max(compute_seconds, transfer)


def cells(row: Row) -> list[str]:
    """A row of the table, as text."""
    names = [row.model, str(row.workers), describe_link(row), row.variant]
    if row.error is not None or row.step_seconds is None:
        failed = "failed: " if row.error and row.step_seconds is None else ""
        return [*names, f"{failed}{row.error or 'not measured'}", *[""] * (len(COLUMNS) - len(names) - 1)]
    low, middle, high = (f"{1e3 * seconds:.0f}" for seconds in row.step_seconds)
    numbers = (
        (row.compute_seconds, 1e3, 0),
        (row.waiting_seconds, 1e3, 0),
        (row.bytes_per_step, 1e-6, 2),
        (row.floor_seconds, 1e3, 0),
        (row.over_floor, 1, 2),
        (row.times_stock, 1, 2),
    )
    return [*names, f"{middle} [{low} to {high}]", *(_number(*number) for number in numbers)]


def describe_link(row: Row) -> str:
    """The requested and the measured rate: "1gbit (948 Mbit/s)"."""
    rate = row.link_bits_per_second
    return f"{row.link} ({rate / 1e6:.0f} Mbit/s)" if rate else row.link


def notes(rows: Sequence[Row]) -> list[str]:
    """The lines below the table."""
    pairs = [(row, row.times_stock) for row in rows if row.variant == "tfdist-loop" and row.is_measured]
    lines = [
        f"{row.model}, {row.workers} workers, {row.link}: tfdist-loop / stock {1 / times:.3f} (by the median of rounds)"
        for row, times in pairs
        if times
    ]
    return [*lines, HOROVOD]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows sorted by model, workers, link rate and framework, with failed ones last in each link."""
    models = _distinct(rows, "model")
    rates = {row.link: row.link_bits_per_second or 0.0 for row in rows if not row.error}

    def place(row: Row) -> tuple[Any, ...]:
        failed = row.error is not None
        return models.index(row.model), row.workers, rates.get(row.link, 0.0), failed, _maker(row.variant)

    return sorted(rows, key=place)


def _maker(variant: str) -> int:
    return next((rank for rank, name in enumerate(_MAKERS) if variant.startswith(name)), len(_MAKERS))


def overview(rows: Sequence[Row]) -> list[str]:
    """A Markdown table for one model and number of workers: a line per variant, a column per link."""
    links = {row.link: describe_link(row) for row in rows if row.is_measured}
    found = {(row.variant, row.link): row for row in rows if row.is_measured}
    lines = [
        f"| {' | '.join(['step, ms (times stock)', *links.values(), 'MB a step'])} |",
        "|---" * (len(links) + 2) + "|",
    ]
    for variant in sorted(_distinct(rows, "variant"), key=_maker):
        here = [found.get((variant, link)) for link in links]
        megabytes = [row.bytes_per_step / 1e6 for row in here if row and row.bytes_per_step is not None]
        if megabytes:
            size = f"{statistics.median(megabytes):.3g}"
            lines.append(f"| {' | '.join([variant, *(_short(row) for row in here), size])} |")
    return lines


def _short(row: Row | None) -> str:
    if row is None or row.step_seconds is None:
        return ""
    times = "" if row.times_stock is None else f" ({row.times_stock:.2f})"
    return f"{1e3 * row.step_seconds[1]:.0f}{times}"


def markdown(result: dict[str, Any]) -> str:
    """A Markdown document with the tables, and the commit, settings, machine and versions."""
    rows = in_order(rows_of(result))
    sections = []
    for model, workers in dict.fromkeys((row.model, row.workers) for row in rows):
        here = [row for row in rows if (row.model, row.workers) == (model, workers)]
        if any(row.is_measured for row in here):
            sections.append("\n".join([f"## {model}, {workers} workers", "", *overview(here)]))
    lines = [" | ".join(cell.replace("|", "\\|") for cell in cells(row)) for row in rows]
    names = ("commit", "date", "settings", "machine", "versions")
    about = [f"- {name}: {_plain(result[name])}" for name in names if name in result]
    about += [f"- `{command}`" for command in result.get("commands", ())]
    parts = [
        "# Time per training step",
        "\n".join(about),
        *sections,
        "## Every row",
        "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(f"| {line} |" for line in lines)]),
        "\n".join(f"- {note}" for note in notes(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def read_result(path: pathlib.Path) -> dict[str, Any]:
    """Reads a result file.

    Raises:
      ResultError: If it cannot be read, or holds no rows of `benchmarks.train_step`.
    """
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ResultError(f"{path} is not JSON: {error}.") from error
    try:
        rows = rows_of(result)
    except (TypeError, KeyError) as error:
        raise ResultError(f"{path} was not written by benchmarks.train_step: its rows have other values.") from error
    if not rows:
        raise ResultError(f"{path} has no rows. Run benchmarks.train_step first.")
    return dict(result)


def rows_of(result: dict[str, Any]) -> list[Row]:
    """All rows in the document of a result file."""
    return [Row.from_json(values) for values in result["rows"]]


def write_report(path: pathlib.Path) -> list[pathlib.Path]:
    """Writes the table and the plots beside a JSON file, and returns their paths.

    Raises:
      ResultError: If there is nothing to show.
    """
    result = read_result(path)
    text = markdown(result)
    table = path.with_suffix(".md")
    write_whole(table, lambda to: to.write_text(text))
    written = [table]
    rows = in_order([row for row in rows_of(result) if row.is_measured])
    figures = {"bytes": plot_bytes(rows)} if rows else {}
    for model in _distinct(rows, "model"):
        figures[f"step_time_{model}"] = plot_step_time([row for row in rows if row.model == model])
    figures |= {f"split_{workers}": plot_split(rows, workers) for workers in _distinct(rows, "workers")}
    for name, figure in figures.items():
        target = path.with_name(f"{path.stem}_{name}.png")
        write_whole(target, functools.partial(_save, figure))
        written.append(target)
    return written


def plot_step_time(rows: Sequence[Row]) -> Any:
    """Step time of one model by link rate: a line per variant, a panel per number of workers."""
    from matplotlib import ticker

    workers = _distinct(rows, "workers")
    figure, axes = _panels(1, len(workers))
    colors = _colors(rows)
    for panel, count in zip(axes[0], workers, strict=True):
        here = [row for row in rows if row.workers == count]
        links = _distinct(here, "link")
        for variant in sorted(_distinct(here, "variant"), key=_maker):
            line = [row for row in here if row.variant == variant]
            places = [links.index(row.link) for row in line]
            milliseconds = [1e3 * row.step_seconds[1] for row in line if row.step_seconds]
            panel.plot(places, milliseconds, marker="o", markersize=4, color=colors[variant], label=variant)
        panel.set(title=f"{rows[0].model}, {count} workers", yscale="log", ylabel="step, ms", xticks=range(len(links)))
        panel.set_xticklabels(links)
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.grid(alpha=0.3)
    of_variants = {line.get_label(): line for panel in axes[0] for line in panel.lines}
    axes[0][-1].legend(handles=list(of_variants.values()), fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_bytes(rows: Sequence[Row]) -> Any:
    """Bytes per step on the busiest worker: a panel per model and number of workers."""
    models, workers = _distinct(rows, "model"), _distinct(rows, "workers")
    figure, axes = _panels(len(models), len(workers))
    colors = _colors(rows)
    for y, model in enumerate(models):
        for x, count in enumerate(workers):
            here = [row for row in rows if (row.model, row.workers) == (model, count)]
            megabytes = {row.variant: row.bytes_per_step / 1e6 for row in here if row.bytes_per_step}
            axes[y][x].barh(list(megabytes), megabytes.values(), color=[colors[name] for name in megabytes])
            axes[y][x].set(title=f"{model}, {count} workers", xlabel="MB a step")
            axes[y][x].invert_yaxis()
    return figure


def plot_split(rows: Sequence[Row], workers: int) -> Any:
    """The time of a step divided into compute and waiting: a panel per model and link."""
    rows = [row for row in rows if row.workers == workers]
    models, links = _distinct(rows, "model"), _distinct(rows, "link")
    figure, axes = _panels(len(models), len(links))
    for y, model in enumerate(models):
        for x, link in enumerate(links):
            here = [row for row in rows if (row.model, row.link) == (model, link)]
            names = [row.variant for row in here]
            compute = [1e3 * (row.compute_seconds or 0) for row in here]
            waiting = [max(0.0, 1e3 * (row.waiting_seconds or 0)) for row in here]
            panel = axes[y][x]
            panel.barh(names, compute, label="compute", color="#4c72b0")
            panel.barh(names, waiting, left=compute, label="waiting", color="#dd8452")
            panel.set(title=f"{model}, {workers} workers, {link}", xlabel="ms a step")
            panel.invert_yaxis()
    axes[0][-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.savefig(path, dpi=80)


def _panels(rows: int, columns: int) -> Any:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(4.5 * columns + 1, 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _colors(rows: Sequence[Row]) -> dict[str, Any]:
    import matplotlib

    return dict(zip(_distinct(rows, "variant"), itertools.cycle(matplotlib.color_sequences["tab20"]), strict=False))


def _distinct(rows: Sequence[Row], name: str) -> list[Any]:
    """The distinct values of an attribute, in the order of the rows."""
    return list(dict.fromkeys(getattr(row, name) for row in rows))


def _number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{scale * value:.{digits}f}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return f"`{value}`"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__, formatter_class=raw)
    parser.add_argument("file", type=pathlib.Path, help="a file written by `benchmarks.train_step --json`")
    path = parser.parse_args().file
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("The plots need matplotlib: pip install -e '.[benchmark]'")
    try:
        for written in write_report(path):
            print(written)
    except (ResultError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
