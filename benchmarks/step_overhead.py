"""Compares the time of a training step under tfdist and under the strategy of TensorFlow that it replaces.

    python -m benchmarks.step_overhead                        # about 8 minutes on 2 cores
    python -m benchmarks.step_overhead --quick                # a minute or two, coarse
    python -m benchmarks.step_overhead --json overhead.json

A custom loop trains a dense network on the same rows in every step, so that no input pipeline is timed:

- on 2 virtual devices of one process, `tf.distribute.MirroredStrategy` against `tfdist.MirroredStrategy`;
- on 2 workers, `tf.distribute.MultiWorkerMirroredStrategy` against `tfdist.MultiWorkerMirroredStrategy`;
- on the same 2 workers, tfdist's custom loop against Keras' `fit`, which also reads a dataset and keeps metrics.

All variants stay alive and take turns in random order, block by block, so that a drift of the machine affects all
alike. A block counts by the median of its steps, and ratios are taken within a round. Two starts of the same program
can differ by 5 % throughout their lives, so everything is started several times. The stock strategy runs twice; its
difference from itself is the accuracy of this benchmark. The output shows medians and quartiles: of times over all
blocks, and of ratios over the starts.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import rich.console
import rich.table
import rich.text
import tensorflow as tf
from absl import app, flags

import tfdist
from benchmarks.record import describe_run
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 20, "Steps in a block.", 2)
flags.DEFINE_integer("rounds", 15, "Blocks of each variant in one start.", 1)
flags.DEFINE_integer("starts", 6, "Starts of all processes.", 2)
flags.DEFINE_list("hidden", ["640", "640", "640"], "Sizes of the hidden layers; the default has 1 M parameters.")
flags.DEFINE_integer("batch_size", 64, "Rows per replica.", 1)
flags.DEFINE_bool("quick", False, "2 starts of 5 rounds.")
flags.DEFINE_string("json", None, "A file for the results.")

_FEATURES, _CLASSES = 256, 10
_LIBRARIES = {"stock": tf.distribute, "stock again": tf.distribute, "tfdist": tfdist}
# Equal for all variants. A replica computes on one thread, so that the other replica has a core too.
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """The training: the sizes of hidden layers, and the rows per replica."""

    hidden: tuple[int, ...]
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train, in a pool of workers that several variants may share."""

    name: str
    pool: WorkerPool
    block: Callable[..., list[float]]
    arguments: tuple[str, ...] = ()

    def measure(self, workload: Workload, steps: int) -> float:
        """The median step of one block on the slowest worker, in seconds."""
        return max(statistics.median(times) for times in self.pool.run(self.block, *self.arguments, workload, steps))


# The code below runs in the workers.


@functools.cache
def make_strategy(library: str, name: str) -> tf.distribute.Strategy:
    module = _LIBRARIES[library]
    if name == "MirroredStrategy":
        return module.MirroredStrategy(["CPU:0", "CPU:1"])
    return module.MultiWorkerMirroredStrategy()


def build_model(workload: Workload) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(size, activation="relu") for size in workload.hidden]
    return keras.Sequential([keras.Input((_FEATURES,)), *hidden, keras.layers.Dense(_CLASSES)])


