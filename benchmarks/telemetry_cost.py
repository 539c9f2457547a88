"""Compares the time of a training step with and without `tfdist.callbacks.Telemetry`.

    python -m benchmarks.telemetry_cost                       # about 10 minutes on 2 cores

Two workers train the dense network with 10 M parameters of `benchmarks/models.py`. The same processes train with and
without the callback, which writes for TensorBoard and Prometheus, in turns and in random order. A ratio is taken within
a round. "off again" is a second variant without the callback; its ratio to the first is the accuracy.
"""

import functools
import random
import statistics
import tempfile
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

_VARIANTS = ("off", "on", "off again")
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


class _StepClock(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())


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


def fit_block(variant: str, folder: str, steps: int, every_seconds: float, codec: str | None) -> float:
    """Median seconds from the end of a step to the end of the next, on one worker."""
    model, data = _compiled(codec)
    clock, more = _StepClock(), []
    if variant == "on":
        more = [tfdist.callbacks.Telemetry(folder, prometheus_port=0, every_seconds=every_seconds)]
    model.fit(data, steps_per_epoch=steps + 1, verbose=0, callbacks=[clock, *more])
    return float(np.median(np.diff(clock.ends)))


def measure_start() -> dict[str, list[float]]:
    """Seconds per step of the slower worker, by variant, in one start of both workers."""
    blocks: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    order = random.Random(0)
    with WorkerPool(2, env=_THREADS) as pool, tempfile.TemporaryDirectory() as folder:
        options = FLAGS.every_seconds, FLAGS.codec
        for variant in _VARIANTS:
            pool.run(fit_block, variant, folder, 3, *options)
        for _ in range(FLAGS.telemetry_rounds):
            for variant in order.sample(_VARIANTS, len(_VARIANTS)):
                blocks[variant].append(max(pool.run(fit_block, variant, folder, FLAGS.telemetry_steps, *options)))
    return blocks


def main(argv: list[str]) -> None:
    """Prints the step times and their ratios."""
    starts = [measure_start() for _ in range(FLAGS.telemetry_starts)]
    table = rich.table.Table("variant", "step (median)", "ratio to off, by start")
    for variant in _VARIANTS:
        ratios = [
            statistics.median(b / a for a, b in zip(blocks["off"], blocks[variant], strict=True)) for blocks in starts
        ]
        step = statistics.median(each for blocks in starts for each in blocks[variant])
        table.add_row(variant, f"{1000 * step:.2f} ms", " ".join(f"{ratio:.4f}" for ratio in ratios))
    rich.console.Console().print(table)


if __name__ == "__main__":
    app.run(main)
