"""Trains a model that exceeds the memory limit of each worker.

    python -m benchmarks.memory_limit                        # about 5 minutes on 2 cores; root, Linux control groups v1
    python -m benchmarks.memory_limit --limit 1500 --blocks 3 --width 2048 --workers 4
    python -m benchmarks.memory_limit --table 24576000 --workers 6

The model is a transformer with Adam, or with `--table` an embedding. The transformer trains unsharded, and then with
its weights divided. The rows of the embedding are divided. Each worker runs in a control group of its own with the same
limit. The kernel enforces it: a worker that needs more is killed.

The output shows for each mode whether training ended. For worker 0 it shows the loss of each step, the highest memory
of the control group so far, and the memory of the process after the step. The former includes cached files. Beside it
stands the memory that a worker needs in theory: for its parts of the weights and of the optimizer's state, and for the
transformer of the gradients. The last number is the highest of all workers.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

from absl import app, flags

LENGTH = 64  # of the rows of the embedding
STATES = {"sgd": 0, "adagrad": 1, "adam": 2}  # The numbers that an optimizer keeps for each weight.

FLAGS = flags.FLAGS
flags.DEFINE_integer("limit", 1500, "Memory limit of each worker, in MiB.", 1)
flags.DEFINE_integer("blocks", 3, "Blocks of the transformer.", 1)
flags.DEFINE_integer("width", 2048, "Width of the transformer.", 8)
flags.DEFINE_integer("workers", 4, "Number of workers.", 1)
flags.DEFINE_integer("steps", 3, "Training steps.", 1)
flags.DEFINE_integer("timeout", 900, "Longest time of a mode, in seconds.", 1)
flags.DEFINE_list("modes", ["none", "parameters"], "The values of `model_sharding`, for the transformer.")
flags.DEFINE_integer("table", 0, f"Trains a ShardedEmbedding of this many rows of {LENGTH} numbers instead.", 0)
flags.DEFINE_enum("optimizer", "sgd", list(STATES), "The optimizer of the embedding.")

_GROUPS = pathlib.Path("/sys/fs/cgroup/memory")
_PEAK = "memory.max_usage_in_bytes"
_WORKER = "TFDIST_MEMORY_LIMIT_WORKER"  # environment variable with the settings of a worker


def join_group(name: str, limit: int) -> pathlib.Path:
    """Moves this process into a control group with a limit in MiB, and returns the folder of the group."""
    group = _GROUPS / f"{name}-{json.loads(os.environ['TF_CONFIG'])['task']['index']}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(limit << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / _PEAK).write_text("0")
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


def make_transformer(settings: dict):
    """Returns a compiled transformer and its data: the same batch in each step."""
    import keras
    import numpy as np

    model = transformer(settings["blocks"], settings["width"])
    model.compile(keras.optimizers.Adam(1e-6), "mse")
    return model, np.random.default_rng(0).normal(size=(8, 16, settings["width"])).astype("float32")


def make_embedding(settings: dict):
    """Returns a compiled model with an embedding and its data: the same batch in each step."""
    import keras
    import numpy as np
    from keras import layers

    import tfdist

    table = tfdist.layers.ShardedEmbedding(settings["table"], LENGTH)
    model = keras.Sequential([layers.Input((8,), dtype="int64"), table, layers.Flatten(), layers.Dense(1)])
    model.compile(keras.optimizers.get({"class_name": settings["optimizer"], "config": {"learning_rate": 0.1}}), "mse")
    return model, np.random.default_rng(0).integers(0, settings["table"], (64 * settings["workers"], 8))


def work(settings: dict) -> None:
    """Trains in a worker, and prints its memory after each step."""
    group = join_group(settings["group"], settings["limit"])
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(model_sharding=settings["mode"])
    keras.utils.set_random_seed(1)
    begin = time.monotonic()
    with strategy.scope():
        model, x = (make_embedding if settings["table"] else make_transformer)(settings)
    y = np.ones((len(x), 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).repeat(settings["steps"])

    def tell(**told):
        peak = int((group / _PEAK).read_text())
        print(json.dumps({**told, "peak_mib": peak >> 20, "held_mib": held(group)}), flush=True)

    def tell_step(batch, logs):
        tell(step=batch, loss=float(logs["loss"]))

    tell(built_seconds=round(time.monotonic() - begin), weights_mib=model.count_params() * 4 >> 20)
    model.fit(data, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=tell_step)])


def held(group: pathlib.Path) -> int:
    """Returns the MiB of memory that processes of a group hold now, without cached files."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(statistics["rss"]) >> 20


def run(mode: str | None) -> None:
    """Runs all workers with a `model_sharding`, and prints the outcome."""
    options = {name: FLAGS[name].value for name in ("limit", "blocks", "width", "steps", "workers", "table")}
    settings = {**options, "mode": mode, "optimizer": FLAGS.optimizer if FLAGS.table else "adam"}
    settings["group"] = f"tfdist-memory-limit-{os.getpid()}"
    title = f"ShardedEmbedding, {FLAGS.optimizer}" if FLAGS.table else f"model_sharding={mode}"
    environment = {**os.environ, _WORKER: json.dumps(settings), "CUDA_VISIBLE_DEVICES": "-1"}
    if FLAGS.table:  # Freed tensors leave the process, as with divided weights.
        environment["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"
    command = [sys.executable, "-m", "tfdist", "run", "--workers", str(FLAGS.workers), "--max-restarts", "0", __file__]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FLAGS.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{title}: no end after {FLAGS.timeout} s")
        return
    lines = [json.loads(line[line.index("{") :]) for line in ended.stdout.splitlines() if '"peak_mib"' in line]
    print(f"{title}: exit code {ended.returncode}, {FLAGS.workers} workers, limit {FLAGS.limit} MiB")
    for line in lines:
        print(f"  {line}")
    if lines:
        weights, states = lines[0]["weights_mib"], STATES[settings["optimizer"]]
        sizes = {"weights and state": 1 + states} | ({} if FLAGS.table else {"with gradients": 2 + states})
        for what, times in sizes.items():
            print(f"  {what}: {times * weights} MiB whole, {times * weights // FLAGS.workers} MiB in parts")
    groups = list(_GROUPS.glob(f"{settings['group']}-*"))
    print(
        f"  highest of all workers: {max((int((group / _PEAK).read_text()) for group in groups), default=0) >> 20} MiB"
    )
    for group in groups:  # A group that stays would count cached files once more.
        group.rmdir()
    if ended.returncode:
        print("\n".join(line for line in (ended.stderr + ended.stdout).splitlines() if line.startswith("tfdist:")))


def main(argv):
    """Runs the embedding, or the modes of the transformer one after another."""
    del argv
    if os.geteuid() or not (_GROUPS / "memory.limit_in_bytes").exists():
        raise app.UsageError("Needs root and control groups of version 1, at /sys/fs/cgroup/memory.")
    for mode in ["none"] if FLAGS.table else FLAGS.modes:
        run(None if mode == "none" else mode)


if __name__ == "__main__":
    if _WORKER in os.environ:
        work(json.loads(os.environ[_WORKER]))
    else:
        app.run(main)
