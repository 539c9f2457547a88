"""Kills workers of a job that goes on without them, at random moments, and compares the loss with an unbroken run.

    python -m benchmarks.lost_workers                              # unbroken, then with 20 kills: about six minutes
    python -m benchmarks.lost_workers --nounbroken                 # the second run alone: about five minutes
    python -m benchmarks.lost_workers --kills 5 --epochs 3
    python -m benchmarks.lost_workers --slow --epochs 3            # worker 3 is slow: without and with equal_time

Four workers on this machine train an MLP on noisy labels by `DiLoCo(every=20, tolerate_lost_workers=True)`. Any worker
but worker 0 is killed by SIGKILL, also while it starts. `tfdist run` starts it again.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdist

FLAGS = flags.FLAGS
flags.DEFINE_integer("kills", 20, "Number of kills in the second run.", 0)
flags.DEFINE_integer("epochs", 6, "Epochs of 250 steps.", 1)
flags.DEFINE_bool("unbroken", True, "Whether to run without kills first.")
flags.DEFINE_float("pause", 0.15, "Seconds by which a step is longer in the second run, so that workers can return.")
flags.DEFINE_list("apart", ["6", "14"], "Shortest and longest time between two kills, in seconds.")
flags.DEFINE_bool("slow", False, "Whether to compare runs without and with equal_time, in place of kills.")
flags.DEFINE_integer("seed", 1, "Seed of the moments and victims.")

_PIDS, _EPOCHS, _PAUSE, _EQUAL = (f"LOST_WORKERS_{name}" for name in ("PIDS", "EPOCHS", "PAUSE", "EQUAL"))
_STEP_SECONDS, _SLOW_FACTOR = 0.02, 3
_RESULT, _DEADLINE_SECONDS = "RESULT ", 900
_ROWS, _HELD_OUT, _FEATURES, _CLASSES = 32_000, 8_000, 64, 10


class SlowModel(keras.Sequential):
    """A model whose step takes longer, as on a slow processor."""

    seconds = 0.0

    def train_step(self, data):
        """Waits, then trains."""
        waited = tf.numpy_function(lambda: time.sleep(self.seconds) or np.float32(0), [], tf.float32)
        with tf.control_dependencies([waited]):
            return super().train_step(data)


def train() -> None:
    """Trains on one worker. Worker 0 prints the losses and the counts of rows."""
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    (pathlib.Path(os.environ[_PIDS]) / str(worker)).write_text(str(os.getpid()))
    outer = keras.optimizers.SGD(0.7, momentum=0.5, nesterov=True)
    equal = os.environ[_EQUAL]
    synchronization = tfdist.DiLoCo(
        every=20, outer_optimizer=outer, tolerate_lost_workers=True, equal_time=equal == "yes"
    )
    strategy = tfdist.MultiWorkerMirroredStrategy(synchronization=synchronization)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = SlowModel(
            [keras.Input((_FEATURES,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(_CLASSES)]
        )
        model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.seconds = float(os.environ[_PAUSE])
    if equal:
        model.seconds += _STEP_SECONDS * (_SLOW_FACTOR if worker == 3 else 1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_ROWS + _HELD_OUT, _FEATURES)).astype("float32")
    y = (x @ rng.normal(size=(_FEATURES, _CLASSES)) + 6 * rng.gumbel(size=(len(x), _CLASSES))).argmax(1)
    sharding = tfdist.data.BalancedSharding((x[:_ROWS], y[:_ROWS]), global_batch_size=128, seed=0)
    data = strategy.distribute_datasets_from_function(sharding)
    epochs, began = int(os.environ[_EPOCHS]), time.monotonic()
    history = model.fit(data, epochs=epochs, verbose=0).history
    seconds = (time.monotonic() - began) / epochs
    if worker == 0:
        held_out = model.evaluate(x[_ROWS:], y[_ROWS:], batch_size=2000, verbose=0)
        report = strategy.row_report()
        losses = f"loss {history['loss'][-1]:.4f}, on other rows {held_out:.4f}"
        print(f"{_RESULT}{seconds:.1f} s an epoch; {losses}; {report.describe()}", flush=True)


def run(kills: int, pause: float, equal: str = "") -> str:
    """Runs the job and kills workers. Returns the line that worker 0 prints at the end.

    With `equal` "yes" or "no" worker 3 is slow, with or without equal_time.

    Raises:
      RuntimeError: If the job fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids, log = pathlib.Path(folder) / "pids", pathlib.Path(folder) / "output"
        pids.mkdir()
        environ = {**os.environ, _PIDS: str(pids), _EPOCHS: str(FLAGS.epochs), _PAUSE: str(pause), _EQUAL: equal}
        command = ["-m", "tfdist", "run", "--workers", "4", "--log-dir", f"{folder}/logs", __file__]
        with log.open("w") as output:
            job = subprocess.Popen([sys.executable, *command], env=environ, stdout=output, stderr=subprocess.STDOUT)
            killed = _kill(job, pids, kills)
        text = log.read_text()
        if job.returncode or _RESULT not in text:
            raise RuntimeError(f"The job must end with exit code 0, but ended with {job.returncode}:\n{text}")
        return f"{f'equal_time {equal}' if equal else f'{killed} kills'}: {text.split(_RESULT, 1)[1].splitlines()[0]}"


def _kill(job: subprocess.Popen, pids: pathlib.Path, kills: int) -> int:
    """Kills workers at random moments until the job has ended, and returns how many."""
    choice, killed, deadline = random.Random(FLAGS.seed), 0, time.monotonic() + _DEADLINE_SECONDS
    shortest, longest = map(float, FLAGS.apart)
    while len(list(pids.iterdir())) < 4 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    while job.poll() is None and time.monotonic() < deadline:
        if killed == kills:
            time.sleep(0.1)
            continue
        time.sleep(choice.uniform(shortest, longest))
        victim = int((pids / str(choice.randint(1, 3))).read_text() or 0)
        alive = pathlib.Path(f"/proc/{victim}/environ")
        if victim and alive.exists() and str(pids) in alive.read_text():
            os.kill(victim, signal.SIGKILL)
            killed += 1
    if job.poll() is None:
        job.terminate()
    job.wait()
    return killed


def main(_) -> None:
    if FLAGS.slow:
        for equal in ("no", "yes"):
            print(run(0, 0.0, equal), flush=True)
        return
    if FLAGS.unbroken:
        print(run(0, 0.0), flush=True)
    if FLAGS.kills:
        print(run(FLAGS.kills, FLAGS.pause), flush=True)


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        train()
    else:
        app.run(main)
