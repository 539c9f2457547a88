"""Measures the time to a target loss with an adaptive batch size and with fixed ones, while the workers change.

    python -m benchmarks.adaptive_batch --seeds 0,1,2 --json benchmarks/results/adaptive_batch.json
    python -m benchmarks.adaptive_batch --model digits --rate 0.5 --target 0.2 --phase_seconds 6

Trains with 2 replicas, then 4, then 3, on virtual devices of one machine. `char_lm` is the model of examples/char_lm.py
with 16 characters, a width of 32 and one block, trained by AdamW. `digits` is a small network trained by SGD. The time
is emulated: a step takes `--exchange_ms`, and `--row_ms` for each row of the replica with most rows. So results do not
depend on the machine. A change of replicas makes a new strategy, and carries over what a backup has.

`--rate` belongs to the base size: 32 for `char_lm`, the default of the example, and 64 for `digits`. AdaptiveBatch
begins with it. Fixed sizes have this rate, scaled by the square root rule and by the linear rule.
"""

import dataclasses
import importlib
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits

import tfdist
from benchmarks.record import Record
from tfdist.adaptive.learning_rate_rules import learning_rate_scale

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "char_lm", ["char_lm", "digits"], "The model and its data.")
flags.DEFINE_list("seeds", ["0"], "Seeds of weights and order.")
flags.DEFINE_list("sizes", ["32", "64", "128", "256", "512"], "Fixed global batch sizes.")
flags.DEFINE_list("fixed_rules", ["sqrt", "linear"], "Rules of the learning rate for runs with fixed sizes.")
flags.DEFINE_list("adaptive_rules", ["auto"], "Rules of the learning rate for runs with AdaptiveBatch.")
flags.DEFINE_float("exchange_ms", 100.0, "Emulated time of a step without rows.", 0)
flags.DEFINE_float("row_ms", 0.5, "Emulated time of a row.", 0)
flags.DEFINE_float("rate", 0.004, "Learning rate for batches of the base size.", 0)
flags.DEFINE_float("target", 2.0, "Test loss to reach.", 0)
flags.DEFINE_float("phase_seconds", 12.0, "Emulated time after which the number of replicas changes, twice.", 0)
flags.DEFINE_float("largest_seconds", 150.0, "Emulated time after which a run ends without the target.", 0)
flags.DEFINE_string("json", None, "A file for the results.")

_REPLICAS = (2, 4, 3)
_ADAPTIVE = "adaptive"
_CONTEXT = 16
_STEPS_BETWEEN_TESTS = 10


class Task(NamedTuple):
    """A model and its data.

    Attributes:
      base: The global batch size that `--rate` belongs to.
      smallest, largest: The range of the adaptive size.
      train, test: Examples and labels.
      model: Makes the model, which returns logits.
      optimizer: Makes the optimizer of a learning rate.
    """

    base: int
    smallest: int
    largest: int
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    model: Callable[[], keras.Model]
    optimizer: Callable[[float], keras.optimizers.Optimizer]


