"""The tables of `tfdist plan`, for a terminal."""

from collections.abc import Sequence

import rich.console
import rich.table

from tfdist.plan.exchange_costs import DEFAULT_COSTS, NONE, ExchangeCosts
from tfdist.plan.job_plan import Job, JobPlan, assumptions
from tfdist.plan.step_prediction import Prediction
from tfdist.readable_numbers import counted, percent, size, step_time

_BAR = 18  # Characters of the bar of full efficiency.


def print_plan(plan: JobPlan, job: Job, costs: ExchangeCosts) -> None:
    """Prints the predicted steps, the recommended codec, the curve and their assumptions."""
    console = rich.console.Console()
    title = f"{counted(job.replicas, 'replica')}, links of {job.link_bits / 1e9:g} Gbit/s"
    table = _table(title, "codec", "sent", "step", "efficiency", "speed")
    for each in plan.predictions:
        speed = f"{each.speedup:,.4g}"
        table.add_row(each.codec, size(each.sent_bytes), *_cells(each), speed)
    table.caption = "sent: by a replica in a step; speed: rows per second, as a multiple of one replica"
    console.print(table)
    console.print(f"Recommended: {_advice(plan.recommended)}.")
    if plan.in_groups is not None:
        console.print(_advice_on_groups(plan.in_groups, is_measured=costs is not DEFAULT_COSTS))
    console.print(_curve(plan))
    console.print("\n".join(assumptions(job, costs)), highlight=False)


def _advice(prediction: Prediction) -> str:
    option = "no compression" if prediction.codec == NONE else f"compression={prediction.codec!r}"
    return f"{option}. Predicted step: {step_time(prediction.seconds)}"


def _advice_on_groups(prediction: Prediction, is_measured: bool) -> str:
    """Recommends groups. Names a codec and a time only with measured costs: the default ones are of a GPU."""
    if is_measured:
        return f"Faster on CPUs: exchange_group_size='auto' with {_advice(prediction)}."
    return (
        "Workers on CPUs are probably faster with exchange_group_size='auto'. For the time of their steps, measure "
        "codecs with `tfdist bench --workers 2 --json FILE`, and give the file to --calibration."
    )


def _curve(plan: JobPlan) -> rich.table.Table:
    codec = plan.recommended.codec
    names = [NONE] if codec == NONE else [NONE, codec]
    columns = [f"{what},\n{name}" for name in names for what in ("step", "efficiency")]
    table = _table("By number of replicas", "replicas", *columns, f"efficiency, {codec}")
    for pair in plan.curve:
        shown = pair[: len(names)]
        cells = [cell for each in shown for cell in _cells(each)]
        table.add_row(str(pair[0].replicas), *cells, "█" * round(_BAR * shown[-1].efficiency))
    return table


def _cells(prediction: Prediction) -> Sequence[str]:
    return step_time(prediction.seconds), percent(prediction.efficiency)


def _table(title: str, *columns: str) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        is_text = column == "codec" or column.startswith("efficiency, ")
        table.add_column(column, justify="left" if is_text else "right")
    return table
