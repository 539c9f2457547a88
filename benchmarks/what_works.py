"""Tests features on 2 workers: Keras 3 and Keras 2 under TensorFlow's strategy, and Keras 3 under tfdist.

    python benchmarks/what_works.py                           # 2 to 3 minutes on 2 cores
    python benchmarks/what_works.py --json what_works.json    # with the messages of the errors
    python benchmarks/what_works.py --only Dropout        # by a part of the name; may be repeated

The column of Keras 2 needs `tf_keras`. Each feature is a function that trains a tiny network. It runs in all columns,
and for the right result on one device without a strategy, with the same version of Keras. All runs start from the same
weights and read the same rows. `jit_compile` is off, since XLA cannot compile a step of several replicas.

A cell is one of
- "equals one device": equal to a relative 1e-5 of the largest number of each array, and bit-identical on both workers;
- "works": the feature had its intended effect, where a comparison with one device makes no sense;
- "wrong: ...": it ran, but with another result;
- "fails: ...": the class of the error. A call that takes over a minute fails with `WorkerTimeoutError`;
- "not offered": this version of Keras does not have the feature;
- "not installed": this version of Keras is missing.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text
from absl import app, flags

from tfdist.errors import WorkerError
from tfdist.package_version import version_of
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("only", [], "Run the features whose name contains this; all by default.")
flags.DEFINE_string("json", None, "A file for the results.")

_STEPS, _BATCH, _COLUMNS, _CLASSES = 10, 8, 6, 3
_TOLERANCE = 1e-5
_SECONDS = 60.0

Arrays = dict[str, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A column: a version of Keras, and the module of its strategy, or None for one device."""

    title: str
    keras: str
    library: str | None

    def make_pool(self) -> WorkerPool:
        """Two processes, or one without a strategy, that have not loaded TensorFlow yet."""
        env = {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": str(int(self.keras == "tf_keras"))}
        return WorkerPool(2 if self.library else 1, timeout_seconds=_SECONDS, env=env)


SETUPS = [
    Setup("Keras 3, tf.distribute", "keras", "tensorflow.distribute"),
    Setup("Keras 2, tf.distribute", "tf_keras", "tensorflow.distribute"),
    Setup("Keras 3, tfdist", "keras", "tfdist"),
]


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature to test, and how its results are judged.

    Attributes:
      run: Takes the module of Keras and the strategy, or None. Returns arrays by name, or None if this version of Keras
        does not have the feature.
      judge: Takes the results of all workers and of one device. Returns a description of the faults, empty if none.
      verdict: Text of the cell if there are no faults.
    """

    run: Callable[[Any, Any], Arrays | None]
    judge: Callable[[list[Arrays], Arrays], str]
    verdict: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """The text of a cell, and the message of the error, if any."""

    text: str
    detail: str = ""


FEATURES: dict[str, Feature] = {}


# Functions that judge results.


def difference(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference relative to each array's largest number; infinite for other shapes, Inf or NaN."""
    if [array.shape for array in got] != [array.shape for array in wanted]:
        return np.inf
    if not all(np.isfinite(array).all() for array in [*got, *wanted]):
        return np.inf
    pairs = zip(got, wanted, strict=True)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs)


def describe(got: list[np.ndarray], wanted: list[np.ndarray]) -> str:
    """Describes the difference of two lists of arrays."""
    shapes = [[array.shape for array in arrays] for arrays in (got, wanted)]
    if shapes[0] != shapes[1]:
        return f"have shapes {shapes[0]}, not {shapes[1]}"
    if not all(np.isfinite(array).all() for array in got):
        return "are not finite"
    return f"off by {difference(got, wanted):.0e}"


def workers_agree(results: list[Arrays], expected: Arrays) -> str:
    """Describes differences between workers, which must hold the same bits."""
    del expected
    first, *others = results
    faults = [
        f"{name} of workers {describe(other[name], first[name])}"
        for other in others
        for name in first
        if difference(other[name], first[name]) > 0
    ]
    return ", ".join(faults)


def equals_one_device(results: list[Arrays], expected: Arrays) -> str:
    """Describes differences from one device, or else between workers."""
    first = results[0]
    faults = [
        f"{name} {describe(first[name], wanted)}"
        for name, wanted in expected.items()
        if difference(first[name], wanted) > _TOLERANCE
    ]
    return ", ".join(faults) or workers_agree(results, expected)


