"""Kills random workers at random moments of a run, and compares the results with those of an undisturbed run.

    python -m benchmarks.drill                          # 2 workers, 20 kills: about 8 minutes on 2 cores
    python -m benchmarks.drill --workers 4
    python -m benchmarks.drill --signals KILL,STOP      # killed and frozen in turn
    python -m benchmarks.drill --signals CUT --kills 3  # workers on separate hosts, which lose their link (as root)
    python -m benchmarks.drill --workers 4 --shrink     # one stays away for a while: 4 workers, then 3, then 4

Both runs train the same network, with BatchNormalization and dropout, on a `BalancedSharding` of fixed weights. They
use `compression="int8"`, EarlyStopping and ReduceLROnPlateau, and save every few steps. One run is not disturbed. In
the other run the drill sends signals to random workers, including the chief. Most signals come some time after the
first step of an attempt, during steps and saves; every fourth comes while the attempt still starts. With CUT the link
of the worker's host is taken down for some seconds instead. `tfdist run` must finish the run without help. Weights,
optimizer and history must have the same bits in both runs. `tfdist report` must account for 98 % of the time, and for
the lost steps. The exit code is 1 if any of these differs or the run failed.

With `--shrink` the last worker is killed, cannot start again, and comes back later. This run leaves out everything that
depends on the number of workers (codec, BatchNormalization, dropout), and results must be equal to a relative 1e-4. An
example that was trained on twice or left out would make a larger difference.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
from absl import app, flags

from benchmarks.netlab import Host, Netlab
from tfdist.report.goodput import REST, UNRECORDED
from tfdist.report.goodput_table import account_of, lines_of_account
from tfdist.report.recorded_run import read_run
from tfdist.run_files import ATTEMPT

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "Number of workers.", 1)
flags.DEFINE_integer("kills", 20, "Largest number of signals; fewer are sent if the training ends before.", 1)
flags.DEFINE_list("signals", ["KILL"], "Signals to send in turn: KILL, STOP; or CUT alone.")
flags.register_validator(
    "signals", lambda names: names and set(names) <= {"KILL", "STOP", "CUT"}, "must be KILL and STOP, or CUT"
)
flags.DEFINE_integer("epochs", 60, "Epochs of 32 steps.", 1)
flags.DEFINE_string("save_freq", "7", "Steps between saves, or epoch.")
flags.DEFINE_bool("shrink", False, "Instead of sending signals, remove the last worker for a while.")
flags.DEFINE_integer("seed", 0, "Seed of the random moments and workers.")

_DEADLINE_SECONDS = 3600.0
_ROWS, _BATCH, _FEATURES = 1000, 32, 64
_STEP_SECONDS = 0.03  # Added to each step, so that a run takes long enough.
_CUT_SECONDS = 20.0  # Longer than it takes to declare a silent worker dead.
_LAUNCHER_SECONDS = 3.0  # In which `tfdist run` itself starts and ends.
_PORT = 2222
_REGROW_SECONDS = 15
_OUT = "TFDIST_DRILL_OUT"


def main(_) -> None:
    cuts = FLAGS.signals == ["CUT"]
    if "CUT" in FLAGS.signals and (not cuts or FLAGS.shrink):
        sys.exit("CUT cannot be combined with other --signals or --shrink, since it runs each worker on its own host.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that it ends its jobs
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-drill-"))
    unbroken, broken = folder / "unbroken", folder / "broken"
    try:
        with Netlab(FLAGS.workers, None) if cuts else contextlib.nullcontext() as lab:
            hosts = lab.hosts if lab else []
            began = time.monotonic()
            with started(unbroken, hosts):
                pass
            print(f"unbroken: {time.monotonic() - began:.0f} s", flush=True)
            began = time.monotonic()
            with started(broken, hosts) as jobs:
                sent = disturb(jobs, broken, hosts)
            seconds = time.monotonic() - began
        tolerance = 1e-4 if FLAGS.shrink else 0
        differing = differences(unbroken, broken, tolerance)
        print(f"{sent} x {', '.join(FLAGS.signals)} to {FLAGS.workers} workers: done in {seconds:.0f} s, ", end="")
        print(f"different: {', '.join(differing)}" if differing else f"equal to {tolerance or 'the bit'}")
        sizes = sizes_of_attempts(broken)
        print(f"workers of the attempts: {sizes}")
        if not hosts:
            differing += problems_of_account(broken, seconds)
        came_back = sizes[-1] == FLAGS.workers and FLAGS.workers - 1 in sizes
        if len(sizes) == 1 or (FLAGS.shrink and not came_back):
            differing.append("attempts")
            print("The drill had no effect: no attempt failed, or the removed worker did not come back.")
        sys.exit(bool(differing))
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def started(out: pathlib.Path, hosts: Sequence[Host]) -> Iterator[list[subprocess.Popen]]:
    """Starts a run that writes its results to `out`. At the end of the block, waits until it has succeeded."""
    out.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    env |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", _OUT: str(out)}
    jobs = []
    try:
        with (out / "output").open("wb") as output:
            for command, extra in commands(out, hosts):
                jobs.append(subprocess.Popen(command, env=env | extra, stdout=output, stderr=output))
        yield jobs
        for job in jobs:
            job.wait(_DEADLINE_SECONDS)
    finally:
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.wait()
    if any(job.returncode for job in jobs):
        codes = [job.returncode for job in jobs]
        sys.exit(f"The run ended with {codes}:\n{(out / 'output').read_text()[-5000:]}")


def commands(out: pathlib.Path, hosts: Sequence[Host]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The commands to start, with their environments: one for all workers on this machine, or one per host."""
    launch = [sys.executable, "-m", "tfdist.launch.cli", "run", "--max-restarts", "20", "--log-dir", str(out / "logs")]
    if FLAGS.shrink:
        launch += ["--min-workers", str(FLAGS.workers - 1), "--regrow-seconds", str(_REGROW_SECONDS)]
    script = ["-m", "benchmarks.drill", str(FLAGS.epochs), FLAGS.save_freq, str(FLAGS.workers if FLAGS.shrink else 0)]
    if not hosts:
        yield [*launch, "--workers", str(FLAGS.workers), *script], {}
    cluster = {"worker": [f"{host.address}:{_PORT}" for host in hosts]}
    for index, host in enumerate(hosts):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        yield host.command([*launch, *script]), {"TF_CONFIG": json.dumps(config)}


