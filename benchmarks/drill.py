"""Kills random workers at random moments of one run, and compares what came out with the unbroken run, to the bit.

    python -m benchmarks.drill                          # 2 workers, 20 kills: about 8 minutes on 2 cores
    python -m benchmarks.drill --workers 4
    python -m benchmarks.drill --signals KILL,STOP      # killed and frozen in turn

Both runs train the same network, with BatchNormalization and dropout, on a `BalancedSharding` of fixed weights under
`compression="int8"`, with EarlyStopping and ReduceLROnPlateau, and save every few steps. One is left alone. In the
other a worker, also the chief, is sent a signal: mostly some time after the attempt has taken its first step, so during
steps and saves, but every fourth time while it still starts. Nobody lends a hand: `tfdist run` brings it to its end.
Weights, optimizer and history must be the same bits. Exits with 1 if they are not, or if the run failed.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "Workers.", 1)
flags.DEFINE_integer("kills", 20, "Signals sent, at most: fewer if the training ends before.", 1)
flags.DEFINE_list("signals", ["KILL"], "What is sent in turn: KILL, STOP.")
flags.DEFINE_integer("epochs", 60, "Epochs of 32 steps.", 1)
flags.DEFINE_string("save_freq", "7", "Steps between saves, or epoch.")
flags.DEFINE_integer("seed", 0, "Of the moments and victims.")

_DEADLINE_SECONDS = 3600.0
_ROWS, _BATCH, _FEATURES = 1000, 32, 64
_STEP_SECONDS = 0.03  # Besides the computation, so that a run lasts.
_OUT = "TFDIST_DRILL_OUT"


def main(_) -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-drill-"))
    unbroken, broken = folder / "unbroken", folder / "broken"
    try:
        began = time.monotonic()
        with started(unbroken):
            pass
        print(f"unbroken: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        with started(broken) as job:
            sent = disturb(job, broken)
        seconds = time.monotonic() - began
        differing = differences(unbroken, broken)
        print(f"{sent} signals to {FLAGS.workers} workers: done in {seconds:.0f} s, ", end="")
        print("equal to the bit" if not differing else f"unlike: {', '.join(differing)}")
        sys.exit(bool(differing))
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def started(out: pathlib.Path) -> Iterator[subprocess.Popen]:
    """A run whose workers leave everything in `out`; waits for its end, which must be a good one."""
    out.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    env |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", _OUT: str(out)}
    script = [str(pathlib.Path(__file__).resolve()), str(FLAGS.epochs), FLAGS.save_freq]
    command = ["run", "--workers", str(FLAGS.workers), "--max-restarts", "20", "--log-dir", str(out / "logs"), *script]
    with (out / "output").open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "tfdist.launch.cli", *command], env=env, stdout=output, stderr=output
        )
    try:
        yield job
        job.wait(_DEADLINE_SECONDS)
    finally:
        job.terminate()
        job.wait()
    if job.returncode:
        sys.exit(f"The run ended with {job.returncode}:\n{(out / 'output').read_text()[-5000:]}")


def disturb(job: subprocess.Popen, out: pathlib.Path) -> int:
    """Sends the signals; how many were sent."""
    rng = random.Random(FLAGS.seed)
    began = time.monotonic()
    seen: set[int] = set()
    for number in range(FLAGS.kills):
        pids = {}
        while len(pids) < FLAGS.workers or seen & set(pids.values()):
            if job.poll() is not None or time.monotonic() - began > _DEADLINE_SECONDS:
                return number
            time.sleep(0.05)
            pids = {int(path.suffix[1:]): int(path.read_text()) for path in out.glob("pid.*")}
        starting = number % 4 == 3
        while not starting and not (out / f"trains.{pids[0]}").exists() and job.poll() is None:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 6))
        victim = rng.choice(sorted(pids))
        name = FLAGS.signals[number % len(FLAGS.signals)]
        step = (out / "step").read_text() if (out / "step").exists() else "0"
        try:
            os.kill(pids[victim], getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return number
        seen |= set(pids.values())
        when = "while it starts" if starting else "in training"
        print(f"{time.monotonic() - began:6.1f} s: SIG{name} to worker {victim} {when}, about step {step}", flush=True)
    return FLAGS.kills


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    """What is not the same in both, to the bit."""
    arrays = [np.load(each / "weights.npz") for each in (one, other)]
    names = [name for name in arrays[0].files if not np.array_equal(*(array[name] for array in arrays))]
    histories = [json.loads((each / "history.json").read_text()) for each in (one, other)]
    return names + ["history"] * (histories[0] != histories[1])


# From here: run in the workers.


def train(out: pathlib.Path, epochs: int, save_freq: str) -> None:
    import keras

    import tfdist

    class Diary(keras.callbacks.Callback):
        """Tells how far the training is."""

        def on_train_batch_end(self, batch, logs=None):
            if tfdist.cluster.is_chief():
                (out / "step").write_text(str(int(self.model.optimizer.iterations.numpy())))
                (out / f"trains.{os.getpid()}").touch()
            time.sleep(_STEP_SECONDS)

    strategy = tfdist.MultiWorkerMirroredStrategy(compression=tfdist.compression.Int8(min_elements=256))
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_ROWS, _FEATURES)).astype("float32")
    y = (x @ rng.normal(size=(_FEATURES, 5))).argmax(1)
    with strategy.scope():
        hidden = [
            keras.layers.Dense(100, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
        ]
        model = keras.Sequential([keras.Input((_FEATURES,)), *hidden, keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    weights = list(range(1, strategy.num_replicas_in_sync + 1))
    sharding = tfdist.data.BalancedSharding((x, y), _BATCH, seed=3, policy=weights)
    history = model.fit(
        strategy.distribute_datasets_from_function(sharding),
        epochs=epochs,
        verbose=0,
        callbacks=[
            Diary(),
            keras.callbacks.EarlyStopping(monitor="loss", patience=epochs),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=2),
            tfdist.callbacks.BackupAndRestore(
                out / "backup", save_freq=save_freq if save_freq == "epoch" else int(save_freq), delete_checkpoint=False
            ),
        ],
    )
    if tfdist.cluster.is_chief():
        variables = {variable.path: variable.numpy() for variable in [*model.variables, *model.optimizer.variables]}
        np.savez(out / "weights.npz", **variables)
        (out / "history.json").write_text(json.dumps(history.history))


if __name__ == "__main__":
    if _OUT in os.environ:
        folder = pathlib.Path(os.environ[_OUT])
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        (folder / f".pid.{index}").write_text(str(os.getpid()))
        (folder / f".pid.{index}").rename(folder / f"pid.{index}")
        train(folder, int(sys.argv[1]), sys.argv[2])
    else:
        app.run(main)