def digits() -> Task:
    """A network with 32 hidden units. Each fifth example is for tests."""
    data = load_digits()
    x, y = (data.data / 16).astype("float32"), data.target.astype("int32")
    in_test = np.arange(len(x)) % 5 == 0

    def model():
        layers = [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        return keras.Sequential(layers)

    return Task(64, 16, 1024, (x[~in_test], y[~in_test]), (x[in_test], y[in_test]), model, keras.optimizers.SGD)


def char_lm() -> Task:
    """A small transformer that writes Python. The last tenth of the text is for tests, which use each tenth row."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    module = importlib.import_module("char_lm")
    text = module.read_text()
    rows = text[: len(text) // (_CONTEXT + 1) * (_CONTEXT + 1)].reshape(-1, _CONTEXT + 1).astype(np.int32)
    train, test = rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :: 10]

    def model():
        return module.build_model(_CONTEXT, width=32, blocks=1)

    parts = ((each[:, :-1], each[:, 1:]) for each in (train, test))
    return Task(32, 8, 1024, *parts, model, keras.optimizers.AdamW)


def emulated_seconds(rows: np.ndarray) -> np.ndarray:
    """Returns the emulated time that each replica computes."""
    return FLAGS.row_ms / 1000 * rows


class EmulatedTimes(tfdist.callbacks.AdaptiveBatch):
    """An `AdaptiveBatch` that sees the emulated times, as reports of several workers have them."""

    def _take(self, report):
        seconds = emulated_seconds(report.rows).astype(np.float32)
        cycle = FLAGS.exchange_ms / 1000 + float(seconds.max())
        workers = (None,) * len(report.rows)
        super()._take(
            dataclasses.replace(report, compute_seconds=seconds, cycle_seconds=cycle, links=workers, has_traced=False)
        )


class Progress(keras.callbacks.Callback):
    """Counts the emulated time, and ends a `fit` at the target, or when the replicas change."""

    def __init__(self, seconds: float, until: float, test):
        super().__init__()
        self.seconds, self.steps, self.sizes, self.loss = seconds, 0, [], np.inf
        self._until, self._test = until, test
        self._mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def take(self, report):
        """Adds the emulated time of a step."""
        self.seconds += FLAGS.exchange_ms / 1000 + float(emulated_seconds(report.rows).max())
        self.sizes.append(int(report.rows.sum()))

    def on_train_batch_end(self, batch, logs=None):
        """Tests the model now and then, and ends the `fit` if it is time."""
        self.steps += 1
        if self.steps % _STEPS_BETWEEN_TESTS == 0:
            x, y = self._test
            self.loss = float(self._mean(y, self.model(x)))
        self.model.stop_training = self.loss <= FLAGS.target or self.seconds >= self._until or np.isnan(self.loss)


def run(task: Task, size: str, rule: str, seed: int) -> dict:
    """Trains until the target; returns a row of the results."""
    keras.utils.set_random_seed(seed)
    is_adaptive = size == _ADAPTIVE
    first = task.base if is_adaptive else int(size)
    rate = FLAGS.rate if is_adaptive else FLAGS.rate * learning_rate_scale(rule, first, task.base, np.inf)
    row = {"size": size, "rule": rule, "seed": seed, "seconds": None, "steps": 0, "mean_sizes": []}
    seconds, kept = 0.0, None
    for phase, replicas in enumerate(_REPLICAS):
        strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        with strategy.scope():
            model = task.model()
            model.compile(task.optimizer(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        sizes = (task.smallest, task.largest) if is_adaptive else None
        sharding = tfdist.data.BalancedSharding(task.train, first, seed, policy="equal", batch_size_range=sizes)
        adaptive = EmulatedTimes(sharding, 20, learning_rate=rule) if is_adaptive else None
        is_last = phase >= len(_REPLICAS) - 1
        until = FLAGS.largest_seconds if is_last else (phase + 1) * FLAGS.phase_seconds
        progress = Progress(seconds, until, task.test)
        restore = _Restore(kept, sharding, adaptive)
        strategy.reports.listeners.append(progress.take)
        callbacks = [*([adaptive] if adaptive else []), restore, progress]
        dataset = strategy.distribute_datasets_from_function(sharding)
        model.fit(dataset, epochs=10**6, verbose=0, callbacks=callbacks)
        seconds, kept = progress.seconds, restore.state()
        row["steps"] += progress.steps
        row["mean_sizes"].append(round(float(np.mean(progress.sizes))))
        keras.backend.clear_session()
        if progress.loss <= FLAGS.target:
            return {**row, "seconds": round(seconds, 1)}
    return row


class _Restore(keras.callbacks.Callback):
    """Carries over the state of a run when the number of replicas changes, as `BackupAndRestore` does."""

    def __init__(self, kept, sharding, adaptive):
        super().__init__()
        self._kept, self._sharding, self._adaptive = kept, sharding, adaptive

    def on_train_begin(self, logs=None):
        if self._kept is not None:
            weights, optimizer, position, state = self._kept
            self.model.set_weights(weights)
            self.model.optimizer.build(self.model.trainable_variables)
            for variable, value in zip(self.model.optimizer.variables, optimizer, strict=True):
                variable.assign(value)
            self._sharding.deserialize(position)
            if self._adaptive is not None:
                self._adaptive.set_state(state)

    def state(self):
        optimizer = [keras.ops.convert_to_numpy(variable) for variable in self.model.optimizer.variables]
        state = None if self._adaptive is None else self._adaptive.get_state()
        return self.model.get_weights(), optimizer, self._sharding.serialize(), state


def main(_) -> None:
    tfdist.testing.virtual_devices(max(_REPLICAS))
    path = pathlib.Path(FLAGS.json) if FLAGS.json else None
    names = ("model", "rate", "exchange_ms", "row_ms", "target", "phase_seconds", "largest_seconds")
    task = {"char_lm": char_lm, "digits": digits}[FLAGS.model]()
    settings = {name: FLAGS[name].value for name in names} | {"base": task.base, "replicas": _REPLICAS}
    record = Record(path, settings, ("size", "rule", "seed"))
    runs = [(_ADAPTIVE, rule) for rule in FLAGS.adaptive_rules]
    runs += [each for each in itertools.product(FLAGS.sizes, FLAGS.fixed_rules) if each != (str(task.base), "linear")]
    for seed, (size, rule) in itertools.product(map(int, FLAGS.seeds), runs):
        if not record.has(size, rule, seed):
            row = run(task, size, rule, seed)
            print(row, flush=True)
            record.add(row)


if __name__ == "__main__":
    app.run(main)
