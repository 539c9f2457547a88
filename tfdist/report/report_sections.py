"""The sections of the page of `tfdist report` about time, speed, traffic and workers."""

from collections.abc import Iterator, Mapping, Sequence

from tfdist.events.phase_names import (
    BUILDING,
    CALLBACK,
    COMPUTE,
    EXCHANGE,
    INPUT,
    OUTSIDE,
    OWN_LOOP,
    RESTORE,
    SAVE,
    START,
    TRACING,
    VALIDATION,
)
from tfdist.readable_numbers import duration, percent, rounded, size, step_time
from tfdist.report.goodput import AGAIN, LOST, PARTS, REST, RESTART, UNFINISHED, UNRECORDED
from tfdist.report.html_markup import Child, Markup, element, paragraph, table
from tfdist.report.report_figures import RunFigures
from tfdist.report.training_speed import StepSpeed, combined
from tfdist.report.worker_totals import WorkerTotals, summed
from tfdist.telemetry.worker_metrics import MODEL_MEMORY

NO_TELEMETRY = (
    "Rows, traffic, shares, memory and loss are not in the files of this run. To record them, give `fit` the callback "
    "`tfdist.callbacks.Telemetry()`."
)

_GROUPS = {
    "computation": ("c1", (COMPUTE,)),
    "exchanges and waits for workers": ("c2", (EXCHANGE,)),
    "waits for input": ("c3", (INPUT,)),
    "training loop of your own": ("c9", (OWN_LOOP,)),
    "callbacks, validation, saves, script": ("c4", (CALLBACK, VALIDATION, SAVE, OUTSIDE)),
    "first start-up, tracing, restoring": ("c5", (START, BUILDING, TRACING, RESTORE)),
    "lost work (striped)": ("c7 lost", (LOST,)),
    "restarts, with start-up and tracing (striped)": ("c8 lost", (RESTART, AGAIN)),
    "not recorded": ("c6", (UNFINISHED, UNRECORDED, REST)),
}
"""Groups of the parts of the time, which have a color each."""

_MOST_BARS = 16
_LEAST_SECONDS = 0.05  # Shorter parts would be shown as 0.0 s.


def time_section(figures: RunFigures) -> Iterator[Child]:
    """Yields the time of the run by part and by worker."""
    account = figures.account
    if account is None or not account.seconds:
        yield paragraph("The time of the run is not recorded. `tfdist run` records it, on each host.")
        return
    yield paragraph(_TIME)
    yield _bar("All workers", account.parts)
    for worker in list(account.workers)[:_MOST_BARS]:
        yield _bar(f"Worker {worker}", account.workers[worker])
    yield _legend(account.parts)
    whole = account.seconds
    rows = [
        [PARTS[part], duration(seconds), percent(seconds / whole)]
        for part, seconds in account.parts.items()
        if abs(seconds) >= _LEAST_SECONDS
    ]
    yield table("Time of the run by part, as the mean over workers", ("Part", "Time", "Share"), rows)
    parts = [part for part in PARTS if abs(account.parts.get(part, 0.0)) >= _LEAST_SECONDS]
    by_worker = [
        [f"worker {worker}", *(duration(spent.get(part, 0.0)) for part in parts), duration(sum(spent.values()))]
        for worker, spent in account.workers.items()
    ]
    yield table("Time by worker", ("Worker", *(PARTS[part] for part in parts), "all"), by_worker)


_TIME = (
    "Goodput counts the training steps whose results were kept: computation, exchanges and waits for input. Of a "
    "training loop of your own it counts all time. Exchanges include the update of the weights. Lost work is training "
    "that was done again after a failure, or that the job ended without."
)


def _bar(name: str, parts: Mapping[str, float]) -> Markup:
    spent = {group: sum(max(parts.get(part, 0.0), 0.0) for part in _GROUPS[group][1]) for group in _GROUPS}
    whole = sum(spent.values())
    pieces = [
        element("i", class_=" ".join(_GROUPS[group][0].split()[1:]) or None, style=_piece(group, seconds / whole))
        for group, seconds in spent.items()
        if whole and seconds / whole > 0.001
    ]
    told = ", ".join(f"{group} {percent(seconds / whole)}" for group, seconds in spent.items() if whole and seconds)
    bar = element("div", pieces, class_="bar", role="img", aria_label=f"{name}: {told}")
    return element("div", element("div", f"{name}, {duration(whole)}"), bar)


def _piece(group: str, share: float) -> str:
    return f"flex:{share:.5f} 1 0;background-color:var(--{_GROUPS[group][0].split()[0]})"


def _legend(parts: Mapping[str, float]) -> Markup:
    items = []
    for group, (names, members) in _GROUPS.items():
        if sum(parts.get(part, 0.0) for part in members) > _LEAST_SECONDS:
            color, *striped = names.split()
            swatch = element("i", class_=" ".join(striped) or None, style=f"background-color:var(--{color})")
            items.append(element("li", swatch, group))
    return element("ul", items, class_="legend")


