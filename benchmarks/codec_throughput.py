"""Measures the throughput of each codec in GB of float32 per second, on one core, compiled by XLA.

    taskset -c 0 python -m benchmarks.codec_throughput                      # about a minute
    taskset -c 0 python -m benchmarks.codec_throughput --sizes 1048576      # only pieces of 4 MiB, as a step uses them
    taskset -c 0 python -m benchmarks.codec_throughput --json codecs.json

For one row of float32 it times three operations: encode; compress, which encodes the row plus its residual and computes
the new residual; and decode. For comparison it shows three simple operations: multiplying a tensor, adding two tensors,
and calling a compiled function with almost no work. The last cost is part of every number and matters for small sizes.
All cases take turns in random order, so that a drift of the machine affects all alike. The numbers are medians. Memory
bandwidth limits most of them, so load on another core changes every number. Compare within a run only.

PowerSGD works on a square matrix of that size, and its encode is a whole power iteration. It runs in a plain graph, in
which TensorFlow's matrix products are faster than XLA's.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable

# Must be set before TensorFlow starts.
os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

from benchmarks.record import describe_run
from tfdist.strategies.compression import NAMES, Codec, PowerSGD, WordCodec

FLAGS = flags.FLAGS
flags.DEFINE_list("sizes", ["1048576", "26214400"], "Elements of the tensor, rounded up to whole blocks of each codec.")
flags.DEFINE_list("codecs", list(NAMES), "The codecs to measure.")
flags.DEFINE_integer("repeats", 30, "Number of runs of each operation.", 3)
flags.DEFINE_string("json", None, "A file for the results.")

_PLAIN = "read, multiply, write"


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation to time: a traced function, and the number of float32 elements that it processes."""

    codec: str
    operation: str
    elements: int
    run: Callable[[], object]

    def seconds(self) -> float:
        """Duration of one run."""
        start = time.perf_counter()
        for result in tf.nest.flatten(self.run()):
            memoryview(result)  # waits for the result without a copy
        return time.perf_counter() - start


def bind(fn: Callable, *args, jit_compile: bool = True) -> Callable[[], object]:
    """Traces and warms up a function, and binds its arguments."""
    traced = tf.function(fn, jit_compile=jit_compile, autograph=False)
    for _ in range(2):
        traced(*args)
    return lambda: traced(*args)


def random_values(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


def plain_cases(elements: int) -> list[Case]:
    values = random_values(1, elements)
    return [
        Case(_PLAIN, "encode", elements, bind(lambda x: x * 2, values)),
        Case("add two", "encode", elements, bind(tf.add, values, random_values(1, elements))),
        Case("a call alone", "encode", elements, bind(lambda x: x * 2, values[:, :1])),
    ]


def word_cases(codec: WordCodec, elements: int) -> list[Case]:
    elements = math.ceil(elements / codec.granule) * codec.granule
    with_feedback = dataclasses.replace(codec, error_feedback=True)
    values = random_values(1, elements)
    state = (tf.zeros_like(values),) * with_feedback.states
    words = codec.encode(values)
    return [
        Case(codec.name, "encode", elements, bind(codec.encode, values)),
        Case(codec.name, "compress", elements, bind(with_feedback.compress, values, state)),
        Case(codec.name, "decode", elements, bind(functools.partial(codec.decode, elements=elements), words)),
    ]


def low_rank_cases(codec: PowerSGD, elements: int) -> list[Case]:
    side = math.isqrt(elements)
    matrix, q = random_values(side, side), codec.start(side, 0)

    def factors(gradient):
        p = codec.orthonormalise(codec.project(gradient, q))
        return p, codec.back_project(gradient, p)

    def with_residual(gradient, residual):
        intended = gradient + residual
        p, own_q = factors(intended)
        return p, own_q, intended - codec.decode(p, own_q)

    return [
        Case(codec.name, "encode", side**2, bind(factors, matrix, jit_compile=False)),
        Case(codec.name, "compress", side**2, bind(with_residual, matrix, matrix, jit_compile=False)),
        Case(codec.name, "decode", side**2, bind(codec.decode, *factors(matrix), jit_compile=False)),
    ]


def make_cases(codec: Codec, elements: int) -> list[Case]:
    return low_rank_cases(codec, elements) if isinstance(codec, PowerSGD) else word_cases(codec, elements)


def measure(elements: int, codecs: list[Codec], repeats: int) -> list[dict]:
    cases = plain_cases(elements) + [case for codec in codecs for case in make_cases(codec, elements)]
    times: list[list[float]] = [[] for _ in cases]
    order = random.Random(0)
    for _ in range(repeats):
        for i in order.sample(range(len(cases)), len(cases)):
            times[i].append(cases[i].seconds())
    return [
        {
            "codec": case.codec,
            "operation": case.operation,
            "elements": case.elements,
            "median_seconds": statistics.median(seconds),
            "best_seconds": min(seconds),
            "gigabytes_per_second": 4e-9 * case.elements / statistics.median(seconds),
        }
        for case, seconds in zip(cases, times, strict=True)
    ]


def print_table(elements: int, results: list[dict]) -> None:
    table = rich.table.Table("codec", "encode", "compress", "decode", title=f"GB/s of float32, {elements} elements")
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        cells.setdefault(result["codec"], {})[result["operation"]] = f"{result['gigabytes_per_second']:.2f}"
    for codec, row in cells.items():
        table.add_row(codec, *(row.get(operation, "") for operation in ("encode", "compress", "decode")))
    rich.console.Console(width=120).print(table)


def main(_) -> None:
    unknown = sorted(set(FLAGS.codecs) - set(NAMES))
    if unknown:
        raise app.UsageError(f"--codecs takes {', '.join(NAMES)}, got {', '.join(unknown)}.")
    codecs = [NAMES[name]() for name in FLAGS.codecs]
    machine = describe_run()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    results = []
    for elements in map(int, FLAGS.sizes):
        of_size = measure(elements, codecs, FLAGS.repeats)
        print_table(elements, of_size)
        results += of_size
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
