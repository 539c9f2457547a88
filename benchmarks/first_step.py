"""Measures how the cost of a first step grows with the number of workers.

    python -m benchmarks.first_step                             # about 10 minutes on 2 cores, 16 workers take 9 GB
    python -m benchmarks.first_step --workers 2,16 --codecs none,int8 --json first_step.json
    python -m benchmarks.first_step --workers 2,16 --at_once 16 --repeats 3     # 8 jobs of 2 workers, 1 job of 16

A custom loop trains a dense network of 0.7 M parameters on one host. For each number of workers and each variant the
workers start anew. More processes share the processors and their caches, so each takes more processor time.
`--at_once 16` always runs 16 workers, as 8 jobs of 2 or 1 job of 16. The load of the machine is then equal, and the
times differ only by the size of a job. The table shows, as medians over the workers and then over the repeats:

- nodes: operations in the graph of a step, with those of its functions, each counted once;
- first step: processor seconds of tracing and of the first step, in all threads of a worker;
- step: seconds of a later step;
- threads: threads of a worker after it.
"""

import contextlib
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

import tfdist
from benchmarks.record import describe_run
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["2", "4", "8", "16"], "Numbers of workers.")
flags.DEFINE_list("codecs", ["stock", "none", "int8", "powersgd"], "Values of `compression=`; stock is TensorFlow's.")
flags.DEFINE_integer("steps", 10, "Later steps.", 1)
flags.DEFINE_integer("at_once", 0, "Workers that run at once, in as many jobs as they fill; 0 for one job.", 0)
flags.DEFINE_integer("repeats", 1, "Repeats of each measurement.", 1)
flags.DEFINE_string("json", None, "A file for the results.")

_FEATURES, _HIDDEN, _CLASSES, _ROWS = 256, (640, 640), 10, 16
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
_COLUMNS = ("nodes", "first step", "step", "threads")


@functools.cache
def prepare(codec: str) -> tuple[Callable[..., tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Makes the strategy and the model of a worker. Returns the function of a step, not traced yet, and its batch."""
    if codec == "stock":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tfdist.MultiWorkerMirroredStrategy(compression=None if codec == "none" else codec)
    with strategy.scope():
        model = keras.Sequential([keras.Input((_FEATURES,)), *map(keras.layers.Dense, (*_HIDDEN, _CLASSES))])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    rng = np.random.default_rng(strategy.cluster_resolver.task_id)
    x, y = tf.constant(rng.normal(size=(_ROWS, _FEATURES)), tf.float32), tf.constant(rng.integers(_CLASSES, size=_ROWS))

    def of_replica(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / (_ROWS * strategy.num_replicas_in_sync)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(of_replica, (x, y)), axis=None)

    return step, (x, y)


def make_ready(codec: str) -> None:
    """Calls `prepare` on one worker, so that the first steps of all jobs begin together."""
    prepare(codec)


def measure(codec: str, steps: int) -> tuple[float, ...]:
    """Trains on one worker. Returns the columns of the table."""
    step, batch = prepare(codec)
    begun = time.process_time()
    float(step(*batch))
    first = time.process_time() - begun
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        float(step(*batch))
        times.append(time.perf_counter() - begun)
    return nodes_of(step.get_concrete_function(*batch)), first, statistics.median(times), threads_of_process()


def nodes_of(function: tf.types.experimental.ConcreteFunction) -> int:
    """Returns the number of operations of a graph and of its functions."""
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(each.node_def) for each in graph.library.function)


def threads_of_process() -> int:
    """Returns the number of threads of this process."""
    return len(list(pathlib.Path("/proc/self/task").iterdir()))


def _results_of(workers: int, codec: str) -> tuple[float, ...]:
    repeats = []
    for _ in range(FLAGS.repeats):
        repeats.append(_medians(_once(workers, codec)))
        described = zip(_COLUMNS, repeats[-1], strict=True)
        print(f"{workers} workers, {codec}:", *(f"{name} {value:.4g}" for name, value in described), flush=True)
    return _medians(repeats)


def _once(workers: int, codec: str) -> list[tuple[float, ...]]:
    """Runs the jobs once, at the same time. Returns the columns of each worker."""
    jobs = max(FLAGS.at_once // workers, 1)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(WorkerPool(workers, env=_THREADS)) for _ in range(jobs)]
        for pool in pools:
            pool.run(make_ready, codec)
        with ThreadPoolExecutor(jobs) as threads:
            of_jobs = list(threads.map(lambda pool: pool.run(measure, codec, FLAGS.steps), pools))
    return [row for rows in of_jobs for row in rows]


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def main(_) -> None:
    """Prints the table."""
    table = rich.table.Table("workers", "variant", *_COLUMNS)
    rows = []
    for codec in FLAGS.codecs:
        for workers in map(int, FLAGS.workers):
            nodes, first, step, threads = _results_of(workers, codec)
            rows.append(
                dict(zip(("workers", "variant", *_COLUMNS), (workers, codec, nodes, first, step, threads), strict=True))
            )
            table.add_row(
                str(workers), codec, f"{nodes:.0f}", f"{first:.2f} s", f"{1000 * step:.1f} ms", f"{threads:.0f}"
            )
    rich.console.Console(width=100).print(table)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps({"run": describe_run(), "rows": rows}, indent=1))


if __name__ == "__main__":
    app.run(main)
