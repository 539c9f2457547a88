"""Compares a training step with and without `tfdist.callbacks.Telemetry`, and without the search for slow workers.

    python -m benchmarks.telemetry_cost                       # about 10 minutes on 2 cores

Two workers train the dense network with 10 M parameters of `benchmarks/models.py`. The same processes train all
variants in turns and in random order:

- off: without the callback
- on: with the callback, which writes for TensorBoard and Prometheus
- off again: a second variant without the callback, whose ratio to the first is the accuracy
- no search: without the callback and without the search for slow workers

A ratio is taken within a round, and its interval holds 95 of 100 medians of the rounds drawn again with repeats. The
time of a step is that of the slower worker. Processor seconds are those of both workers. They vary less, and all work
of a variant counts in them, also that of other threads.

A last table adds up what the callback itself does in a step: the time in its hooks, which the training waits for, and
the processor time of its thread. It does not show effects on other code, such as on caches, but is exact to 0.01 %.
"""

import functools
import pathlib
import random
import statistics
import tempfile
import threading
import time

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

import tfdist
from benchmarks.models import keras_model, make_batch
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
flags.DEFINE_integer("telemetry_steps", 20, "Steps in a block.", 2)
flags.DEFINE_integer("telemetry_rounds", 20, "Blocks of each variant in one start.", 2)
flags.DEFINE_integer("telemetry_starts", 3, "Starts of all processes.", 1)
flags.DEFINE_float("every_seconds", 1.0, "Seconds between two figures; the callback's default is 5.")
flags.DEFINE_string("codec", None, "Value of `compression=`.")

_VARIANTS = ("off", "on", "off again", "no search")
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


class _StepClock(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())


class _MeasuredTelemetry(tfdist.callbacks.Telemetry):
    """Measures itself: seconds in the hooks of steps, and processor seconds of the thread that writes."""

    hook_seconds = thread_seconds = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._timed(super().on_train_batch_begin, batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._timed(super().on_train_batch_end, batch, logs)

    def _add(self, report):
        self._timed(super()._add, report)

    def on_train_end(self, logs=None):
        self.thread_seconds = sum(
            int(pathlib.Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
            for thread in threading.enumerate()
            if thread.name == "tfdist-telemetry"
        )
        super().on_train_end(logs)

    def _timed(self, hook, *args):
        begun = time.perf_counter()
        hook(*args)
        self.hook_seconds += time.perf_counter() - begun


@functools.cache
def _compiled(codec: str | None) -> tuple[keras.Model, tf.distribute.DistributedDataset]:
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=codec)
    with strategy.scope():
        model = keras_model("mlp", keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)

    def endless(context):
        return tf.data.Dataset.from_tensors(make_batch("mlp", context.input_pipeline_id)).repeat()

    return model, strategy.distribute_datasets_from_function(endless)


def fit_block(variant: str, folder: str, steps: int, every_seconds: float, codec: str | None) -> tuple[float, ...]:
    """Trains a block on one worker.

    Returns:
      Median seconds from the end of a step to the end of the next, processor seconds of a step, and with the callback
      seconds of a step in its hooks and in its thread.
    """
    model, data = _compiled(codec)
    reports = model.distribute_strategy.reports
    clock, more, searching = _StepClock(), [], reports.stragglers
    if variant == "on":
        more = [_MeasuredTelemetry(folder, prometheus_port=0, every_seconds=every_seconds)]
    reports.stragglers = None if variant == "no search" else searching
    begun = time.process_time()
    model.fit(data, steps_per_epoch=steps + 1, verbose=0, callbacks=[clock, *more])
    used = time.process_time() - begun
    reports.stragglers = searching
    own = [seconds / (steps + 1) for each in more for seconds in (each.hook_seconds, each.thread_seconds)]
    return float(np.median(np.diff(clock.ends))), used / (steps + 1), *own


def measure_start() -> dict[str, list[tuple[float, ...]]]:
    """Seconds per step by variant, in one start of the workers.

    They are those of the slower worker, processor seconds of both, and the largest in the hooks and in the thread.
    """
    blocks: dict[str, list[tuple[float, ...]]] = {variant: [] for variant in _VARIANTS}
    order = random.Random(0)
    with WorkerPool(2, env=_THREADS) as pool, tempfile.TemporaryDirectory() as folder:
        options = FLAGS.every_seconds, FLAGS.codec
        for variant in _VARIANTS:
            pool.run(fit_block, variant, folder, 3, *options)
        for _ in range(FLAGS.telemetry_rounds):
            for variant in order.sample(_VARIANTS, len(_VARIANTS)):
                results = pool.run(fit_block, variant, folder, FLAGS.telemetry_steps, *options)
                times, used, *own = zip(*results, strict=True)
                blocks[variant].append((max(times), sum(used), *map(max, own)))
    return blocks


def ratio_with_interval(ratios: list[float]) -> str:
    """The median of the ratios, with the interval of the medians of samples drawn with repeats."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return f"{statistics.median(ratios):.4f} [{low:.4f} to {high:.4f}]"


def main(_) -> None:
    """Prints the times and their ratios."""
    starts = [measure_start() for _ in range(FLAGS.telemetry_starts)]
    table = rich.table.Table("variant", "step (median)", "ratio to off", "processor", "ratio to off")
    for variant in _VARIANTS:
        cells = [variant]
        for which in range(2):
            of_variant = [block[which] for blocks in starts for block in blocks[variant]]
            of_off = [block[which] for blocks in starts for block in blocks["off"]]
            ratios = [own / off for own, off in zip(of_variant, of_off, strict=True)]
            cells += [f"{1000 * statistics.median(of_variant):.2f} ms", ratio_with_interval(ratios)]
        table.add_row(*cells)
    console = rich.console.Console(width=140)
    console.print(table)
    console.print(_own_cost([block for blocks in starts for block in blocks["on"]]))


def _own_cost(blocks: list[tuple[float, ...]]) -> rich.table.Table:
    """Returns a table of what the callback itself does in a step of the slower worker, as medians of the blocks."""
    table = rich.table.Table("of a step", "time", "part of the step")
    names = ("hooks", "thread that writes", "together")
    step = statistics.median(block[0] for block in blocks)
    for name, seconds in zip(names, zip(*((*b[2:], sum(b[2:])) for b in blocks), strict=True), strict=True):
        median = statistics.median(seconds)
        table.add_row(name, f"{1e6 * median:.0f} us", f"{100 * median / step:.2f} %")
    return table


if __name__ == "__main__":
    app.run(main)
