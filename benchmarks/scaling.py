"""Measures how training scales with the number of workers, if each worker has an accelerator.

    python -m benchmarks.scaling --workers 2 --links 1gbit                # all variants, on 2 cores
    python -m benchmarks.scaling --workers 16 --links 1gbit --dilation 10 --variants tfdist,tfdist+int8,ddp
    python -m benchmarks.scaling --workers 4,16 --links 100mbit,1gbit --dilation 1,10 --json scaling.json

The model `emulated` of `benchmarks.models` stands for an accelerator: the gradients of its 10 layers of 1 M parameters
appear one after another within 100 ms, in which the processor is free. Workers are processes on hosts of
`benchmarks.netlab`, which needs root. By default there are 2 and 4 workers, and links of 100mbit, 1gbit and 10gbit.

Two cores cannot encode and send for 16 accelerators within 100 ms. With `--dilation K` time runs K times slower: the
accelerator needs K times 100 ms, and a link has a Kth of its rate. All times in the results are divided by K. So the
processors stand for processors that are K times as fast, for all variants alike. A list has a K for each link. The
queues of links hold as many bytes as without dilation, and TCP begins no connection anew after a pause. The delays of
the system are not changed: a delay of 1 ms, such as that of a thread that wakes up, counts as 1/K ms. Choose K so that
workers take at most half of the processor time, as the last column shows. This method is from Gupta et al., "To
infinity and beyond: time-warped network emulation", NSDI 2006, and "DieCast", NSDI 2008.

Names of variants:

    stock            a custom loop under TensorFlow's MultiWorkerMirroredStrategy
    ddp, ddp+fp16    PyTorch DistributedDataParallel on gloo, with a communication hook
    tfdist           Keras 3 `fit` under tfdist.MultiWorkerMirroredStrategy
    tfdist+CODEC     the same with compression="CODEC", as in tfdist+int8
    ...+groups       with exchange_group_size="auto": exchanges in two levels

Exposed time is the part of a step beyond its computation. Floor is the larger one of the computation and bytes / rate.
Efficiency is the computation divided by the step, and speed is the efficiency times the number of workers. Bytes are
those of the busiest network interface. "Processors" is the part of the processor time of this machine that the workers
take, and the part that is not idle, which includes the kernel's work for the network and all other programs.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table
import rich.text
from absl import app, flags

from benchmarks.choices import chosen_links, chosen_path, chosen_workers
from benchmarks.netlab import Netlab, end_on_signals, why_not
from benchmarks.peers.group import THREADS
from benchmarks.record import Record
from benchmarks.report import KEY, Row
from benchmarks.scaling_table import COLUMNS, cells, published_note, sorted_rows
from benchmarks.turns import Log, Network, Plan, Variant, measure

FLAGS = flags.FLAGS
flags.DEFINE_list("dilation", ["1"], "Factors of time, one for all links or one for each.")

_VARIANTS = ("stock", "ddp", "ddp+fp16", "tfdist", "tfdist+float16", "tfdist+int8", "tfdist+powersgd(4)")
_LIBRARIES = ("stock", "ddp", "tfdist")
_HOOKS = ("fp16", "bf16")
_WORKER_BYTES = 0.65e9
_FEW = 4  # More workers, and the workers of more variants, are not alive together.


def variant_of(name: str) -> Variant:
    """The variant of a name; see the module.

    Raises:
      app.UsageError: If the name is unknown. The names of codecs are not checked here.
    """
    library, *parts = name.split("+")
    if name == "stock":
        return Variant("keras_loop", {"library": "tensorflow"})
    if library == "ddp" and (not parts or (len(parts) == 1 and parts[0] in _HOOKS)):
        return Variant("torch_ddp", {"hook": parts[0]} if parts else {})
    options: dict[str, Any] = {}
    if library == "tfdist" and parts[-1:] == ["groups"]:
        options["exchange_group_size"] = "auto"
        parts.pop()
    if library != "tfdist" or len(parts) > 1:
        raise app.UsageError(f"--variants takes names such as {', '.join(_VARIANTS)}, tfdist+groups; got {name}.")
    return Variant("keras_fit", options | ({"compression": parts[0]} if parts else {}))


def chosen_dilations(links: Sequence[str]) -> dict[str, float]:
    """The factor of time of each link.

    Raises:
      app.UsageError: If a factor is not a number of at least 1, or there is not one for each link.
    """
    given = FLAGS.dilation
    try:
        factors = [float(text) for text in given]
    except ValueError:
        factors = []
    if not factors or min(factors) < 1 or len(factors) not in (1, len(links)):
        raise app.UsageError(f"--dilation takes a number of at least 1, or one for each link, got {','.join(given)}.")
    return dict(zip(links, factors * len(links) if len(factors) == 1 else factors, strict=False))


def print_table(rows: Sequence[Row]) -> None:
    """Prints the rows as a table."""
    table = rich.table.Table(*COLUMNS)
    for row in sorted_rows(rows):
        table.add_row(*(rich.text.Text(cell) for cell in cells(row)))
    console = rich.console.Console(width=180)
    console.print(table)
    console.print(published_note(rows), highlight=False)


def main(arguments: Sequence[str]) -> None:
    """Measures all cells and prints them."""
    if len(arguments) > 1:
        raise app.UsageError(f"Only flags are taken, got {' '.join(arguments[1:])}.")
    workers = chosen_workers(["2", "4"], _WORKER_BYTES)
    links, path = chosen_links(["100mbit", "1gbit", "10gbit"]), chosen_path()
    dilations = chosen_dilations(links)
    variants = {name: variant_of(name) for name in FLAGS.variants or _VARIANTS}
    if not FLAGS.nolab and (why := why_not()):
        sys.exit(f"{why}\nOr use --nolab to measure over loopback, without links of known rate.")
    record = Record(path, {**THREADS, "network": "loopback" if FLAGS.nolab else "netlab"}, KEY)
    begin = time.monotonic()
    with contextlib.nullcontext() if FLAGS.nolab else Netlab(hosts=max(workers), rate=None) as lab:
        for count in workers:
            Log.print(f"{count} workers:")
            together = _FEW if count <= _FEW else 1
            plan = Plan(FLAGS.steps, FLAGS.seconds, FLAGS.rounds, 1, 1, _WORKER_BYTES, together)
            measure(record, "emulated", Network(lab, count, dilations), variants, links, plan)
    print_table([Row.from_json(values) for values in record.rows])
    print(f"Took {(time.monotonic() - begin) / 60:.1f} minutes.")


if __name__ == "__main__":
    end_on_signals()
    app.run(main)
