"""Trains a transformer that exceeds the memory limit of each worker: unsharded, and with its weights divided.

    python -m benchmarks.memory_limit                        # about 5 minutes on 2 cores; root, Linux control groups v1
    python -m benchmarks.memory_limit --limit 1500 --blocks 3 --width 2048 --workers 4

Each worker runs in a control group of its own with the same limit, which the kernel enforces: a worker that needs more
is killed. The output shows for each mode whether training ended, and for worker 0 the loss of each step and the memory
of its control group: the highest so far, cached files included, and what the process holds after the step. Beside it
stands what the worker must hold in theory: its parts of the weights, of Adam's state and of the gradients.
"""

import json
import os
import pathlib
import subprocess
import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("limit", 1500, "Memory limit of each worker, in MiB.", 1)
flags.DEFINE_integer("blocks", 3, "Blocks of the transformer.", 1)
flags.DEFINE_integer("width", 2048, "Width of the transformer.", 8)
flags.DEFINE_integer("workers", 4, "Number of workers.", 1)
flags.DEFINE_integer("steps", 3, "Training steps.", 1)
flags.DEFINE_integer("timeout", 900, "Longest time of a mode, in seconds.", 1)
flags.DEFINE_list("modes", ["none", "parameters"], "The values of `model_sharding`.")

_GROUPS = pathlib.Path("/sys/fs/cgroup/memory")
_WORKER = "TFDIST_MEMORY_LIMIT_WORKER"  # environment variable with the settings of a worker


def join_group(limit: int) -> pathlib.Path:
    """Moves this process into a control group with a limit in MiB, and returns the folder of the group."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    group = _GROUPS / f"tfdist-memory-limit-{rank}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(limit << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "memory.max_usage_in_bytes").write_text("0")
    return group


def transformer(blocks: int, width: int):
    """Returns a transformer without embeddings, which has 12 x width x width weights in each block."""
    import keras
    from keras import layers

    inputs = hidden = layers.Input((16, width))
    for _ in range(blocks):
        normal = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(8, width // 8)(normal, normal)
        normal = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normal))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))


def work(settings: dict) -> None:
    """Trains in a worker, and prints its memory after each step."""
    group = join_group(settings["limit"])
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(model_sharding=settings["mode"])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = transformer(settings["blocks"], settings["width"])
        model.compile(keras.optimizers.Adam(1e-6), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 16, settings["width"])).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.ones((8, 1), "float32"))).batch(8).repeat(settings["steps"])

    def told(batch, logs):
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        sizes = {"weights_mib": model.count_params() * 4 >> 20, "peak_mib": peak >> 20, "held_mib": held(group)}
        print(json.dumps({"step": batch, "loss": float(logs["loss"]), **sizes}), flush=True)

    model.fit(data, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=told)])


def held(group: pathlib.Path) -> int:
    """Returns the MiB of memory that processes of a group hold now, without cached files."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(statistics["rss"]) >> 20


def run(mode: str) -> None:
    """Runs all workers in one mode, and prints the outcome."""
    options = {name: FLAGS[name].value for name in ("limit", "blocks", "width", "steps")}
    settings = {**options, "mode": None if mode == "none" else mode}
    environment = {**os.environ, _WORKER: json.dumps(settings), "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "tfdist", "run", "--workers", str(FLAGS.workers), "--max-restarts", "0", __file__]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FLAGS.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"model_sharding={mode}: no end after {FLAGS.timeout} s")
        return
    lines = [json.loads(line[line.index("{") :]) for line in ended.stdout.splitlines() if '"peak_mib"' in line]
    print(f"model_sharding={mode}: exit code {ended.returncode}, limit {FLAGS.limit} MiB")
    for line in lines:
        print(f"  {line}")
    if lines:
        weights = lines[-1]["weights_mib"]
        for what, whole in (("weights and state", 3 * weights), ("with gradients", 4 * weights)):
            print(f"  {what}: {whole} MiB whole, {whole // FLAGS.workers} MiB in parts")
    for group in _GROUPS.glob("tfdist-memory-limit-*"):  # A group that stays would count cached files once more.
        group.rmdir()
    if ended.returncode:
        print("\n".join(line for line in (ended.stderr + ended.stdout).splitlines() if line.startswith("tfdist:")))


def main(argv):
    """Runs the modes one after another."""
    del argv
    if os.geteuid() or not (_GROUPS / "memory.limit_in_bytes").exists():
        raise app.UsageError("Needs root and control groups of version 1, at /sys/fs/cgroup/memory.")
    for mode in FLAGS.modes:
        run(mode)


if __name__ == "__main__":
    if _WORKER in os.environ:
        work(json.loads(os.environ[_WORKER]))
    else:
        app.run(main)
