"""Measures how compression and local steps affect accuracy: trains the examples on 4 virtual devices.

    python -m benchmarks.convergence                               # digits: every codec, SGD and Adam, 3 seeds
    python -m benchmarks.convergence --model char_lm --optimizers adam --seeds 1
    python -m benchmarks.convergence --json benchmarks/results/convergence.json    # continues an earlier run
    python -m benchmarks.convergence --codecs none --synchronizations 'none,local_sgd(8),diloco(50)' --optimizers adam

`local_sgd(N)` and `diloco(N)` synchronize every N steps, and `diloco(N)+500` begins so after 500 steps. Let an epoch be
a multiple of N steps by `--steps_per_epoch`, since replicas synchronize at its end.

Devices of one machine compute the same bits as workers, so the results are those of 4 workers. By default every tensor
of at least 256 elements is compressed, because the codecs' default of 16384 elements would leave most of such small
networks uncompressed. A seed determines weights and order of the data. Each codec is compared under equal seeds.
"""

import dataclasses
import functools
import importlib
import itertools
import pathlib
import re
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


def synchronization_of(text: str) -> tfdist.LocalSGD | tfdist.DiLoCo | None:
    """Returns the local steps for a name such as `diloco(50)+500`, `None` for `none`.

    Raises:
      ValueError: If the name is none of these.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"(local_sgd|diloco)\((\d+)\)(?:\+(\d+))?", text)
    if found is None:
        raise ValueError(f"must be none, local_sgd(N) or diloco(N), also with +STEPS, got {text!r}")
    kind = {"local_sgd": tfdist.LocalSGD, "diloco": tfdist.DiLoCo}[found[1]]
    return kind(int(found[2]), start_step=int(found[3] or 0))


def is_synchronization(text: str) -> bool:
    """Whether `text` names local steps; raises a validation error that says what it must be."""
    try:
        synchronization_of(text)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "digits", ["digits", "char_lm"], "The model; digits reports accuracy, char_lm loss.")
flags.DEFINE_list("codecs", ["none", *NAMES], "Codecs, `none` for uncompressed; also powersgd(16).")
flags.register_validator("codecs", are_codecs)
flags.DEFINE_list("optimizers", ["sgd", "adam"], "Optimizers; sgd has a momentum of 0.9.")
flags.register_validator("optimizers", lambda names: set(names) <= {"sgd", "adam"}, "must be sgd or adam")
flags.DEFINE_list("synchronizations", ["none"], "Local steps, as in none,local_sgd(8),diloco(50)+500.")
flags.register_validator("synchronizations", lambda names: all(map(is_synchronization, names)))
flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each combination runs once per seed.")
flags.DEFINE_integer("num_epochs", None, "Epochs; by default 15 for digits and 10 for char_lm.", 1)
flags.DEFINE_integer("steps_per_epoch", None, "Steps in an epoch; by default all data of digits, 50 for char_lm.", 1)
flags.DEFINE_integer("min_elements", 256, "Smaller tensors travel uncompressed; 0 for the codec's default.", 0)
flags.DEFINE_string("json", None, "A file for the results; tables and curves are written beside it.")

_DEVICES = 4
_EPOCHS = {"digits": 15, "char_lm": 10}
_STEPS = {"digits": None, "char_lm": 50}  # per epoch; None: all data


def length(name: str) -> tuple[int, int | None]:
    """Number of epochs, and of the steps in each; None for all data."""
    return FLAGS.num_epochs or _EPOCHS[name], FLAGS.steps_per_epoch or _STEPS[name]


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


def new_strategy(codec: str, synchronization: str) -> tfdist.MirroredStrategy:
    devices = [f"CPU:{i}" for i in range(_DEVICES)]
    options = {"compression": codec_of(codec), "synchronization": synchronization_of(synchronization)}
    return tfdist.MirroredStrategy(devices, **options)


def train(name: str, codec: str, synchronization: str, optimizer: str, seed: int) -> Run:
    begin = time.monotonic()
    keras.utils.set_random_seed(seed)
    strategy = new_strategy(codec, synchronization)
    is_digits = name == "digits"
    data, held_out = digits_data(seed) if is_digits else text_data(seed)
    epochs, steps = length(name)
    with strategy.scope():
        build = example(name).build_model
        model = build(data.element_spec[0].shape[1:]) if is_digits else build(64, 128, 2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_of(optimizer, name), loss, metrics=["accuracy"])
    data = data.repeat() if is_digits and steps else data
    history = model.fit(data, verbose=0, epochs=epochs, steps_per_epoch=steps).history
    reached = model.evaluate(held_out, verbose=0, return_dict=True)["accuracy" if is_digits else "loss"]
    ratio = strategy.communication.traffic().ratio if strategy.communication else 1.0
    keras.backend.clear_session()
    curve = tuple(round(value, 5) for value in history["loss"])
    seconds = round(time.monotonic() - begin, 1)
    elements = FLAGS.min_elements if codec != "none" else 0
    return Run(name, optimizer, codec, elements, seed, reached, ratio, curve, seconds, synchronization)


def main(_) -> None:
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    tfdist.testing.virtual_devices(_DEVICES)
    path = pathlib.Path(FLAGS.json) if FLAGS.json else None
    epochs, steps = length(FLAGS.model)
    settings = {"devices": _DEVICES, "epochs": epochs, "steps_per_epoch": steps}
    record = Record(path, settings, KEY)
    # Loop over seeds outermost, so that an interrupted run has results for every codec.
    options = (map(int, FLAGS.seeds), FLAGS.optimizers, FLAGS.codecs, FLAGS.synchronizations)
    for seed, optimizer, codec, local in itertools.product(*options):
        if record.has(FLAGS.model, optimizer, codec, FLAGS.min_elements if codec != "none" else 0, seed, local):
            continue
        run = train(FLAGS.model, codec, local, optimizer, seed)
        name = codec if local == "none" else f"{codec}, {local}"
        print(f"{run.model}, {optimizer}, {name}, seed {seed}: {run.reached:.4f} in {run.seconds:.0f} s", flush=True)
        record.add(dataclasses.asdict(run))
        if path:
            write_report(path, record.document)
    print_table(record.document)


if __name__ == "__main__":
    app.run(main)
