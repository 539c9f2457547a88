"""Tables and curves of the results of `benchmarks.convergence`."""

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.markup
import rich.table

from benchmarks.record import write_whole

KEY = ("model", "optimizer", "codec", "min_elements", "seed", "synchronization")
_COLUMNS = (
    "model",
    "optimizer",
    "codec",
    "synchronization",
    "from elements",
    "mean",
    "by seed",
    "against none",
    "less sent",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
      min_elements: Smaller tensors travelled uncompressed; 0 for the codec's default.
      reached: Test accuracy of digits, or validation loss of char_lm in nats per character.
      ratio: Uncompressed bytes divided by sent bytes, over all exchanges of the optimizer.
      curve: The training loss of each epoch.
      seconds: Duration, on a machine that also did other work.
      synchronization: Local steps, `none` for sums of gradients in each step.
    """

    model: str
    optimizer: str
    codec: str
    min_elements: int
    seed: int
    reached: float
    ratio: float
    curve: tuple[float, ...]
    seconds: float
    synchronization: str = "none"

    @property
    def is_exact(self) -> bool:
        """Whether other runs are compared with this one."""
        return self.codec == "none" and self.synchronization == "none"

    @property
    def label(self) -> str:
        """The codec and the local steps, as far as they are not `none`."""
        return ", ".join(each for each in (self.codec, self.synchronization) if each != "none") or "none"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Run":
        """Inverse of `dataclasses.asdict`."""
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
        return cls(**{**fields, "curve": tuple(values["curve"])})


def runs_of(document: Mapping[str, Any]) -> list[Run]:
    """All runs in the document of a result file."""
    return [Run.from_json(row) for row in document["rows"]]


def summary(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Returns lines of the table: the runs of one variant under one optimizer, compared with exact runs by seed."""
    plain = {(run.model, run.optimizer, run.seed): run.reached for run in runs if run.is_exact}
    lines = []
    for place in dict.fromkeys(_place(run) for run in runs):
        here = sorted((run for run in runs if _place(run) == place), key=lambda run: run.seed)
        model, optimizer, codec, synchronization, min_elements = place
        pairs = [(run.reached, plain.get((model, optimizer, run.seed))) for run in here]
        paired = [(mine, theirs) for mine, theirs in pairs if theirs is not None]
        lines.append(
            (
                *(model, optimizer, codec, synchronization if synchronization != "none" else ""),
                str(min_elements or "default") if codec != "none" else "",
                f"{statistics.mean(mine for mine, _ in pairs):.4f}",
                " ".join(f"{mine:.4f}" for mine, _ in pairs),
                _difference(model, paired) if paired and not here[0].is_exact else "",
                f"{here[0].ratio:.1f}x",
            )
        )
    return sorted(lines, key=lambda line: (line[0] != "digits", line[1] != "sgd"))  # The order of codecs stays.


def _place(run: Run) -> tuple[str, str, str, str, int]:
    return run.model, run.optimizer, run.codec, run.synchronization, run.min_elements


def _difference(model: str, pairs: Sequence[tuple[float, float]]) -> str:
    if model == "digits":
        return f"{100 * statistics.mean(mine - theirs for mine, theirs in pairs):+.2f} points"
    return f"{100 * statistics.mean(mine / theirs - 1 for mine, theirs in pairs):+.2f} %"


def markdown(document: Mapping[str, Any], picture: str) -> str:
    """A Markdown document with the table, the settings and machine of the runs, and the picture of the curves."""
    settings = document["settings"]
    epochs, steps = settings["epochs"], settings["steps_per_epoch"]
    length = f"{epochs * steps} steps" if steps else f"{epochs} epochs"
    lines = [f"| {' | '.join(line)} |" for line in summary(runs_of(document))]
    parts = [
        "# Accuracy under compression and local steps",
        f"{settings['devices']} virtual devices, {length}. digits: test accuracy. char_lm: validation loss. Tensors "
        "with fewer than `from elements` elements travelled uncompressed.",
        "\n".join([f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *lines]),
        f"![Training loss by epoch]({picture})",
        f"- commit: `{document['commit']}`",
        "- versions: " + ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        *(f"- `{command}`" for command in document["commands"]),
    ]
    return "\n\n".join(parts[:4]) + "\n\n" + "\n".join(parts[4:]) + "\n"


def plot(runs: Sequence[Run]) -> Any:
    """Plots training loss by epoch for the first seed: a line per variant, a panel per model and optimizer.

    If some runs have their own `min_elements`, the plot shows only these runs and the uncompressed runs.
    """
    import matplotlib.figure

    seed, is_strict = min(run.seed for run in runs), any(run.min_elements for run in runs)
    runs = [run for run in runs if run.seed == seed and (run.min_elements or run.codec == "none" or not is_strict)]
    panels = list(dict.fromkeys((run.model, run.optimizer) for run in runs))
    figure = matplotlib.figure.Figure(figsize=(4.2 * len(panels) + 0.5, 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, place in zip(axes, panels, strict=True):
        for run in runs:
            if (run.model, run.optimizer) == place:
                style = {"color": "black", "linestyle": "--"} if run.is_exact else {}
                axis.plot(range(1, len(run.curve) + 1), run.curve, label=run.label, linewidth=1.3, **style)
        axis.set(title=f"{place[0]}, {place[1]}", xlabel="epoch", ylabel="training loss", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small")
    return figure


def write_report(path: pathlib.Path, document: Mapping[str, Any]) -> None:
    """Writes the table and the curves beside the JSON file `path`."""
    picture = path.with_suffix(".png")
    text, figure = markdown(document, picture.name), plot(runs_of(document))
    write_whole(path.with_suffix(".md"), lambda to: to.write_text(text))
    write_whole(picture, lambda to: figure.savefig(to, dpi=90))


def print_table(document: Mapping[str, Any]) -> None:
    """Prints the table."""
    table = rich.table.Table(*_COLUMNS)
    for line in summary(runs_of(document)):
        table.add_row(*map(rich.markup.escape, line))
    rich.console.Console(width=120).print(table)