def speed_section(figures: RunFigures) -> Iterator[Child]:
    """Yields step time, throughput and scaling efficiency by number of workers."""
    by_count: dict[int, list[StepSpeed]] = {}
    for attempt in figures.attempts:
        if attempt.speed is not None:
            by_count.setdefault(attempt.workers, []).append(attempt.speed)
    if not by_count:
        yield paragraph("No training step is recorded. A training loop of your own does not report its steps.")
        return
    yield paragraph(_STEPS)
    yield paragraph(_EFFICIENCY)
    rows = [_speed_row(count, speed) for count, each in sorted(by_count.items()) if (speed := combined(each))]
    columns = ("Workers", "Steps", "Typical step", "Mean step", "Rows/s", "Rows/s by worker", "Scaling efficiency")
    yield table("Speed by number of workers", columns, rows)


_STEPS = (
    "The typical step is the time from the end of a step to that of the next, as the median over intervals of the "
    "telemetry. The mean step has all the time of input, computation, exchanges and callbacks, also in slow first "
    "steps and at ends of epochs, but not start-up, tracing, validation and saves. Rows per second are by the mean "
    "step."
)
_EFFICIENCY = (
    "Scaling efficiency is the part of this time that is not spent on exchanges and waits for other "
    "workers, as the mean over workers. A single worker would have none of these, so it estimates the speed of N "
    "workers divided by N times the speed of one. The update of the weights counts as exchange, so the true value is a "
    "little higher. Steps that do not report, as with XLA, have no efficiency."
)


def _speed_row(count: int, speed: StepSpeed) -> list[Child]:
    rows = speed.rows_per_second
    return [
        str(count),
        f"{speed.steps:,}",
        step_time(speed.typical_seconds),
        step_time(speed.step_seconds),
        rounded(rows),
        rounded(rows / count if rows else None),
        percent(speed.efficiency),
    ]


def traffic_section(totals: Sequence[WorkerTotals]) -> Iterator[Child]:
    """Yields the bytes of each worker."""
    if not totals:
        yield paragraph(NO_TELEMETRY)
        return
    yield paragraph(_BYTES)
    rows = [_traffic_row(f"worker {each.worker}", [each]) for each in totals]
    if len(totals) > 1:
        rows.append(_traffic_row("all workers", totals))
    columns = ("Worker", "Gradients, raw", "Gradients, sent", "Ratio", "All bytes sent", "All bytes received")
    yield table("Traffic of all attempts", columns, rows)


_BYTES = (
    "Raw are gradients without compression; without the argument `compression` of the strategy they are not counted. "
    "All bytes are those of training steps between workers: gradients, logs, statistics and headers. With several "
    "devices each, or `transport='tensorflow'`, all bytes on TensorFlow's connections count too. With GPUs they are "
    "unknown. What a worker sent after its last figures, before it was killed, is missing."
)


def _traffic_row(name: str, totals: Sequence[WorkerTotals]) -> list[Child]:
    names = ("raw_bytes", "sent_bytes", "network_sent_bytes", "network_received_bytes")
    raw, sent, out, received = (summed(totals, name) for name in names)
    ratio = f"{raw / sent:.3g}" if raw and sent else "unknown"
    return [name, size(raw), size(sent), ratio, size(out), size(received)]


def workers_section(totals: Sequence[WorkerTotals]) -> Iterator[Child]:
    """Yields share, speed and memory of each worker."""
    if not totals:
        yield paragraph(NO_TELEMETRY)
        return
    yield paragraph(_WORKERS)
    columns = ("Worker", "Host", "Rows", "Newest share", "Rows/s of computation", "Waits", "Largest memory")
    yield table("Workers, over all attempts", columns, [_worker_row(each) for each in totals])
    yield from _memory(totals)


def _memory(totals: Sequence[WorkerTotals]) -> Iterator[Child]:
    """Yields the bytes of the variables beside the resident memory, if they are known."""
    kinds = [kind for kind in MODEL_MEMORY if any(each.model_bytes.get(kind) for each in totals)]
    if kinds:
        yield paragraph(_MEMORY)
        columns = (
            "Worker",
            *(MODEL_MEMORY[kind].capitalize() for kind in kinds),
            "All of these",
            "Largest resident memory",
        )
        yield table("Memory", columns, [_memory_row(each, kinds) for each in totals])


_MEMORY = (
    "The bytes of the variables and gradients on a replica, as `strategy.memory_report()` counts them. Resident memory "
    "is that of the process: also Python, TensorFlow, activations, batches and buffers of exchanges. Variables on a "
    "GPU are in the memory of the GPU."
)


def _memory_row(each: WorkerTotals, kinds: Sequence[str]) -> list[Child]:
    known = each.model_bytes
    counted = [size(known.get(kind, 0.0) if known else None) for kind in kinds]
    return [f"worker {each.worker}", *counted, size(sum(known.values()) if known else None), size(each.memory)]


_WORKERS = (
    "The share is the part of the rows of all workers that a worker gets in a step. `BalancedSharding` gives faster "
    "workers larger shares. Waits are the part of training steps that a worker spends on exchanges and waits for "
    "peers: the slowest worker waits least. Workers are numbered anew in an attempt with fewer workers."
)


def _worker_row(each: WorkerTotals) -> list[Child]:
    return [
        f"worker {each.worker}",
        ", ".join(each.hosts),
        rounded(each.rows),
        percent(each.share),
        rounded(each.rows_per_second),
        percent(each.waiting),
        size(each.memory),
    ]
