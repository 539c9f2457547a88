"""Compares memory, traffic and time of a training step with a whole and with a sharded model.

    python -m benchmarks.model_sharding
    python -m benchmarks.model_sharding --sharded_json benchmarks/results/model_sharding.json
    python -m benchmarks.model_sharding --sharded_models mlp --sharded_workers 2 --sharded_links 1gbit

Workers are processes on hosts of `benchmarks.netlab`, which needs root. All variants train with Adam on the same
batches, with equal numbers of threads:

    tfdist             Keras 3 `fit` under tfdist.MultiWorkerMirroredStrategy
    tfdist+optimizer   the same with model_sharding="optimizer"
    tfdist+parameters  the same with model_sharding="parameters"
    ddp                PyTorch DistributedDataParallel on gloo
    ddp+zero           the same with ZeroRedundancyOptimizer
    fsdp               PyTorch `fully_shard` (FSDP 2) on gloo

The variants of a library stay alive together and take turns in random order, block by block. Memory is the resident
memory of the worker that has the most, without the memory that it had before it made the model; the peak is its
largest since then. Bytes are those of the network interfaces. Ratios are taken within a round, against the first
variant of the library.
"""

import contextlib
import dataclasses
import pathlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence

import rich.console
import rich.table
from absl import app, flags

from benchmarks.models import MODELS
from benchmarks.netlab import MAX_HOSTS, Netlab, end_on_signals, why_not
from benchmarks.peers.group import THREADS, Group, Host
from benchmarks.record import Record, check_writable
from benchmarks.turns import Log, Variant, busiest, periods
from tfdist.cluster import free_ports

FLAGS = flags.FLAGS
flags.DEFINE_list("sharded_models", ["mlp", "transformer"], f"Some of {', '.join(MODELS)}, except the embedding.")
flags.DEFINE_list("sharded_workers", ["2", "4"], f"Numbers of workers, 2 to {MAX_HOSTS}.")
flags.DEFINE_list("sharded_links", ["1gbit", "unshaped"], "Rates such as 100mbit, or unshaped.")
flags.DEFINE_list("sharded_libraries", ["tfdist", "pytorch"], "Libraries to measure.")
flags.DEFINE_integer("sharded_steps", 10, "Steps in a block.", 3)
flags.DEFINE_integer("sharded_rounds", 5, "Blocks of each variant.", 1)
flags.DEFINE_string("sharded_json", None, "A file for the results.")

_ADAM = {"optimizer": "adam"}
_LIBRARIES = {
    "tfdist": {
        "tfdist": Variant("keras_fit", _ADAM),
        **{
            f"tfdist+{mode}": Variant("keras_fit", {**_ADAM, "model_sharding": mode})
            for mode in ("optimizer", "parameters")
        },
    },
    "pytorch": {
        "ddp": Variant("torch_ddp", _ADAM),
        "ddp+zero": Variant("torch_ddp", {**_ADAM, "shards_state": True}),
        "fsdp": Variant("torch_fsdp", _ADAM),
    },
}
_WARMUP_STEPS = 4
_BLOCK_SECONDS = 300.0
_KEY = ("model", "workers", "link", "variant")


@dataclasses.dataclass
class Cell:
    """The measurements of a variant on a link, as medians: seconds, ratio to the whole model, bytes."""

    model: str
    workers: int
    link: str
    variant: str
    step_seconds: float
    times_whole: float
    bytes_per_step: float
    memory_bytes: int
    peak_memory_bytes: int


@contextlib.contextmanager
def _groups(hosts: Sequence[Host], variants: dict[str, Variant]) -> Iterator[dict[str, Group]]:
    """The workers of each variant, one on each host."""
    ports = iter(free_ports(len(hosts) * len(variants)))
    with contextlib.ExitStack() as stack:
        groups = {}
        for name, variant in variants.items():
            group = Group(hosts, [next(ports) for _ in hosts], variant.peer, variant.options)
            groups[name] = stack.enter_context(group)
        yield groups


