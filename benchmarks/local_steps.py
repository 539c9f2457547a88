"""Measures the throughput of DiLoCo on slow links, with and without steps that overlap with exchanges.

    python -m benchmarks.local_steps --links 10mbit,100mbit                # 4 workers, on 2 cores
    python -m benchmarks.local_steps --links 10mbit+100ms,100mbit+100ms --variants streaming --json latency.json

Workers train the model `emulated` of `benchmarks.models`: 10 layers of 1 M parameters, whose gradients appear within
100 ms in which the processor is free. They run on hosts of `benchmarks.netlab`, which needs root. A link named
RATE+DELAY delays each frame in both directions.

    blocking     DiLoCo(every): training waits for the exchange
    streaming    DiLoCo(every, fragments, overlap_steps): training goes on while a fragment travels

A `fit` runs half a period of `every` steps, and then whole periods, which count. Throughput is steps per second. Each
variant runs on the unshaped link too, and "of unshaped" compares with that. Workers for a link with a delay connect
while the delay is there: TCP compares a round trip with the shortest one of its connection, and would take a delay that
comes later for a full queue. "Link" is the part of the time in which the
link is busy, from the bytes of the busiest interface and the measured rate.
"""

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.table
from absl import app, flags

from benchmarks.choices import chosen, chosen_path, chosen_workers
from benchmarks.netlab import Netlab, end_on_signals, parse_rate, why_not
from benchmarks.peers.group import THREADS, Group
from benchmarks.peers.messages import Answer
from benchmarks.record import Record
from tfdist.cluster import free_ports

FLAGS = flags.FLAGS
flags.DEFINE_integer("every", 200, "Steps between two synchronizations of a fragment.", 4)
flags.DEFINE_integer("fragments", 5, "Fragments of the variant `streaming`.", 1)
flags.DEFINE_integer("overlap_steps", 38, "Steps for which a fragment of the variant `streaming` travels.", 1)
flags.DEFINE_string("codec", "int8", "Codec of the changes; empty for none.")
flags.DEFINE_integer("periods", 1, "Periods of `every` steps that count.", 1)

_VARIANTS = ("blocking", "streaming")
_UNSHAPED = "unshaped"
_WORKER_BYTES = 0.65e9
_WARMUP_SECONDS, _SLOWEST = 180.0, 20.0  # Deadlines: of the start, and the largest factor of a run's expected time.
_STEP_SECONDS = 0.1
_KEY = ("workers", "link", "variant", "every", "fragments", "overlap_steps", "codec")


def link_of(name: str) -> tuple[str, float]:
    """The rate and the delay in seconds of a link.

    Raises:
      app.UsageError: If the name is neither a rate nor a rate and a delay.
    """
    match = re.fullmatch(r"([^+]+)(?:\+(\d+)ms)?", name)
    try:
        if match is None:
            raise ValueError(f"got {name!r}.")
        parse_rate(match[1])
    except ValueError as error:
        raise app.UsageError(f"--links takes rates, or rates and delays such as 100mbit+100ms; {error}") from error
    return match[1], int(match[2] or 0) / 1e3


def options_of(variant: str) -> dict[str, Any]:
    """The options of a variant for `benchmarks.peers.keras_fit`."""
    options: dict[str, Any] = {"every": FLAGS.every}
    if variant == "streaming":
        options |= {"fragments": FLAGS.fragments, "overlap_steps": FLAGS.overlap_steps}
    return options | ({"compression": FLAGS.codec} if FLAGS.codec else {})


@contextlib.contextmanager
def shaped(lab: Netlab, link: str) -> Iterator[float | None]:
    """Gives all links a rate and a delay in a block, and yields the measured rate in bit/s; None if unshaped."""
    rate, delay = link_of(link)
    lab.shape(rate)
    measured = None if parse_rate(rate) is None else lab.bits_per_second
    with _delayed(lab, delay):
        yield measured


def _delayed(lab: Netlab, seconds: float) -> contextlib.AbstractContextManager[None]:
    return lab.delayed(seconds) if seconds else contextlib.nullcontext()


