"""Measures the cost of backups: `fit` with a save every 50 steps against the same `fit` without.

    python -m benchmarks.backup_cost                          # about 15 minutes on 2 cores
    python -m benchmarks.backup_cost --quick                  # a few minutes, coarse
    python -m benchmarks.backup_cost --where workers --compression int8

The model is a dense network of 10 M parameters under Adam, with 121 MB of variables in a save. Both variants live in
the same processes and take turns in random order, block by block. Each block is long enough for the writing thread to
end within it, so that its load on training counts. The output shows medians and quartiles over the blocks. The cost of
a save is the time of the steps in the half interval after it minus that of the half interval before it.
"""

import functools
import json
import pathlib
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
from benchmarks import models
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
flags.DEFINE_enum("where", "one", ["one", "workers"], "One process under plain `fit`, or 2 workers.")
flags.DEFINE_enum("model", "mlp", list(models.MODELS), "The model.")
flags.DEFINE_string("compression", None, "Compression of the strategy, with --where workers.")
flags.DEFINE_integer("save_steps", 50, "Steps between saves.", 1)
flags.DEFINE_integer("saves", 2, "Saves in a block.", 1)
flags.DEFINE_integer("rounds", 6, "Blocks of each variant.", 2)
flags.DEFINE_bool("quick", False, "3 blocks of each variant, with one save.")
flags.DEFINE_string("directory", None, "Folder of the saves; by default the folder of temporary files.")
flags.DEFINE_string("json", None, "A file for the results.")


class Clock(keras.callbacks.Callback):
    """Records when steps begin and end. Must be the first callback, so a step excludes the time of other callbacks."""

    def __init__(self):
        super().__init__()
        self.begins, self.ends = [], []

    def on_train_batch_begin(self, batch, logs=None):
        """Records the time."""
        self.begins.append(time.perf_counter())

    def on_train_batch_end(self, batch, logs=None):
        """Records the time."""
        self.ends.append(time.perf_counter())


# The code below runs in the workers.


@functools.cache
def make_model(name: str, where: str, compression: str | None) -> tuple[keras.Model, tf.data.Dataset]:
    keras.utils.set_random_seed(0)
    strategy = tf.distribute.get_strategy()
    if where == "workers":
        strategy = tfdist.MultiWorkerMirroredStrategy(compression=compression)
    with strategy.scope():
        model = models.keras_model(name, keras)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = tf.data.Dataset.from_tensors(models.make_batch(name, 0)).repeat()
    return model, strategy.distribute_datasets_from_function(lambda _: batch)


def train_block(name: str, where: str, compression: str | None, steps: int, save_steps: int, folder: str | None):
    """Returns seconds of `steps` steps of `fit`, of the pause after each save, and of the whole cost of each save."""
    model, data = make_model(name, where, compression)
    clock = Clock()
    backup = [tfdist.callbacks.BackupAndRestore(folder, save_freq=save_steps)] if folder else []
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[clock, *backup])
    pauses, times = np.subtract(clock.begins[1:], clock.ends[:-1]), np.diff(clock.ends)
    saved, half = range(save_steps - 1, steps - save_steps // 2, save_steps), save_steps // 2
    costs = [float(sum(times[at : at + half]) - sum(times[at - half : at])) for at in saved]
    return clock.ends[-1] - clock.begins[0], [float(pauses[at]) for at in saved], costs


# The code below runs in the process that the user starts.


def measure(pool: WorkerPool, setting: tuple, save_steps: int, saves: int, rounds: int, folder: str) -> dict:
    """Returns the seconds of each block by variant, and the delays and costs of saves."""
    steps = save_steps * saves + save_steps // 2 + 1  # leaves time to write the last save

    def block(folder):
        seconds, pauses, costs = zip(*pool.run(train_block, *setting, steps, save_steps, folder), strict=True)
        return max(seconds), *(list(map(max, zip(*of_worker, strict=True))) for of_worker in (pauses, costs))

    variants = {"without": None, "with": folder}
    for variant in variants.values():
        block(variant)
    blocks, pauses, costs = {name: [] for name in variants}, [], []
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            seconds, of_saves, more = block(variants[name])
            blocks[name].append(seconds / steps)
            if variants[name]:
                pauses += of_saves
                costs += more
    step = statistics.median(blocks["without"])
    return {
        "step_seconds": blocks,
        "seconds_a_save": costs,
        "pause_seconds": pauses,
        "share": [cost / (save_steps * step) for cost in costs],
    }


def cell(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """Median and quartiles as text."""
    low, middle, high = (value * scale for value in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_table(result: dict) -> None:
    table = rich.table.Table("", "median (quartiles)")
    for name, values in result["step_seconds"].items():
        table.add_row(f"step {name} saves, ms", cell(values, 1e3))
    table.add_row("a save holds up the next step, ms", cell(result["pause_seconds"], 1e3))
    table.add_row("a save costs in all, ms", cell(result["seconds_a_save"], 1e3))
    table.add_row("of the step time, %", cell(result["share"], 1e2, 2))
    rich.console.Console(width=100).print(table)


def main(_) -> None:
    if FLAGS.compression and FLAGS.where == "one":
        raise app.UsageError("--compression needs --where workers, since a single process exchanges nothing.")
    saves, rounds = (1, 3) if FLAGS.quick else (FLAGS.saves, FLAGS.rounds)
    setting = (FLAGS.model, FLAGS.where, FLAGS.compression)
    workers = 2 if FLAGS.where == "workers" else 1
    with tempfile.TemporaryDirectory(dir=FLAGS.directory) as folder, WorkerPool(workers, timeout_seconds=3600) as pool:
        result = measure(pool, setting, FLAGS.save_steps, saves, rounds, str(pathlib.Path(folder, "backup")))
    described = {"model": FLAGS.model, "where": FLAGS.where, "compression": FLAGS.compression}
    described |= {"save_steps": FLAGS.save_steps, "saves": saves, "rounds": rounds}
    print(", ".join(f"{key} {value}" for key, value in described.items()))
    print_table(result)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps({"setting": described, **result}, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
