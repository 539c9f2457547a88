"""What compression costs in accuracy: the examples trained on 4 virtual devices, codec by codec.

    python benchmarks/convergence.py                               # digits: every codec, SGD and Adam, 3 seeds
    python benchmarks/convergence.py --model char_lm --optimizers adam --seeds 1
    python benchmarks/convergence.py --json convergence.json

Devices of one machine give the bits that workers would give, so this is what 4 workers would reach. By default every
tensor of 256 elements or more is compressed, which is far stricter than what codecs do by themselves: they leave
tensors of less than 16384 elements alone, which is most of such small networks.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import statistics
import sys

import keras
import rich.console
import rich.table
from absl import app, flags

import tfdist
from tfdist.strategies.compression import NAMES

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "digits", ["digits", "char_lm"], "What is trained; digits reports accuracy, char_lm loss.")
flags.DEFINE_list("codecs", ["none", *NAMES], "Names of codecs, `none` for uncompressed.")
flags.DEFINE_list("optimizers", ["sgd", "adam"], "sgd has a momentum of 0.9.")
flags.DEFINE_integer("seeds", 3, "Runs of each.", 1)
flags.DEFINE_integer("min_elements", 256, "Smaller tensors travel as they are; 0 for the codec's default.", 0)
flags.DEFINE_string("json", None, "A file for the results.")

_DEVICES = 4


def codec_of(name: str):
    if name == "none":
        return None
    return NAMES[name](**({"min_elements": FLAGS.min_elements} if FLAGS.min_elements else {}))


def optimizer_of(name: str, model: str) -> keras.optimizers.Optimizer:
    if name == "sgd":
        return keras.optimizers.SGD(0.03 if model == "digits" else 0.3, momentum=0.9)
    return keras.optimizers.Adam(3e-3 if model == "digits" else 2e-3)


@functools.cache
def example(name: str):
    """A module of `examples/`; only the one that is trained, since both define the same flags."""
    return importlib.import_module(name)


@functools.cache
def digits_data():
    batches = example("common").batches
    return [batches(tfdist.data.load("digits", split), 64, seed) for split, seed in (("train", 0), ("test", None))]


@functools.cache
def text_data():
    char_lm, batches = example("char_lm"), example("common").batches
    text = char_lm.read_text()
    split = len(text) * 9 // 10
    train = batches(char_lm.windows(text[:split]), 32, 0)
    return [train.repeat(), batches(char_lm.windows(text[split:]), 32)]


def train(codec: str, optimizer: str, seed: int) -> tuple[float, float]:
    """Test accuracy or validation loss, and how many times less was sent."""
    keras.utils.set_random_seed(seed)
    strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(_DEVICES)], compression=codec_of(codec))
    is_digits = FLAGS.model == "digits"
    data, held_out = digits_data() if is_digits else text_data()
    with strategy.scope():
        build = example(FLAGS.model).build_model
        model = build(data.element_spec[0].shape[1:]) if is_digits else build(64, 128, 2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_of(optimizer, FLAGS.model), loss, metrics=["accuracy"])
    model.fit(data, verbose=0, **({"epochs": 15} if is_digits else {"steps_per_epoch": 500}))
    reached = model.evaluate(held_out, verbose=0, return_dict=True)
    ratio = strategy.communication.traffic().ratio if strategy.communication else 1.0
    return reached["accuracy" if is_digits else "loss"], ratio


@dataclasses.dataclass(frozen=True)
class Result:
    """What one codec reached under one optimizer, by seed."""

    optimizer: str
    codec: str
    reached: list[float]
    ratio: float


def print_table(results: list[Result]) -> None:
    table = rich.table.Table("optimizer", "codec", "mean", "by seed", "less sent")
    for result in results:
        seeds = " ".join(f"{value:.4f}" for value in result.reached)
        table.add_row(
            result.optimizer, result.codec, f"{statistics.mean(result.reached):.4f}", seeds, f"{result.ratio:.1f}x"
        )
    rich.console.Console(width=100).print(table)


def main(_) -> None:
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    tfdist.testing.virtual_devices(_DEVICES)
    results = []
    for optimizer in FLAGS.optimizers:
        for codec in FLAGS.codecs:
            runs = [train(codec, optimizer, seed) for seed in range(FLAGS.seeds)]
            results.append(Result(optimizer, codec, [reached for reached, _ in runs], runs[0][1]))
            print(results[-1], flush=True)
    print_table(results)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    app.run(main)