def of_one_delay(links: Sequence[str]) -> list[list[str]]:
    """Groups the links by their delay, in order."""
    groups: dict[float, list[str]] = {}
    for link in links:
        groups.setdefault(link_of(link)[1], []).append(link)
    return list(groups.values())


def row_of(answers: Sequence[Answer], rate: float | None) -> dict[str, float]:
    """The throughput, traffic and processor time of a run, from the answers of all workers."""
    seconds = max(answer.ends[-1] - answer.ends[0] for answer in answers)
    steps = len(answers[0].ends) - 1
    most = max(max(answer.sent_bytes, answer.received_bytes) for answer in answers)
    return {
        "steps_per_second": steps / seconds,
        "longest_step": max(max(answer.step_seconds) for answer in answers),
        "megabytes": most / 1e6,
        "busy": 0.0 if rate is None else 8 * most / rate / seconds,
        "processors": sum(answer.processor_seconds for answer in answers) / seconds,
    }


def measure(lab: Netlab, workers: int, variant: str, links: Sequence[str], record: Record) -> None:
    """Measures a variant on links of one delay, and adds the rows to the record."""
    hosts = lab.hosts[:workers]
    warmup, steps = FLAGS.every // 2, FLAGS.periods * FLAGS.every
    lab.shape(_UNSHAPED)
    with contextlib.ExitStack() as stack:
        with _delayed(lab, link_of(links[0])[1]):
            group = stack.enter_context(Group(hosts, list(free_ports(workers)), "keras_fit", options_of(variant)))
            deadline = _WARMUP_SECONDS + _SLOWEST * warmup * _STEP_SECONDS
            group.train("emulated", alone=False, warmup=1, steps=warmup, timeout_seconds=deadline)
        for link in links:
            with shaped(lab, link) as rate:
                deadline = _WARMUP_SECONDS + _SLOWEST * (warmup + steps) * _STEP_SECONDS
                answers = group.train("emulated", alone=False, warmup=warmup, steps=steps, timeout_seconds=deadline)
            names = dict(zip(_KEY, (workers, link, variant, *_settings(variant)), strict=True))
            record.add({**names, **row_of(answers, rate)})


def _settings(variant: str) -> tuple[int, int, int, str]:
    streams = variant == "streaming"
    return FLAGS.every, FLAGS.fragments if streams else 1, FLAGS.overlap_steps if streams else 0, FLAGS.codec


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows as a table."""
    columns = (*_KEY, "steps/s", "of unshaped", "longest step, ms", "MB", "link", "processors")
    table = rich.table.Table(*columns)
    whole = {row["workers"]: {} for row in rows}
    for row in rows:
        if row["link"] == _UNSHAPED:
            whole[row["workers"]][row["variant"]] = row["steps_per_second"]
    for row in rows:
        speed, base = row["steps_per_second"], whole[row["workers"]].get(row["variant"])
        part = "" if base is None else f"{speed / base:.3f}"
        figures = (f"{speed:.2f}", part, f"{1e3 * row['longest_step']:.0f}", f"{row['megabytes']:.1f}")
        table.add_row(*(str(row[name]) for name in _KEY), *figures, f"{row['busy']:.2f}", f"{row['processors']:.2f}")
    rich.console.Console(width=180).print(table)


def main(arguments: Sequence[str]) -> None:
    """Measures all cells and prints them."""
    if len(arguments) > 1:
        raise app.UsageError(f"Only flags are taken, got {' '.join(arguments[1:])}.")
    links = [_UNSHAPED, *(link.lower() for link in FLAGS.links or ("10mbit", "100mbit"))]
    for link in links:
        link_of(link)
    if why := why_not():
        sys.exit(why)
    record = Record(chosen_path(), {**THREADS}, _KEY)
    begin = time.monotonic()
    for workers in chosen_workers(["4"], _WORKER_BYTES):
        with Netlab(hosts=workers, rate=None) as lab:
            for variant in chosen("variants", _VARIANTS, _VARIANTS):
                for alike in of_one_delay(list(dict.fromkeys(links))):
                    measure(lab, workers, variant, alike, record)
    print_table(record.rows)
    print(f"Took {(time.monotonic() - begin) / 60:.1f} minutes.")


if __name__ == "__main__":
    end_on_signals()
    app.run(main)