def disturb(jobs: Sequence[subprocess.Popen], out: pathlib.Path, hosts: Sequence[Host]) -> int:
    """Sends the signals, and returns their number."""
    rng = random.Random(FLAGS.seed)
    began = time.monotonic()
    seen: set[int] = set()

    def is_over() -> bool:
        return all(job.poll() is not None for job in jobs) or time.monotonic() - began > _DEADLINE_SECONDS

    for number in range(1 if FLAGS.shrink else FLAGS.kills):
        pids: dict[int, int] = {}
        while len(pids) < FLAGS.workers or seen & set(pids.values()):
            if is_over():
                return number
            time.sleep(0.05)
            pids = {int(path.suffix[1:]): int(path.read_text()) for path in out.glob("pid.*")}
        starting = number % 4 == 3
        while not starting and not (out / f"trains.{pids[0]}").exists() and not is_over():
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 6))
        victim = max(pids) if FLAGS.shrink else rng.choice(sorted(pids))
        name = FLAGS.signals[number % len(FLAGS.signals)]
        step = (out / "step").read_text() if (out / "step").exists() else "0"
        when = f"{time.monotonic() - began:6.1f} s"
        if is_over():
            return number
        try:
            if hosts:
                cut(hosts[victim])
            else:
                os.kill(pids[victim], getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return number
        seen |= set(pids.values())
        moment = "while it starts" if starting else "in training"
        print(f"{when}: {name} to worker {victim} {moment}, about step {step}", flush=True)
    return number + 1


def cut(host: Host) -> None:
    """Takes the link of a host down for a while."""
    for state in ("down", "up"):
        subprocess.run(["ip", "-n", host.name, "link", "set", host.interface, state], check=True)
        time.sleep(_CUT_SECONDS if state == "down" else 0)


def differences(one: pathlib.Path, other: pathlib.Path, tolerance: float) -> list[str]:
    """Names of the arrays that differ between two runs by more than `tolerance` relative to their largest number."""
    first, second = dict(named_results(one)), dict(named_results(other))
    unlike = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        expected, found = first[name], second[name]
        if not tolerance:
            same = expected.tobytes() == found.tobytes()
        else:
            scale = np.max(np.abs(expected), initial=0)
            same = expected.shape == found.shape and np.all(np.abs(found - expected) <= tolerance * scale)  # no NaN
        if not same:
            unlike.append(name)
    return unlike


def named_results(out: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    arrays = np.load(out / "weights.npz")
    yield from arrays.items()
    for name, values in json.loads((out / "history.json").read_text()).items():
        yield f"history of {name}", np.asarray(values)


def problems_of_account(out: pathlib.Path, seconds: float) -> list[str]:
    """Prints what the time was spent on, and compares it with the clock, with the commits and with the steps made.

    Returns:
      What differs: "time" or "lost work".
    """
    account = account_of(read_run(out / "logs"))
    assert account is not None
    print("\n".join(lines_of_account(account)))
    problems = []
    rest = abs(account.parts.get(REST, 0.0)) + account.parts.get(UNRECORDED, 0.0)
    named = sum(account.parts.values()) - account.parts.get(REST, 0.0)
    if not (seconds - named) <= 0.02 * seconds + _LAUNCHER_SECONDS or named > 1.02 * seconds or rest > 0.02 * seconds:
        problems.append("time")
        print(f"The parts sum to {named:.1f} s, of which {rest:.1f} s are unknown, in a run of {seconds:.1f} s.")
    lost, expected = {each.attempt: each.steps for each in account.lost}, lost_steps(out)
    # A worker may have been killed after a step, and before its diary had it.
    if any(not 0 <= lost.get(number, 0) - expected.get(number, 0) <= 1 for number in lost.keys() | expected.keys()):
        problems.append("lost work")
        print(f"Lost steps by attempt are {lost}, but by the restored commits and the diaries {expected}.")
    return problems


def lost_steps(out: pathlib.Path) -> dict[int, int]:
    """For each attempt with a later one that trained, its last step minus that of the commit from which this began."""
    last: dict[int, int] = {}
    for path in out.glob("last-step.*"):
        number = int(path.suffixes[0][1:])
        last[number] = max(last.get(number, 0), int(path.read_text()))
    restored = {}
    for path in (out / "logs").glob("attempt-*/worker-0.log"):
        told = re.search(r"Restored \S*step-(\d+)", path.read_text(errors="replace"))
        restored[int(path.parent.name.partition("-")[2])] = int(told[1]) if told else 0
    began = {number: step for number, step in restored.items() if number in last}  # The others never trained.
    return {
        number: steps - began[min(later)]
        for number, steps in last.items()
        if (later := [n for n in began if n > number])
    }


def sizes_of_attempts(out: pathlib.Path) -> list[int]:
    """The number of workers of each attempt."""
    numbers = [int(path.parent.name.partition("-")[2]) for path in (out / "logs").rglob("attempt-*/worker-*.log")]
    return [count for _, count in sorted(collections.Counter(numbers).items())]


# The code below runs in the workers.


def train(out: pathlib.Path, epochs: int, save_freq: str, by_worker: bool) -> None:
    import keras

    import tfdist

    class Diary(keras.callbacks.Callback):
        """Writes the progress of the training to files."""

        def on_train_batch_end(self, batch, logs=None):
            if tfdist.cluster.is_chief():
                (out / "step").write_text(str(int(self.model.optimizer.iterations.numpy())))
                (out / f"trains.{os.getpid()}").touch()
            index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
            path = out / f"last-step.{os.environ[ATTEMPT]}.{index}"
            path.with_name(f".{path.name}").write_text(str(int(self.model.optimizer.iterations.numpy())))
            path.with_name(f".{path.name}").replace(path)
            time.sleep(_STEP_SECONDS)

    compression = tfdist.compression.Int8(min_elements=256) if by_worker else None
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=compression)
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_ROWS, _FEATURES)).astype("float32")
    y = (x @ rng.normal(size=(_FEATURES, 5))).argmax(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(100, activation="relu")]
        if by_worker:
            hidden += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
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


def work(epochs: str, save_freq: str, shrinks_from: str) -> None:
    out = pathlib.Path(os.environ[_OUT])
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if os.environ[ATTEMPT] == "1" and index == int(shrinks_from) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (out / f".pid.{index}").write_text(str(os.getpid()))
    (out / f".pid.{index}").rename(out / f"pid.{index}")
    train(out, int(epochs), save_freq, by_worker=shrinks_from == "0")


if __name__ == "__main__":
    if _OUT in os.environ:
        work(*sys.argv[1:])
    else:
        app.run(main)
