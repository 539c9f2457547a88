"""Measures recovery from `kill -9` of a worker to the next step, with `tfdist run` and with DDP under `torchrun`.

    python -m benchmarks.recovery                        # about 3 minutes on 2 cores
    python -m benchmarks.recovery --json recovery.json

Two workers train a dense network of 1 M parameters, and save every 10 steps. With tfdist this is done by
`tfdist.callbacks.BackupAndRestore`, with PyTorch by `torch.save` on rank 0 and `torch.load` on all ranks. Worker 1 is
killed in step 25. Each worker writes the times of its progress to files. A recovery consists of

- notice: until the first process of the next attempt runs;
- restart: until all workers have loaded their library and joined the cluster, possibly in a later attempt;
- restore: until all workers have built their model, restored it and completed a step.

Both systems start from a warm disk cache. `torchrun` has its default options, apart from `--max-restarts 3`.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import rich.console
import rich.table
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 3, "Recoveries of each system.", 1)
flags.DEFINE_list("systems", ["tfdist run", "torchrun"], "The systems to measure.")
flags.register_validator(
    "systems", lambda names: names and set(names) <= set(_LAUNCHERS), "must be `tfdist run` or `torchrun`"
)
flags.DEFINE_string("json", None, "A file for the results.")

WORKERS, STEPS, KILL_STEP, SAVE_STEPS = 2, 60, 25, 10
_FEATURES, _HIDDEN, _CLASSES, _ROWS = 256, 640, 10, 64
_STEP_SECONDS = 0.02  # added to each step, so that the kill hits the intended step
_DEADLINE_SECONDS = 180.0
PHASES = ("notice", "restart", "restore")
_EVENTS, _WORKER = "RECOVERY_EVENTS", "RECOVERY_WORKER"
_LAUNCHERS = {
    "tfdist run": ["-m", "tfdist.launch.cli", "run", "--workers", str(WORKERS)],
    "torchrun": [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
        "--max-restarts",
        "3",
    ],
}


def main(_) -> None:
    rows, systems = [], list(FLAGS.systems)
    if "torchrun" in systems and importlib.util.find_spec("torch") is None:
        print("torchrun is left out: PyTorch is not installed (pip install torch).", flush=True)
        systems.remove("torchrun")
    for _ in range(FLAGS.repeats):
        for system in systems:
            try:
                rows.append({"system": system, **measure(system)})
            except RuntimeError as error:  # The table is useful without this recovery.
                rows.append({"system": system, "error": str(error)})
            print(rows[-1].get("error", rows[-1]), flush=True)
    table = rich.table.Table(title="From a kill to the first step after: seconds, medians")
    for column in ("", *PHASES, "all", "restarts", "recovered"):
        table.add_column(column, justify="left" if not column else "right")
    for system in systems:
        own = [row for row in rows if row["system"] == system and "error" not in row]
        medians = [f"{statistics.median(row[phase] for row in own):.2f}" if own else "" for phase in (*PHASES, "all")]
        restarts = ", ".join(sorted({str(row["restarts"]) for row in own}))
        table.add_row(system, *medians, restarts, f"{len(own)} of {FLAGS.repeats}")
    rich.console.Console().print(table)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps(rows, indent=1) + "\n")
    if all("error" in row for row in rows):
        raise SystemExit("No job has recovered.")


def measure(system: str) -> dict[str, float]:
    """The seconds of each phase of one recovery.

    Raises:
      RuntimeError: If the job does not recover; the message holds its output.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="recovery-"))
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    env |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    env |= {_EVENTS: str(folder), _WORKER: system}
    command = [sys.executable, *_LAUNCHERS[system], str(pathlib.Path(__file__).resolve())]
    try:
        with (folder / "output").open("wb") as output:
            job = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + _DEADLINE_SECONDS
        try:
            victim = _wait(lambda: _events(folder, 0, f"step {KILL_STEP}").get(1), job, deadline)
            killed = time.time()
            os.kill(int(victim["pid"]), signal.SIGKILL)
            if _wait(lambda: [job.poll()] if job.poll() is not None else None, job, deadline) != [0]:
                raise RuntimeError("The job failed.")
        except RuntimeError as error:
            raise RuntimeError(f"{system}: {error}\n{(folder / 'output').read_text()[-5000:]}") from error
        finally:
            _end(job, folder)
        # A restart may itself fail and be followed by another.
        last = max(int(path.suffixes[0][1:]) for path in folder.glob("first-step.*"))
        began = min(each["time"] for each in _events(folder, 1, "began").values())
        joined = max(each["time"] for each in _events(folder, last, "joined").values())
        stepped = max(each["time"] for each in _events(folder, last, "first step").values())
        return {
            "notice": began - killed,
            "restart": joined - began,
            "restore": stepped - joined,
            "all": stepped - killed,
            "restarts": last,
        }
    finally:
        shutil.rmtree(folder)


