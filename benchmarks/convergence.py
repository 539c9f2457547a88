"""Measures how compression affects accuracy: trains the examples on 4 virtual devices with each codec.

    python -m benchmarks.convergence                               # digits: every codec, SGD and Adam, 3 seeds
    python -m benchmarks.convergence --model char_lm --optimizers adam --seeds 1
    python -m benchmarks.convergence --json benchmarks/results/convergence.json    # continues an earlier run

Devices of one machine compute the same bits as workers, so the results are those of 4 workers. By default every tensor
of at least 256 elements is compressed, because the codecs' default of 16384 elements would leave most of such small
networks uncompressed. A seed determines weights and order of the data. Each codec is compared under equal seeds.
"""

import dataclasses
import functools
import importlib
import itertools
import pathlib
import sys
import time

import keras
from absl import app, flags

import tfdist
from benchmarks.accuracy import KEY, Run, print_table, write_report
from benchmarks.record import Record
from tfdist.strategies.compression import NAMES, from_name


def are_codecs(names: list[str]) -> bool:
    """Whether all names are codecs; raises a validation error that names the first unknown one."""
    try:
        return all(name == "none" or from_name(name) for name in names)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None


FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "digits", ["digits", "char_lm"], "The model; digits reports accuracy, char_lm loss.")
flags.DEFINE_list("codecs", ["none", *NAMES], "Codecs, `none` for uncompressed; also powersgd(16).")
flags.register_validator("codecs", are_codecs)
flags.DEFINE_list("optimizers", ["sgd", "adam"], "Optimizers; sgd has a momentum of 0.9.")
flags.register_validator("optimizers", lambda names: set(names) <= {"sgd", "adam"}, "must be sgd or adam")
flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each combination runs once per seed.")
flags.DEFINE_integer("min_elements", 256, "Smaller tensors travel uncompressed; 0 for the codec's default.", 0)
flags.DEFINE_string("json", None, "A file for the results; tables and curves are written beside it.")

_DEVICES = 4
_EPOCHS = {"digits": 15, "char_lm": 10}
_CHAR_LM_STEPS = 50  # per epoch


def codec_of(text: str):
    """Returns the codec for a name such as int8 or powersgd(16), with `--min_elements`."""
    codec = None if text == "none" else from_name(text)
    if codec is None or not FLAGS.min_elements:
        return codec
    return dataclasses.replace(codec, min_elements=FLAGS.min_elements)


def optimizer_of(name: str, model: str) -> keras.optimizers.Optimizer:
    if name == "sgd":
        return keras.optimizers.SGD(0.03 if model == "digits" else 0.3, momentum=0.9)
    return keras.optimizers.Adam(3e-3 if model == "digits" else 2e-3)


@functools.cache
def example(name: str):
    """Imports a module of `examples/`. Only one example can be imported, since both define the same flags."""
    return importlib.import_module(name)


def digits_data(seed: int):
    """Training and test data. Made for each run, since a shuffled dataset continues where its last reader ended."""
    batches = example("common").batches
    return [batches(tfdist.data.load("digits", split), 64, way) for split, way in (("train", seed), ("test", None))]


def text_data(seed: int):
    """Training and validation data."""
    char_lm, batches = example("char_lm"), example("common").batches
    text = char_lm.read_text()
    split = len(text) * 9 // 10
    return [batches(char_lm.windows(text[:split]), 32, seed).repeat(), batches(char_lm.windows(text[split:]), 32)]


def train(name: str, codec: str, optimizer: str, seed: int) -> Run:
    begin = time.monotonic()
    keras.utils.set_random_seed(seed)
    strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(_DEVICES)], compression=codec_of(codec))
    is_digits = name == "digits"
    data, held_out = digits_data(seed) if is_digits else text_data(seed)
    with strategy.scope():
        build = example(name).build_model
        model = build(data.element_spec[0].shape[1:]) if is_digits else build(64, 128, 2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_of(optimizer, name), loss, metrics=["accuracy"])
    steps = None if is_digits else _CHAR_LM_STEPS
    history = model.fit(data, verbose=0, epochs=_EPOCHS[name], steps_per_epoch=steps).history
    reached = model.evaluate(held_out, verbose=0, return_dict=True)["accuracy" if is_digits else "loss"]
    ratio = strategy.communication.traffic().ratio if strategy.communication else 1.0
    keras.backend.clear_session()
    curve = tuple(round(value, 5) for value in history["loss"])
    seconds = round(time.monotonic() - begin, 1)
    return Run(
        name, optimizer, codec, FLAGS.min_elements if codec != "none" else 0, seed, reached, ratio, curve, seconds
    )


def main(_) -> None:
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    tfdist.testing.virtual_devices(_DEVICES)
    path = pathlib.Path(FLAGS.json) if FLAGS.json else None
    settings = {"devices": _DEVICES, "epochs": _EPOCHS, "char_lm_steps": _CHAR_LM_STEPS}
    record = Record(path, settings, KEY)
    # Loop over seeds outermost, so that an interrupted run has results for every codec.
    for seed, optimizer, codec in itertools.product(map(int, FLAGS.seeds), FLAGS.optimizers, FLAGS.codecs):
        if record.has(FLAGS.model, optimizer, codec, FLAGS.min_elements if codec != "none" else 0, seed):
            continue
        run = train(FLAGS.model, codec, optimizer, seed)
        print(f"{run.model}, {optimizer}, {codec}, seed {seed}: {run.reached:.4f} in {run.seconds:.0f} s", flush=True)
        record.add(dataclasses.asdict(run))
        if path:
            write_report(path, record.document)
    print_table(record.document)


if __name__ == "__main__":
    app.run(main)