def workers_differ(results: list[Arrays], expected: Arrays) -> str:
    """Describes arrays that are equal on workers although they must differ."""
    del expected
    first, *others = results
    return ", ".join(f"same {name}" for other in others for name in first if not difference(other[name], first[name]))


def feature(name: str, judge=equals_one_device, verdict: str = "equals one device"):
    def add(run):
        FEATURES[name] = Feature(run, judge, verdict)
        return run

    return add


# Helpers of the features. The code below runs in the workers.


def scope_of(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def make_rows(rows: int = _STEPS * _BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Rows with different means, so that a step on the wrong share changes the result."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, _COLUMNS)) + np.linspace(-1, 1, rows)[:, None]
    return x.astype("float32"), rng.integers(0, _CLASSES, rows)


def make_model(keras, *hidden, columns: int = _COLUMNS):
    """A network with equal initial weights in all processes."""
    hidden = hidden or (keras.layers.Dense(5, activation="tanh"),)
    model = keras.Sequential([keras.Input((columns,)), *hidden, keras.layers.Dense(_CLASSES)])
    rng = np.random.default_rng(1)
    for layer in model.layers:
        if not isinstance(layer, keras.layers.BatchNormalization):
            layer.set_weights([rng.normal(0, 0.5, weight.shape) for weight in layer.get_weights()])
    return model


def compile_model(keras, model, optimizer=None, **kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], jit_compile=False, **kwargs)
    return model


def fit(model, x, y, **kwargs) -> dict:
    return model.fit(x, y, batch_size=_BATCH, shuffle=False, verbose=0, **kwargs).history


def weights_of(model) -> Arrays:
    return {"weights": [np.asarray(weight, "float64") for weight in model.get_weights()]}


def fit_with(keras, strategy, make_optimizer=None, x=None, **kwargs) -> Arrays:
    """Weights after 10 steps of `fit`."""
    with scope_of(strategy):
        model = compile_model(keras, make_model(keras), make_optimizer and make_optimizer(), **kwargs)
    rows, y = make_rows()
    fit(model, rows if x is None else x, y)
    return weights_of(model)


# The features.


@feature("`fit`")
def plain_fit(keras, strategy):
    return fit_with(keras, strategy)


@feature("`evaluate`")
def evaluate(keras, strategy):
    with scope_of(strategy):
        model = compile_model(keras, make_model(keras))
    loss, accuracy = model.evaluate(*make_rows(), batch_size=_BATCH, verbose=0)
    return {"loss": [np.asarray(loss)], "accuracy": [np.asarray(accuracy)]}


@feature("`predict`, 37 rows in batches of 8")
def predict(keras, strategy):
    with scope_of(strategy):
        model = compile_model(keras, make_model(keras))
    return {"predictions": [model.predict(make_rows(37)[0], batch_size=_BATCH, verbose=0)]}


@feature("`fit`, last batch short (37 rows in batches of 8)")
def short_batch(keras, strategy):
    with scope_of(strategy):
        model = compile_model(keras, make_model(keras))
    history = fit(model, *make_rows(37), epochs=2)
    return {**weights_of(model), "epoch loss": [np.asarray(history["loss"])]}


@feature("`global_clipnorm`")
def global_clipnorm(keras, strategy):
    return fit_with(keras, strategy, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1))


@feature("`gradient_accumulation_steps`")
def gradient_accumulation(keras, strategy):
    if "gradient_accumulation_steps" not in inspect.signature(keras.optimizers.SGD.__init__).parameters:
        return None
    return fit_with(keras, strategy, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


@feature("`steps_per_execution=4`")
def steps_per_execution(keras, strategy):
    return fit_with(keras, strategy, steps_per_execution=4)


@feature("`LossScaleOptimizer`, Inf on one worker")
def loss_scaling(keras, strategy):
    """One device skips the step, so equal weights mean that both workers skipped it."""
    x, _ = make_rows()
    x[20] = np.inf
    wrapper = getattr(keras.optimizers, "LossScaleOptimizer", None) or keras.mixed_precision.LossScaleOptimizer
    return fit_with(keras, strategy, lambda: wrapper(keras.optimizers.SGD(0.1)), x)


@feature("`BatchNormalization`: moving statistics equal on both workers", workers_agree, "works")
def batch_normalization(keras, strategy):
    with scope_of(strategy):
        layer = keras.layers.BatchNormalization(momentum=0.8)
        model = compile_model(keras, make_model(keras, keras.layers.Dense(5), layer))
    fit(model, *make_rows())
    return {"moving statistics": layer.get_weights()[2:]}


@feature("`Dropout` after `set_random_seed`: replicas draw different masks", workers_differ, "works")
def dropout(keras, strategy):
    """Both workers set the same seed, as reproducible scripts do. Without it, Keras 2 draws different masks too."""
    import tensorflow as tf

    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)

    @tf.function
    def draw():
        return strategy.run(lambda: layer(tf.ones([8, 32]), training=True))

    return {"masks": [value.numpy() for _ in range(3) for value in strategy.experimental_local_results(draw())]}


