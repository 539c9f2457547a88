"""Policy: the figures of each worker over all attempts of a run, from its telemetry. Pure functions."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from tfdist.events.phase_names import COMPUTE, EXCHANGE, INPUT
from tfdist.faults.straggler_policy import BEGINS
from tfdist.report.telemetry_series import growth
from tfdist.telemetry.telemetry_file import TelemetryFile
from tfdist.telemetry.worker_metrics import WorkerMetrics

_PHASES = (INPUT, COMPUTE, EXCHANGE)


@dataclasses.dataclass(frozen=True)
class WorkerTotals:
    """The figures of one worker. A figure is `None` if it is not known.

    Attributes:
      worker: Its number.
      hosts: Names of its machines.
      rows: Rows that it trained on.
      share: Its newest share of the rows of all replicas.
      rows_per_second: Its rows by second of computation.
      computing: Part of its training steps in which it computed.
      waiting: Part of its training steps that it spent on exchanges and waits for peers.
      raw_bytes, sent_bytes: Bytes of its gradients before and after compression.
      network_sent_bytes, network_received_bytes: All bytes on its connections to peers.
      memory: Largest memory of its processes that was seen, in bytes.
      model_bytes: Newest bytes of the variables and gradients on a replica of it, by kind; empty if unknown.
    """

    worker: int
    hosts: Sequence[str]
    rows: float | None
    share: float | None
    rows_per_second: float | None
    computing: float | None
    waiting: float | None
    raw_bytes: float | None
    sent_bytes: float | None
    network_sent_bytes: float | None
    network_received_bytes: float | None
    memory: float | None
    model_bytes: Mapping[str, float]


def totals_of(telemetry: Mapping[int, Mapping[int, TelemetryFile]]) -> list[WorkerTotals]:
    """Returns the figures of each worker.

    Args:
      telemetry: Files of figures by number of the attempt and by worker.
    """
    workers = sorted({worker for files in telemetry.values() for worker in files})
    found = [(worker, [files[worker] for files in telemetry.values() if worker in files]) for worker in workers]
    return [_totals(worker, files) for worker, files in found if any(file.fits for file in files)]


def _totals(worker: int, files: Sequence[TelemetryFile]) -> WorkerTotals:
    def total(figure: Callable[[WorkerMetrics], float | None]) -> float | None:
        grown = [each for file in files if (each := growth(file.figures, figure)) is not None]
        return sum(grown) if grown else None

    def in_phase(name: str) -> float:
        return total(lambda each: each.phase_seconds.get(name)) or 0.0

    phases = {name: in_phase(name) for name in _PHASES}
    rows, steps_seconds = total(lambda each: each.rows), sum(phases.values())
    figures = [each for file in files for each in file.figures]
    hosts = [str(fit.header["host"]) for file in files for fit in file.fits if "host" in fit.header]
    return WorkerTotals(
        worker=worker,
        hosts=list(dict.fromkeys(hosts)),
        rows=rows,
        share=next((each.share for each in reversed(figures) if each.share is not None), None),
        rows_per_second=rows / phases[COMPUTE] if rows and phases[COMPUTE] else None,
        computing=phases[COMPUTE] / steps_seconds if steps_seconds else None,
        waiting=phases[EXCHANGE] / steps_seconds if steps_seconds else None,
        raw_bytes=total(lambda each: each.raw_bytes),
        sent_bytes=total(lambda each: each.sent_bytes),
        network_sent_bytes=total(lambda each: each.network_sent_bytes),
        network_received_bytes=total(lambda each: each.network_received_bytes),
        memory=max((each.resident_bytes for each in figures), default=None),
        model_bytes=next((each.model_bytes for each in reversed(figures) if each.model_bytes), {}),
    )


def slow_workers(totals: Sequence[WorkerTotals]) -> list[tuple[int, float]]:
    """Returns the workers that held up the others by computing much slower, with how many times slower.

    A worker that gets fewer rows, since it is slow, computes no longer than the others. These do not wait for it.
    """
    known = {
        each.worker: (each.rows_per_second, each.computing)
        for each in totals
        if each.rows_per_second and each.computing is not None
    }
    slow = []
    for worker, (speed, computing) in known.items():
        others = [other for peer, other in known.items() if peer != worker]
        if not others:
            continue
        slower = statistics.median(each for each, _ in others) / speed
        excess = computing - statistics.median(each for _, each in others)
        if slower >= BEGINS.computation and excess >= BEGINS.computation_part:
            slow.append((worker, slower))
    return slow


def summed(totals: Sequence[WorkerTotals], name: str) -> float | None:
    """Returns the sum of a figure over the workers; `None` if no worker has it."""
    known = [value for each in totals if (value := getattr(each, name)) is not None]
    return sum(known) if known else None