def make_rows(workload: Workload, replica: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(replica)
    features = rng.standard_normal((workload.batch_size, _FEATURES), dtype=np.float32)
    return features, rng.integers(_CLASSES, size=workload.batch_size)


@functools.cache
def make_step(library: str, name: str, workload: Workload) -> Callable[[], tf.Tensor]:
    """A step of a custom loop as in TensorFlow's guide to distributed training."""
    strategy = make_strategy(library, name)
    with strategy.scope():
        model = build_model(workload)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_weights)
    global_batch_size = workload.batch_size * strategy.num_replicas_in_sync

    def replica_step(features, labels):
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses) / global_batch_size
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss

    @tf.function
    def step(features, labels):
        losses = strategy.run(replica_step, args=(features, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def part(context, position):
        return tf.constant(make_rows(workload, context.replica_id_in_sync_group)[position])

    features, labels = (
        strategy.experimental_distribute_values_from_function(functools.partial(part, position=position))
        for position in (0, 1)
    )
    return lambda: step(features, labels)


def custom_block(library: str, name: str, workload: Workload, steps: int) -> list[float]:
    """Seconds of each step of a custom loop."""
    step = make_step(library, name, workload)
    step()  # waits for the other worker
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step().numpy()
        times.append(time.perf_counter() - start)
    return times


class _Clock(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())


@functools.cache
def make_compiled(workload: Workload) -> tuple[keras.Model, tf.distribute.DistributedDataset]:
    strategy = make_strategy("tfdist", "MultiWorkerMirroredStrategy")
    with strategy.scope():
        model = build_model(workload)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)

    def endless(context):
        return tf.data.Dataset.from_tensors(make_rows(workload, context.input_pipeline_id)).repeat()

    return model, strategy.distribute_datasets_from_function(endless)


def fit_block(workload: Workload, steps: int) -> list[float]:
    """Seconds from the end of one step of `fit` to the end of the next."""
    model, data = make_compiled(workload)
    clock = _Clock()
    model.fit(data, steps_per_epoch=steps + 1, verbose=0, callbacks=[clock])
    return np.diff(clock.ends).tolist()


# The code below runs in the process that the user starts.


Blocks = dict[str, list[float]]


def take_turns(variants: list[Variant], workload: Workload, rounds: int, steps: int) -> Blocks:
    """Seconds per step of the blocks of each variant."""
    for variant in variants:
        variant.measure(workload, 2)  # to trace and warm up
    blocks: Blocks = {variant.name: [] for variant in variants}
    order = random.Random(0)
    for _ in range(rounds):
        for variant in order.sample(variants, len(variants)):
            blocks[variant.name].append(variant.measure(workload, steps))
    return blocks


def on_devices(*setting) -> Blocks:
    """Measures one start of a process with 2 devices."""
    with WorkerPool(1, 2, env=_THREADS) as pool:
        variants = [Variant(library, pool, custom_block, (library, "MirroredStrategy")) for library in _LIBRARIES]
        return take_turns(variants, *setting)


def on_workers(*setting) -> Blocks:
    """Measures one start of 2 workers per library, since a process makes only one MultiWorkerMirroredStrategy."""
    with contextlib.ExitStack() as stack:
        pools = {library: stack.enter_context(WorkerPool(2, env=_THREADS)) for library in _LIBRARIES}
        name = "MultiWorkerMirroredStrategy"
        variants = [Variant(library, pool, custom_block, (library, name)) for library, pool in pools.items()]
        return take_turns([*variants, Variant("fit", pools["tfdist"], fit_block)], *setting)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def compare(where: str, starts: list[Blocks], base: str, other: str) -> dict:
    """The times of `base` and `other`, and their ratio."""

    def ratio(blocks):
        return statistics.median(b / a for a, b in zip(blocks[base], blocks[other], strict=True))

    seconds = [[block for blocks in starts for block in blocks[name]] for name in (base, other)]
    return {
        "title": f"{where}: {other} / {base}",
        "base_seconds": spread(seconds[0]),
        "other_seconds": spread(seconds[1]),
        "ratio": spread([ratio(blocks) for blocks in starts]),
        "ratio_by_start": [ratio(blocks) for blocks in starts],
    }


def measure(workload: Workload, starts: int, rounds: int, steps: int) -> list[dict]:
    """All comparisons."""
    devices = [on_devices(workload, rounds, steps) for _ in range(starts)]
    workers = [on_workers(workload, rounds, steps) for _ in range(starts)]
    return [
        compare("2 devices", devices, "stock", "stock again"),
        compare("2 devices", devices, "stock", "tfdist"),
        compare("2 workers", workers, "stock", "stock again"),
        compare("2 workers", workers, "stock", "tfdist"),
        compare("2 workers", workers, "tfdist", "fit"),
    ]


def print_table(comparisons: list[dict]) -> None:
    table = rich.table.Table("b / a", "a, ms", "b, ms", "ratio")

    def cell(values, scale, digits):
        low, middle, high = (f"{values[key] * scale:.{digits}f}" for key in ("low", "median", "high"))
        return rich.text.Text(f"{middle} [{low} to {high}]")

    for comparison in comparisons:
        seconds = [cell(comparison[side], 1e3, 2) for side in ("base_seconds", "other_seconds")]
        table.add_row(comparison["title"], *seconds, cell(comparison["ratio"], 1, 3))
    rich.console.Console(width=120).print(table)


def main(_) -> None:
    workload = Workload(tuple(int(size) for size in FLAGS.hidden), FLAGS.batch_size)
    starts, rounds = (2, 5) if FLAGS.quick else (FLAGS.starts, FLAGS.rounds)
    machine = {**describe_run(), "threads": _THREADS, "keras": keras.__version__, "tfdist": tfdist.__version__}
    parameters = build_model(workload).count_params()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    setting = {"parameters": parameters, **dataclasses.asdict(workload)}
    setting |= {"starts": starts, "rounds": rounds, "steps": FLAGS.steps}
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    comparisons = measure(workload, starts, rounds, FLAGS.steps)
    print_table(comparisons)
    if FLAGS.json:
        result = {"machine": machine, "setting": setting, "comparisons": comparisons}
        pathlib.Path(FLAGS.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
