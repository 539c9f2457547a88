"""Measures the time to a target loss with an adaptive batch size and with fixed ones, while the workers change.

    python -m benchmarks.adaptive_batch --rate 0.5 --phase_seconds 6        # digits, seed 0: 3 minutes
    python -m benchmarks.adaptive_batch --seeds 0,1,2 --json benchmarks/results/adaptive_batch.json

Trains a small network on digits by SGD with 2 replicas, then 4, then 3, on virtual devices of one machine. The time is
emulated: a step takes `--exchange_ms`, and `--row_ms` for each row of the replica with most rows. So results do not
depend on the machine. A change of replicas makes a new strategy, and carries over what a backup has.

Fixed sizes have the learning rate of the first size, scaled by the square root rule and by the linear rule.
"""

import dataclasses
import itertools
import pathlib

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits

import tfdist
from benchmarks.record import Record
from tfdist.adaptive.learning_rate_rules import learning_rate_scale

FLAGS = flags.FLAGS
flags.DEFINE_list("seeds", ["0"], "Seeds of weights and order.")
flags.DEFINE_list("sizes", ["32", "64", "128", "256", "512"], "Fixed global batch sizes.")
flags.DEFINE_float("exchange_ms", 100.0, "Emulated time of a step without rows.", 0)
flags.DEFINE_float("row_ms", 0.5, "Emulated time of a row.", 0)
flags.DEFINE_float("rate", 0.1, "Learning rate for batches of 64.", 0)
flags.DEFINE_float("target", 0.2, "Test loss to reach.", 0)
flags.DEFINE_float("phase_seconds", 15.0, "Emulated time after which the number of replicas changes.", 0)
flags.DEFINE_string("json", None, "A file for the results.")

_BASE, _RANGE = 64, (16, 1024)
_REPLICAS = (2, 4, 3)
_ADAPTIVE = "adaptive"
_LARGEST_FACTOR = 40  # Of `--phase_seconds`, after which a run ends without the target.
_STEPS_BETWEEN_TESTS = 10


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
        self.model.stop_training = self.loss <= FLAGS.target or self.seconds >= self._until


def run(size: str, rule: str, seed: int) -> dict:
    """Trains until the target; returns a row of the results."""
    keras.utils.set_random_seed(seed)
    data = load_digits()
    x, y = (data.data / 16).astype("float32"), data.target.astype("int32")
    in_test = np.arange(len(x)) % 5 == 0
    train, test = (x[~in_test], y[~in_test]), (x[in_test], y[in_test])
    is_adaptive = size == _ADAPTIVE
    first = _BASE if is_adaptive else int(size)
    rate = FLAGS.rate if is_adaptive else FLAGS.rate * learning_rate_scale(rule, first, _BASE, np.inf)
    seconds, kept, means = 0.0, None, []
    for phase in range(_LARGEST_FACTOR):
        replicas = _REPLICAS[min(phase, len(_REPLICAS) - 1)]
        strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        with strategy.scope():
            layers = [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
            model = keras.Sequential(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(rate), loss)
        sharding = tfdist.data.BalancedSharding(
            train, first, seed, policy="equal", batch_size_range=_RANGE if is_adaptive else None
        )
        adaptive = EmulatedTimes(sharding, 20) if is_adaptive else None
        progress = Progress(seconds, (phase + 1) * FLAGS.phase_seconds, test)
        restore = _Restore(kept, sharding, adaptive)
        strategy.reports.listeners.append(progress.take)
        callbacks = [*([adaptive] if adaptive else []), restore, progress]
        dataset = strategy.distribute_datasets_from_function(sharding)
        model.fit(dataset, epochs=10**6, verbose=0, callbacks=callbacks)
        seconds, kept = progress.seconds, restore.state()
        means.append(round(float(np.mean(progress.sizes))))
        keras.backend.clear_session()
        if progress.loss <= FLAGS.target:
            return {"size": size, "rule": rule, "seed": seed, "seconds": round(seconds, 1), "mean_sizes": means}
    return {"size": size, "rule": rule, "seed": seed, "seconds": None, "mean_sizes": means}


class _Restore(keras.callbacks.Callback):
    """Carries over the state of a run when the number of replicas changes, as `BackupAndRestore` does."""

    def __init__(self, kept, sharding, adaptive):
        super().__init__()
        self._kept, self._sharding, self._adaptive = kept, sharding, adaptive

    def on_train_begin(self, logs=None):
        if self._kept is not None:
            weights, rate, position, state = self._kept
            self.model.set_weights(weights)
            self.model.optimizer.learning_rate = rate
            self._sharding.deserialize(position)
            if self._adaptive is not None:
                self._adaptive.set_state(state)

    def state(self):
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        state = None if self._adaptive is None else self._adaptive.get_state()
        return self.model.get_weights(), rate, self._sharding.serialize(), state


def main(_) -> None:
    tfdist.testing.virtual_devices(max(_REPLICAS))
    path = pathlib.Path(FLAGS.json) if FLAGS.json else None
    names = ("rate", "exchange_ms", "row_ms", "target", "phase_seconds")
    settings = {name: FLAGS[name].value for name in names} | {"base": _BASE, "replicas": _REPLICAS}
    record = Record(path, settings, ("size", "rule", "seed"))
    fixed = list(itertools.product(FLAGS.sizes, ("sqrt", "linear")))
    for seed, (size, rule) in itertools.product(map(int, FLAGS.seeds), [(_ADAPTIVE, "adascale"), *fixed]):
        if size == str(_BASE) and rule == "linear":
            continue  # As by the other rule.
        if not record.has(size, rule, seed):
            row = run(size, rule, seed)
            print(row, flush=True)
            record.add(row)


if __name__ == "__main__":
    app.run(main)
