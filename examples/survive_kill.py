"""Kills a worker during training, and shows that the final weights equal those of an undisturbed run.

2 workers on this machine, one of which kills itself (a minute on 2 cores):
    tfdist run --workers 2 examples/survive_kill.py

To kill workers by hand, give --kill_step -1 and `kill -9` a process while it trains, as often as you like.
"""

import os
import pathlib
import signal

import keras
import numpy as np
from absl import app, flags
from common import is_chief, make_strategy

import tfdist

BATCH_SIZE = 64

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 3, "Passes over the training data.", 1)
flags.DEFINE_integer("kill_step", 40, "The step in which the last worker kills itself, once; -1: never.")
flags.DEFINE_integer("save_steps", 10, "Steps between two saves; a failure repeats at most so many steps.", 1)
flags.DEFINE_string("data_dir", None, "Folder of the dataset. By default ~/tensorflow_datasets.")
flags.DEFINE_string("backup_dir", None, "Folder of backups, on a shared disk. By default the folder of the run.")


class KillOnce(keras.callbacks.Callback):
    """Kills this process at a step, if it is the last worker, in the first attempt only."""

    def __init__(self, last: bool):
        super().__init__()
        self._armed = last and os.environ.get("TFDIST_ATTEMPT") == "0"
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        """Counts steps, and kills the process at `--kill_step`."""
        self._steps += 1
        if self._armed and self._steps == FLAGS.kill_step:
            print(f"step {self._steps}: kill -9 {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy, digits, labels, callbacks=(), verbose=0) -> list[np.ndarray]:
    """Trains a model and returns its weights, which depend on the seeds only."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input(digits.shape[1:]), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    # Equal shares, since the assignment of rows to workers changes the rounding of sums.
    rows = tfdist.data.BalancedSharding((digits, labels), global_batch_size=BATCH_SIZE, seed=0, policy="equal")
    model.fit(
        strategy.distribute_datasets_from_function(rows),
        epochs=FLAGS.epochs,
        callbacks=list(callbacks),
        verbose=verbose,
    )
    return model.get_weights()


def make_digits() -> tuple[np.ndarray, np.ndarray]:
    train = tfdist.data.load("digits", "train", FLAGS.data_dir)
    digits, labels = zip(*train.as_numpy_iterator(), strict=True)
    return np.stack(digits).reshape(len(digits), -1).astype("float32") / 255, np.array(labels)


def main(_) -> None:
    strategy = make_strategy()
    chief = is_chief(strategy)
    spec = tfdist.cluster.ClusterSpec.from_env()
    digits, labels = make_digits()
    steps = FLAGS.epochs * -(-len(labels) // BATCH_SIZE)
    if FLAGS.kill_step != -1 and ("TFDIST_ATTEMPT" not in os.environ or not 1 <= FLAGS.kill_step <= steps):
        raise app.UsageError(
            f"No worker would be killed: that needs `tfdist run` and a --kill_step of at most {steps} steps, got "
            f"{FLAGS.kill_step}. Give a smaller one or more --epochs, or --kill_step -1 for no kill."
        )
    backup_dir = FLAGS.backup_dir or pathlib.Path(os.environ.get("TFDIST_RUN_DIR", "."), "backup")
    callbacks = [
        tfdist.callbacks.BackupAndRestore(backup_dir, save_freq=FLAGS.save_steps),
        KillOnce(last=spec is not None and spec.worker_id == spec.num_workers - 1),
    ]
    weights = train(strategy, digits, labels, callbacks, verbose=2 if chief else 0)
    unbroken = train(strategy, digits, labels)
    equal = all(np.array_equal(mine, other) for mine, other in zip(weights, unbroken, strict=True))
    if chief:
        restarts = os.environ.get("TFDIST_ATTEMPT", "0")
        print(f"restarts: {restarts}; weights equal an unbroken run's, bit for bit: {equal}", flush=True)
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
