"""Measures how fast `BalancedSharding` reads, compared with plain `tf.data` on the same files.

    python -m benchmarks.input_throughput                                 # all sizes, about four minutes
    python -m benchmarks.input_throughput --sizes 1024 --batches 64,512   # small records, two batch sizes
    python -m benchmarks.input_throughput --json input.json

The TFRecord files fit the page cache, so the disk does not matter. For every record size and order, it reads one epoch
of the dataset that `BalancedSharding` makes for one replica, without training. Plain `tf.data` reads sequentially with
`TFRecordDataset(files).batch(b)`, and at random with a shuffle buffer, with and without files interleaved in parallel.
The random order of `BalancedSharding` is a permutation of all records, which is more than a shuffle buffer gives. The
same records are also read from memory and from ArrayRecord files. All cases take turns in random order, so that a drift
of the machine affects all alike. The output shows medians, and the throughput relative to the faster plain pipeline;
the target is at least 0.9. CPU time counts all threads of this process, and is more meaningful than wall time on a busy
machine.
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
flags.DEFINE_list("sizes", ["1024", "8192", "131072"], "Bytes per record.")
flags.DEFINE_list("batches", ["128"], "Records per batch.")
flags.DEFINE_integer("megabytes", 256, "Megabytes read in one run.", 1)
flags.DEFINE_integer("files", 4, "Number of files.", 1)
flags.DEFINE_integer("shuffle_buffer", 1024, "Records in the shuffle buffer of plain tf.data.", 1)
flags.DEFINE_integer("repeats", 9, "Number of runs of each case.", 3)
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
        """Seconds of one pass: wall time and CPU time."""
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
            if run:  # Leave out the first run, which traces and fills caches.
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
