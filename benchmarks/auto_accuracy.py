"""Measures how `compression="auto"` affects accuracy: trains the examples on workers with links of known rate.

    python -m benchmarks.auto_accuracy                                                # digits, 50 Mbit/s
    python -m benchmarks.auto_accuracy --model char_lm --link 100mbit --optimizers adam --seeds 1

Workers are processes on hosts of `benchmarks.netlab`, which needs root. On a slow link tfdist tries each codec in the
first steps, and then chooses one. Each codec is compared with uncompressed training under equal seeds. Training,
optimizers and lengths are those of `benchmarks.convergence`, whose flags count here too.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import keras
from absl import app, flags

import tfdist
from benchmarks import convergence
from benchmarks.netlab import Netlab, end_on_signals

FLAGS = flags.FLAGS
flags.DEFINE_string("link", "50mbit", "Rate of the links.")
flags.DEFINE_integer("workers", 2, "Number of workers.", 2)
flags.DEFINE_list("compressions", ["auto"], "Values of `compression=`, which are compared with none.")
flags.DEFINE_string("results", None, "A file to which the first worker writes its results. For starts by this program.")

_PORT = 2222
_SECONDS = 600.0  # Deadline of all runs of a codec.
_LENGTHS = {"digits": (15, None), "char_lm": (10, 50)}  # Epochs, and steps of an epoch.


def train(strategy, optimizer: str, seed: int) -> float:
    """Returns the test accuracy of digits, or the validation loss of char_lm."""
    keras.utils.set_random_seed(seed)
    is_digits = FLAGS.model == "digits"
    data, held_out = convergence.digits_data(seed) if is_digits else convergence.text_data(seed)
    with strategy.scope():
        build = convergence.example(FLAGS.model).build_model
        model = build(data.element_spec[0].shape[1:]) if is_digits else build(64, 128, 2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(convergence.optimizer_of(optimizer, FLAGS.model), loss, metrics=["accuracy"])
    epochs, steps = _LENGTHS[FLAGS.model]
    model.fit(data, verbose=0, epochs=epochs, steps_per_epoch=steps)
    return model.evaluate(held_out, verbose=0, return_dict=True)["accuracy" if is_digits else "loss"]


def work(codec: str) -> None:
    """Trains as a worker, and writes the results if it is the first one."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=None if codec == "none" else codec)
    found = []
    for optimizer in FLAGS.optimizers:
        for seed in map(int, FLAGS.seeds):
            reached = train(strategy, optimizer, seed)
            reason = strategy.communication.choices()[-1].reason if codec == "auto" else ""
            found.append([optimizer, seed, reached, reason])
            if strategy.extended.should_checkpoint:
                print(f"{FLAGS.model}, {optimizer}, {codec}, seed {seed}: {reached:.4f}. {reason}", flush=True)
    if strategy.extended.should_checkpoint:
        pathlib.Path(FLAGS.results).write_text(json.dumps(found))


def run(codec: str, lab: Netlab) -> dict[tuple[str, int], tuple[float, str]]:
    """Starts the workers. Returns what they reached and why they chose a codec, by optimizer and seed."""
    cluster = {"worker": [f"{host.address}:{_PORT}" for host in lab.hosts]}
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.json")
        ours = [sys.executable, "-m", "benchmarks.auto_accuracy", *sys.argv[1:], "--results", str(results)]
        workers: list[subprocess.Popen[bytes]] = []
        for index, host in enumerate(lab.hosts):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            command = host.command([*ours, "--compressions", codec])
            workers.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config}))
        deadline = time.monotonic() + _SECONDS
        codes = [worker.wait(max(1.0, deadline - time.monotonic())) for worker in workers]
        if any(codes):
            sys.exit(f"Workers with {codec} ended with {codes}.")
        return {
            (optimizer, seed): (reached, reason) for optimizer, seed, reached, reason in json.loads(results.read_text())
        }


def main(_) -> None:
    if FLAGS.results:
        work(FLAGS.compressions[0])
        return
    with Netlab(FLAGS.workers, FLAGS.link) as lab:
        found = {codec: run(codec, lab) for codec in ("none", *FLAGS.compressions)}
    for codec, runs in found.items():
        for optimizer in FLAGS.optimizers:
            mine = {seed: reached for (name, seed), (reached, _) in runs.items() if name == optimizer}
            others = [mine[seed] - found["none"][optimizer, seed][0] for seed in mine]
            each = " ".join(f"{reached:.4f}" for reached in mine.values())
            print(
                f"{optimizer}, {codec}: {statistics.mean(mine.values()):.4f} ({each}), {statistics.mean(others):+.4f}"
            )


if __name__ == "__main__":
    end_on_signals()
    app.run(main)