@feature("`Embedding` with sparse gradients, Adam")
def embedding(keras, strategy):
    with scope_of(strategy):
        hidden = keras.layers.Embedding(50, 4), keras.layers.Flatten()
        model = compile_model(keras, make_model(keras, *hidden, columns=7), keras.optimizers.Adam(0.01))
    tokens = np.random.default_rng(2).integers(1, 20, (_STEPS * _BATCH, 7))
    fit(model, tokens, make_rows()[1])
    return weights_of(model)


@feature("Custom loop (`strategy.run`, `strategy.reduce`)")
def custom_loop(keras, strategy):
    import tensorflow as tf

    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model, optimizer = make_model(keras), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / _BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(make_rows()).batch(_BATCH))
    losses = [train(batch).numpy() for batch in batches]
    return {**weights_of(model), "losses": [np.asarray(losses)]}


@functools.cache
def make_strategy(library: str | None):
    """Returns the strategy of a library, or None. A process can make only one."""
    if library == "tensorflow.distribute":
        import tensorflow as tf

        return tf.distribute.MultiWorkerMirroredStrategy()
    return importlib.import_module(library).MultiWorkerMirroredStrategy() if library else None


def run_feature(name: str, setup: Setup) -> Arrays | None:
    strategy = make_strategy(setup.library)
    keras = importlib.import_module(setup.keras)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    return FEATURES[name].run(keras, strategy)


# The code below runs in the process that the user starts.


def try_feature(name: str, setup: Setup, pool: WorkerPool, expected: Arrays | None) -> Cell:
    try:
        results = pool.run(run_feature, name, setup)
    except WorkerError as error:
        cause = error.__cause__ or error
        return Cell(f"fails: {type(cause).__name__}", str(error).strip())
    if expected is None:
        return Cell("not offered")
    fault = FEATURES[name].judge(results, expected)
    return Cell(f"wrong: {fault}" if fault else FEATURES[name].verdict)


def run_all(names: list[str]) -> dict[str, dict[str, Cell]]:
    """The cells of the table, by feature and column."""
    cells: dict[str, dict[str, Cell]] = {name: {} for name in names}
    references = {}
    for keras in dict.fromkeys(setup.keras for setup in SETUPS):
        if importlib.util.find_spec(keras) is None:
            continue
        alone = Setup(f"{keras}, one device", keras, None)
        with alone.make_pool() as pool:
            references[keras] = {name: pool.run(run_feature, name, alone)[0] for name in names}
    for setup in SETUPS:
        if setup.keras not in references:
            for name in names:
                cells[name][setup.title] = Cell("not installed")
            continue
        with setup.make_pool() as pool:
            for name in names:
                cell = try_feature(name, setup, pool, references[setup.keras][name])
                cells[name][setup.title] = cell
                print(f"{setup.title}: {name}: {cell.text}", flush=True)
    return cells


def print_table(cells: dict[str, dict[str, Cell]]) -> None:
    table = rich.table.Table("2 workers", *(setup.title for setup in SETUPS), box=rich.box.MARKDOWN)
    for name, row in cells.items():
        table.add_row(*(rich.text.Text(text) for text in (name, *(row[setup.title].text for setup in SETUPS))))
    rich.console.Console(width=240).print(table)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("tensorflow", "keras", "tf_keras", "tfdist"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = version_of(name)
    return found


def main(_) -> None:
    names = [name for name in FEATURES if not FLAGS.only or any(part in name for part in FLAGS.only)]
    if not names:
        raise app.UsageError(f"No feature has {' or '.join(FLAGS.only)} in its name. There are: {', '.join(FEATURES)}.")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    cells = run_all(names)
    print_table(cells)
    if FLAGS.json:
        rows = {name: {title: dataclasses.asdict(cell) for title, cell in row.items()} for name, row in cells.items()}
        pathlib.Path(FLAGS.json).write_text(json.dumps({"versions": versions(), "cells": rows}, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