def _wait(ask: Callable[[], object], job: subprocess.Popen, deadline: float):
    while not (answer := ask()):
        if job.poll() not in (None, 0) or time.monotonic() > deadline:
            raise RuntimeError(f"The job ended with {job.poll()}, or not within {_DEADLINE_SECONDS:g} s.")
        time.sleep(0.01)
    return answer


def _events(folder: pathlib.Path, attempt: int, name: str) -> dict[int, dict[str, float]]:
    """The records that the workers of an attempt wrote under `name`, by worker."""
    paths = folder.glob(f"{name.replace(' ', '-')}.{attempt}.*")
    return {int(path.suffix[1:]): json.loads(path.read_text()) for path in paths}


def _end(job: subprocess.Popen, folder: pathlib.Path) -> None:
    """Kills the job and all its workers, which may be in sessions of their own."""
    for path in folder.glob("began.*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # gone
            pid = json.loads(path.read_text())["pid"]
            if str(folder).encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


# The code below runs in the workers.


class Diary:
    """Writes the times of a worker's progress to files, each of them atomically."""

    def __init__(self, attempt: int, worker: int):
        self._folder = pathlib.Path(os.environ[_EVENTS])
        self._attempt, self._worker = attempt, worker
        self._has_stepped = False
        self.write("began")

    def write(self, name: str) -> None:
        """Records the time at which the worker reached `name`."""
        path = self._folder / f"{name.replace(' ', '-')}.{self._attempt}.{self._worker}"
        partial = path.with_name(f".{path.name}")
        partial.write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        partial.rename(path)

    def step(self, number: int) -> None:
        """Records the end of step `number`, counted from the beginning of training."""
        if not self._has_stepped:
            self._has_stepped = True
            self.write("first step")
        if number == KILL_STEP:
            self.write(f"step {number}")
        time.sleep(_STEP_SECONDS)


def train_with_tfdist(folder: pathlib.Path) -> None:
    diary = Diary(int(os.environ["TFDIST_ATTEMPT"]), json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    import keras
    import numpy as np

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    diary.write("joined")

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            diary.step(int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)))

    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(_HIDDEN, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((_FEATURES,)), *hidden, keras.layers.Dense(_CLASSES)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    rows = WORKERS * _ROWS * STEPS
    data = rng.normal(size=(rows, _FEATURES)).astype("float32"), rng.integers(_CLASSES, size=rows)
    sharding = tfdist.data.BalancedSharding(data, global_batch_size=WORKERS * _ROWS, seed=0)
    backup = tfdist.callbacks.BackupAndRestore(folder / "backup", save_freq=SAVE_STEPS)
    model.fit(strategy.distribute_datasets_from_function(sharding), callbacks=[backup, Steps()], verbose=0)


def train_with_torch(folder: pathlib.Path) -> None:
    rank = int(os.environ["RANK"])
    diary = Diary(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), rank)
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    diary.write("joined")
    torch.manual_seed(0)
    sizes = [_FEATURES, _HIDDEN, _HIDDEN, _HIDDEN]
    hidden = [part for i in range(3) for part in (torch.nn.Linear(sizes[i], sizes[i + 1]), torch.nn.ReLU())]
    network = DistributedDataParallel(torch.nn.Sequential(*hidden, torch.nn.Linear(_HIDDEN, _CLASSES)))
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    done, path = 0, folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    for number in range(done + 1, STEPS + 1):
        features, labels = torch.randn(_ROWS, _FEATURES), torch.randint(_CLASSES, (_ROWS,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(features), labels).backward()
        optimizer.step()
        if rank == 0 and number % SAVE_STEPS == 0:
            partial = path.with_suffix(".partial")
            torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict(), "done": number}, partial)
            partial.rename(path)
        diary.step(number)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if _WORKER in os.environ:
        train = train_with_tfdist if os.environ[_WORKER] == "tfdist run" else train_with_torch
        train(pathlib.Path(os.environ[_EVENTS]))
    else:
        app.run(main)
