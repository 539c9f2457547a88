"""How fast `BalancedSharding` reads, beside plain `tf.data` on the same files.

    python -m benchmarks.input_throughput                                 # all sizes, about four minutes
    python -m benchmarks.input_throughput --sizes 1024 --batches 64,512   # small records, two batch sizes
    python -m benchmarks.input_throughput --json input.json

Read is a set of TFRecord files that fits the page cache, so what is compared is work, not a disk. For every record size
and order, an epoch of the dataset that `BalancedSharding` makes for one replica is read, without training. Beside it
stands what one writes with plain `tf.data`: in sequence `TFRecordDataset(files).batch(b)`; at random the same with a
shuffle buffer, and with files interleaved in parallel before it. Ours at random is a permutation of all records; a
shuffle buffer gives less. The same records in memory, and in ArrayRecord files, are read too. All take turns in random
order: a drift of the machine hits all alike. Printed are medians, and ours over the faster of the plain ones: 0.9 or
more is the aim. CPU time counts all threads of this process; on a machine that does other work it says more than the
clock.
"""

import dataclasses
import json
import os
import pathlib
import random
import statistics
import tempfile
import time

import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

from benchmarks.record import describe_run
from tfdist.data import BalancedSharding
from tfdist.data.sources import Source, as_source

FLAGS = flags.FLAGS
flags.DEFINE_list("sizes", ["1024", "8192", "131072"], "Bytes of a record.")
flags.DEFINE_list("batches", ["128"], "Records of a batch.")
flags.DEFINE_integer("megabytes", 256, "How much is read in one run.", 1)
flags.DEFINE_integer("files", 4, "Files that the records are spread over.", 1)
flags.DEFINE_integer("shuffle_buffer", 1024, "Records in the buffer of plain tf.data.", 1)
flags.DEFINE_integer("repeats", 9, "Times each is run.", 3)
flags.DEFINE_string("json", None, "A file for the results.")


@dataclasses.dataclass(frozen=True)
class Case:
    """One pipeline to time."""

    name: str
    order: str
    plain: bool
    dataset: tf.data.Dataset
    records: int

    def seconds(self) -> tuple[float, float]:
        """How long one pass takes, by the clock and in CPU time."""
        start, cpu = time.perf_counter(), time.process_time()
        read = sum(len(batch) for batch in self.dataset)
        seconds = time.perf_counter() - start, time.process_time() - cpu
        if read != self.records:
            raise RuntimeError(f"{self.name} read {read} of {self.records} records.")
        return seconds


def write_tfrecords(folder: str, records: list[bytes]) -> list[str]:
    paths = [os.path.join(folder, f"{i}.tfrecord") for i in range(FLAGS.files)]
    for i, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for record in np.array_split(np.arange(len(records)), len(paths))[i]:
                writer.write(records[record])
    return paths


def write_array_records(folder: str, records: list[bytes]) -> list[str]:
    from array_record.python import array_record_module

    path = os.path.join(folder, "all.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()
    return [path]


def ours(source: Source, batch: int, *, shuffled: bool) -> tf.data.Dataset:
    return BalancedSharding(source, batch, shuffle=shuffled, policy="equal")()


def plain(paths: list[str], batch: int, *, shuffled: bool, interleaved: bool) -> tf.data.Dataset:
    records = tf.data.TFRecordDataset(paths)
    if interleaved:
        files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
        records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    if shuffled:
        records = records.shuffle(FLAGS.shuffle_buffer)
    return records.batch(batch).prefetch(tf.data.AUTOTUNE)


def make_cases(folder: str, size: int, batch: int) -> list[Case]:
    count = FLAGS.megabytes * 2**20 // size
    noise = np.random.default_rng(0).bytes(size + 4096)
    records = [noise[i % 4096 : i % 4096 + size] for i in range(count)]
    paths = write_tfrecords(folder, records)
    sources = {
        "TFRecord": as_source(paths),
        "ArrayRecord": as_source(write_array_records(folder, records)),
        "arrays": as_source(np.frombuffer(b"".join(records), np.uint8).reshape(count, size)),
        "items": as_source(records),
    }
    cases = [
        Case("plain: buffer", "random", True, plain(paths, batch, shuffled=True, interleaved=False), count),
        Case("plain: interleave, buffer", "random", True, plain(paths, batch, shuffled=True, interleaved=True), count),
        Case("plain", "sequential", True, plain(paths, batch, shuffled=False, interleaved=False), count),
    ]
    for name, source in sources.items():
        for order in ("sequential", "random"):
            cases.append(Case(name, order, False, ours(source, batch, shuffled=order == "random"), count))
    return cases


def measure(cases: list[Case], size: int, batch: int) -> list[dict]:
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    order = random.Random(0)
    for run in range(FLAGS.repeats + 1):
        for i in order.sample(range(len(cases)), len(cases)):
            seconds = cases[i].seconds()
            if run:  # The first traces and fills caches.
                times[i].append(seconds)
    medians = [tuple(map(statistics.median, zip(*of_case, strict=True))) for of_case in times]
    best = {
        order: min(clock for case, (clock, _) in zip(cases, medians, strict=True) if case.plain and case.order == order)
        for order in ("sequential", "random")
    }
    return [
        {
            "reader": case.name,
            "order": case.order,
            "record_bytes": size,
            "batch": batch,
            "median_seconds": clock,
            "records_per_second": case.records / clock,
            "megabytes_per_second": case.records * size / clock / 1e6,
            "over_plain": best[case.order] / clock,
            "cpu_microseconds_per_record": cpu / case.records * 1e6,
        }
        for case, (clock, cpu) in zip(cases, medians, strict=True)
    ]


def print_table(results: list[dict], size: int, batch: int) -> None:
    columns = ("order", "reader", "records/s", "MB/s", "over plain", "CPU µs/record")
    table = rich.table.Table(*columns, title=f"{size} bytes a record, {batch} a batch")
    for result in sorted(results, key=lambda result: result["order"]):
        table.add_row(
            result["order"],
            result["reader"],
            f"{result['records_per_second']:.0f}",
            f"{result['megabytes_per_second']:.0f}",
            f"{result['over_plain']:.2f}",
            f"{result['cpu_microseconds_per_record']:.1f}",
        )
    rich.console.Console(width=120).print(table)


def main(_) -> None:
    machine = describe_run()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    results = []
    for size in map(int, FLAGS.sizes):
        for batch in map(int, FLAGS.batches):
            with tempfile.TemporaryDirectory() as folder:
                of_size = measure(make_cases(folder, size, batch), size, batch)
            print_table(of_size, size, batch)
            results += of_size
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