def measure(model: str, lab: Netlab, workers: int, links: Sequence[str], variants: dict[str, Variant]) -> list[Cell]:
    """Measures the variants of one library on all links."""
    cells = []
    order = random.Random(0)
    with _groups(lab.hosts[:workers], variants) as groups:
        lab.shape(None)
        for group in groups.values():
            group.train(model, alone=False, warmup=_WARMUP_STEPS, steps=1, timeout_seconds=_BLOCK_SECONDS)
        for link in links:
            lab.shape(None if link == "unshaped" else link)
            cells += _on_a_link(model, workers, link, groups, order)
    return cells


def _on_a_link(model: str, workers: int, link: str, groups: dict[str, Group], order: random.Random) -> list[Cell]:
    times: dict[str, list[float]] = {name: [] for name in groups}
    answers: dict[str, list] = {name: [] for name in groups}
    for turn in range(FLAGS.sharded_rounds):
        for name in order.sample(list(groups), len(groups)):
            block = {"warmup": 2, "steps": FLAGS.sharded_steps, "timeout_seconds": _BLOCK_SECONDS}
            answers[name] = groups[name].train(model, alone=False, **block)
            times[name].append(statistics.median(periods(answers[name])))
            Log.print(f"  {model}, {workers} workers, {link}, round {turn + 1}: {name} {1e3 * times[name][-1]:.0f} ms")
    whole = times[next(iter(groups))]
    return [
        Cell(
            model,
            workers,
            link,
            name,
            statistics.median(times[name]),
            statistics.median(own / other for own, other in zip(times[name], whole, strict=True)),
            busiest(answers[name]),
            max(answer.memory_bytes for answer in answers[name]),
            max(answer.peak_memory_bytes for answer in answers[name]),
        )
        for name in groups
    ]


def print_table(rows: Sequence[Cell]) -> None:
    """Prints the cells as a table."""
    table = rich.table.Table("model", "workers", "link", "variant", "step, ms", "times whole", "MB a step")
    table.add_column("memory, MB")
    table.add_column("peak, MB")
    for row in rows:
        figures = f"{1e3 * row.step_seconds:.0f}", f"{row.times_whole:.3f}", f"{row.bytes_per_step / 1e6:.2f}"
        memory = f"{row.memory_bytes / 1e6:.0f}", f"{row.peak_memory_bytes / 1e6:.0f}"
        table.add_row(row.model, str(row.workers), row.link, row.variant, *figures, *memory)
    rich.console.Console(width=140).print(table)


def main(_: Sequence[str]) -> None:
    """Measures all cells and prints them."""
    if unknown := [name for name in FLAGS.sharded_models if name not in MODELS or name == "embedding"]:
        raise app.UsageError(f"--sharded_models takes mlp, transformer or cnn, got {', '.join(unknown)}.")
    if unknown := [name for name in FLAGS.sharded_libraries if name not in _LIBRARIES]:
        raise app.UsageError(f"--sharded_libraries takes {', '.join(_LIBRARIES)}, got {', '.join(unknown)}.")
    if why := why_not():
        sys.exit(why)
    path = None if FLAGS.sharded_json is None else pathlib.Path(FLAGS.sharded_json)
    if path is not None:
        check_writable(path)
    settings = {"steps": FLAGS.sharded_steps, "rounds": FLAGS.sharded_rounds, **THREADS, "network": "netlab"}
    record = Record(path, settings, _KEY)
    workers = [int(number) for number in FLAGS.sharded_workers]
    with Netlab(hosts=max(workers), rate=None) as lab:
        for model in FLAGS.sharded_models:
            for count in workers:
                for variants in (_LIBRARIES[name] for name in FLAGS.sharded_libraries):
                    links = [
                        link
                        for link in FLAGS.sharded_links
                        if not all(record.has(model, count, link, name) for name in variants)
                    ]
                    if links:
                        cells = measure(model, lab, count, links, variants)
                        record.add(*map(dataclasses.asdict, cells))
    names = [field.name for field in dataclasses.fields(Cell)]
    print_table([Cell(**{name: row[name] for name in names}) for row in record.rows])


if __name__ == "__main__":
    end_on_signals()
    app.run(main)
