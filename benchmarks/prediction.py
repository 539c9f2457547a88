"""Compares the predictions of `tfdist plan` with the steps that `benchmarks.scaling` has measured.

    tfdist bench --workers 2 --sizes 1KiB,4MiB,64MiB --compression "none,float16,int8,powersgd(4)" --json bench.json
    python -m benchmarks.prediction scaling.json --calibration bench.json

Each row of tfdist is predicted from its computation, its link and the costs of an exchange by `tfdist bench`. The costs
are those of two workers with a core each. If N workers share C cores in time that is dilated by K, each of them has a
processor that is K C / N times as fast, but at most K times, so its costs are divided by this number. Without
`--calibration` the costs are the defaults of `tfdist plan`.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence

import rich.console
import rich.table

from benchmarks.report import ResultError, Row, read_result, rows_of
from benchmarks.scaling_table import sorted_rows
from tfdist.plan.exchange_costs import DEFAULT_COSTS, NONE, ExchangeCosts, costs_of_bench
from tfdist.plan.planned_buckets import Gradient
from tfdist.plan.step_prediction import PlannedStep, predict_step

WITHIN = 0.15
COLUMNS = ("workers", "link", "variant", "K", "measured, ms", "predicted, ms", "predicted / measured", "MB / predicted")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measured row, and the prediction of its step.

    Attributes:
      row: The row.
      seconds: The predicted time of the step.
      sent_bytes: The predicted bytes that a worker sends.
    """

    row: Row
    seconds: float
    sent_bytes: float

    @property
    def measured(self) -> float:
        """The median time of a step."""
        assert self.row.step_seconds is not None
        return self.row.step_seconds[1]

    @property
    def ratio(self) -> float:
        """The predicted time divided by the measured one."""
        return self.seconds / self.measured

    def cells(self) -> list[str]:
        """The comparison as a row of the table."""
        row = self.row
        times = f"{1e3 * self.measured:.0f}", f"{1e3 * self.seconds:.0f}", f"{self.ratio:.2f}"
        megabytes = f"{(row.bytes_per_step or 0) / 1e6:.2f} / {self.sent_bytes / 1e6:.2f}"
        return [str(row.workers), row.link, row.variant, f"{row.dilation:g}", *times, megabytes]


def codec_of(variant: str) -> str | None:
    """The codec of a variant of tfdist, "none" without one; None if it is not of tfdist or chooses codecs itself."""
    library, *parts = variant.split("+")
    codec = next((part for part in parts if part != "groups"), NONE)
    return None if library != "tfdist" or codec == "auto" else codec


def compare(
    rows: Sequence[Row], gradients: dict[str, list[Gradient]], costs: ExchangeCosts, cores: int
) -> list[Comparison]:
    """Predicts the step of each measured row of tfdist.

    Args:
      rows: Rows of `benchmarks.scaling`.
      gradients: The gradients of the model by codec.
      costs: Costs of an exchange, if each worker has a core.
      cores: Number of cores that all workers share.
    """
    from tfdist.strategies.collectives.exchange_groups import balanced_size

    comparisons = []
    for row in sorted_rows([row for row in rows if row.is_measured and row.link_bits_per_second]):
        codec = codec_of(row.variant)
        if codec is None or row.compute_seconds is None or row.link_bits_per_second is None:
            continue
        groups = balanced_size(row.workers) if row.variant.endswith("+groups") else None
        step = PlannedStep(row.compute_seconds, gradients[codec], codec, 0.0, codes_elsewhere=True, group_size=groups)
        own = costs.on_processors(row.dilation * min(1.0, cores / row.workers))
        predicted = predict_step(step, row.workers, row.link_bits_per_second, own)
        comparisons.append(Comparison(row, predicted.seconds, predicted.sent_bytes))
    return comparisons


def emulated_gradients(codecs: Sequence[str]) -> dict[str, list[Gradient]]:
    """The gradients of the model `emulated`, by name of the codec."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Keeps the table readable.
    import keras

    from benchmarks.models import keras_model
    from tfdist.plan.model_gradients import gradients_of

    return gradients_of(lambda: keras_model("emulated", keras), codecs)


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(each.cells() for each in comparisons)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(comparisons: Sequence[Comparison]) -> str:
    """How many predictions are near the measurement."""
    near = [each for each in comparisons if abs(each.ratio - 1) <= WITHIN]
    middle = statistics.median(abs(each.ratio - 1) for each in comparisons)
    return f"{len(near)} of {len(comparisons)} predictions are within {WITHIN:.0%}; half are within {middle:.1%}."


def main() -> None:
    """Prints the comparison."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__, formatter_class=raw)
    parser.add_argument("files", type=pathlib.Path, nargs="+", help="files written by `benchmarks.scaling --json`")
    parser.add_argument("--calibration", type=pathlib.Path, help="file of `tfdist bench --json`")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    options = parser.parse_args()
    try:
        results = [read_result(path) for path in options.files]
        costs = DEFAULT_COSTS if options.calibration is None else costs_of_bench(options.calibration)
    except (ResultError, ValueError, OSError) as error:
        sys.exit(str(error))
    rows = [row for result in results for row in rows_of(result)]
    codecs = {codec for row in rows if (codec := codec_of(row.variant))}
    comparisons = compare(rows, emulated_gradients(sorted(codecs | {NONE})), costs, results[0]["machine"]["cores"])
    if not comparisons:
        sys.exit("The files have no measured rows of tfdist on links of known rate.")
    if options.markdown:
        print(markdown_table(comparisons))
    else:
        table = rich.table.Table(*COLUMNS)
        for each in comparisons:
            table.add_row(*each.cells())
        rich.console.Console(width=120).print(table)
    print(summary(comparisons))


if __name__ == "__main__":
    main()
