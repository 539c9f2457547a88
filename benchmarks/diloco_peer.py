"""Trains the character model by DiLoCo with tfdist and with plain PyTorch, and compares losses and bytes.

    unshare --net sh -c 'ip link set lo up && python -m benchmarks.diloco_peer'

Both take the same weights, the same rows in each step and on each worker, AdamW, and the same outer optimizer. Workers
are processes on this machine. Bytes are those that all workers send over the loopback interface, start-up included, so
run it in a network namespace of its own, as above, which needs root. Needs PyTorch: pip install torch==2.13.0.
"""

import importlib
import pathlib
import sys
import tempfile
import time

import keras
import numpy as np
import rich.console
import rich.table
from absl import app, flags

import tfdist
from tfdist.testing import run_workers

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 4, "Number of workers.", 1)
flags.DEFINE_integer("every", 50, "Steps between two synchronizations.", 1)
flags.DEFINE_integer("training_steps", 500, "Steps of training.", 1)
flags.DEFINE_multi_enum(
    "libraries", ["tfdist", "tfdist+int8", "pytorch"], ["tfdist", "tfdist+int8", "pytorch"], "Libraries."
)

_ROWS, _CONTEXT, _WIDTH, _BLOCKS = 32, 64, 128, 2


def _sent() -> int:
    """Bytes that the loopback interface of this network namespace has sent."""
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])


def _example():
    folder = str(pathlib.Path(__file__).parents[1] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("char_lm")


def with_tfdist(arrays, batches, held_out, every, compression) -> float:
    """Trains by `fit` in a worker process; see `benchmarks.peers.torch_diloco.train`."""
    strategy = tfdist.MultiWorkerMirroredStrategy(synchronization=tfdist.DiLoCo(every), compression=compression)
    with strategy.scope():
        model = _example().build_model(_CONTEXT, _WIDTH, _BLOCKS)
        model.set_weights(arrays)
        model.compile(keras.optimizers.AdamW(2e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = (each.reshape(-1, _CONTEXT) for each in batches)
    model.fit(x, y, batch_size=batches[0].shape[1], shuffle=False, verbose=0)
    return model.evaluate(*held_out, batch_size=_ROWS, verbose=0)


def with_pytorch(arrays, batches, held_out, every, rendezvous) -> float:
    """Trains in a worker process."""
    from benchmarks.peers import torch_diloco  # PyTorch is optional.

    return torch_diloco.train(arrays, batches, held_out, every, rendezvous)


def _texts(steps):
    """Returns batches of [steps, rows, context] and rows that are held out, each as inputs and labels."""
    char_lm = _example()
    length = _CONTEXT + 1
    text = char_lm.read_text()
    rows = text[: len(text) // length * length].reshape(-1, length).astype(np.int32)
    split = len(rows) * 9 // 10
    taken = np.random.default_rng(0).integers(0, split, [steps, _ROWS])
    return (rows[taken][..., :-1], rows[taken][..., 1:]), (rows[split:, :-1], rows[split:, 1:])


def main(_) -> None:
    keras.utils.set_random_seed(0)
    arrays = _example().build_model(_CONTEXT, _WIDTH, _BLOCKS).get_weights()
    batches, held_out = _texts(FLAGS.training_steps)
    table = rich.table.Table("library", "validation loss", "megabytes sent", "seconds")
    for library in FLAGS.libraries:
        before, begin = _sent(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            train, last = {
                "tfdist": (with_tfdist, None),
                "tfdist+int8": (with_tfdist, "int8"),
                "pytorch": (with_pytorch, f"{folder}/rendezvous"),
            }[library]
            args = (arrays, batches, held_out, FLAGS.every, last)
            losses = run_workers(train, FLAGS.workers, args=args, timeout_seconds=1200)
        sent, seconds = _sent() - before, time.monotonic() - begin
        table.add_row(library, f"{losses[0]:.4f}", f"{sent / 1e6:.1f}", f"{seconds:.0f}")
    rich.console.Console().print(table)


if __name__ == "__main__":
    app.run(main)
