"""The `Row` class, the places where rows run, and helpers of the rows."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import tfdist
from tfdist.strategies.sharding import weight_creation
from tfdist.strategies.sharding.sharded_state import ShardedState

STEPS = 10
BATCH = 8
ROWS: dict[str, "Row"] = {}


@dataclasses.dataclass(frozen=True)
class Row:
    """A Keras feature.

    Attributes:
      run: Function that trains, and returns results for comparison; see `outcome`.
      placements: Where the row runs by default, such as "2x1" for two workers of one device each. A row takes seconds,
        so it is `exhaustive` elsewhere. Two workers suit rows whose data, outputs or files depend on the number of
        workers. Two devices suit models, losses and optimizers: replicas of a process compute as those on workers do.
      tolerance: Largest relative difference from one device.
      exempt: Why the result may differ from one device, or empty; replicas must agree nevertheless.
      same_bits: Whether two workers and two devices give the same bits.
    """

    run: Callable[["Place"], dict[str, Any]]
    placements: tuple[str, ...] = ()
    tolerance: float = 1e-5
    exempt: str = ""
    same_bits: bool = True


@dataclasses.dataclass
class Place:
    """Where a row runs: a strategy, or None for one device, and a folder that all workers share."""

    strategy: Any
    folder: str
    name: str

    def scope(self):
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    @property
    def is_chief(self) -> bool:
        return tfdist.cluster.is_chief()


def row(**arguments):
    def add(run):
        ROWS[run.__name__] = Row(run, **arguments)
        return run

    return add


@functools.cache
def strategy_of(placement: str, compression: Any = None, **options: Any):
    if placement == "single":
        return None
    if placement.startswith("1x"):
        return tfdist.MirroredStrategy(compression=compression, **options)
    return tfdist.MultiWorkerMirroredStrategy(compression=compression, **options)


def start_anew(seed: int = 1) -> None:
    """Resets Keras as in a new process. Skips garbage collection, which takes a sixth of a short training's time."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)


@contextlib.contextmanager
def small_weights_too():
    """Divides all weights but the smallest, so that models of tests stay small."""
    before, weight_creation.FEWEST_ELEMENTS = weight_creation.FEWEST_ELEMENTS, 16
    try:
        yield
    finally:
        weight_creation.FEWEST_ELEMENTS = before


def run_row(name: str, placement: str, folder: str, compression: Any = None, **options: Any) -> dict[str, Any]:
    """Runs one row in this process. Every worker of a placement calls it. `options` are those of the strategy."""
    start_anew()
    keras.mixed_precision.set_global_policy("float32")
    try:
        with small_weights_too():
            return ROWS[name].run(Place(strategy_of(placement, compression, **options), folder, placement))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def data(rows=STEPS * BATCH, features=6, classes=3):
    """Data with a different mean in each row, so that a step on the wrong share changes the result."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features)) + np.linspace(-1, 1, rows)[:, None]
    return x.astype("float32"), rng.integers(0, classes, rows)


def mlp(width=5, **dense):
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(width, activation="tanh", **dense), layers.Dense(3, **dense)]
    )


def compiled(model, optimizer="sgd", loss=None, **kwargs):
    kwargs.setdefault("metrics", ["accuracy"])
    model.compile(optimizer, loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True), **kwargs)
    return model


def built(place, make=mlp, **kwargs):
    with place.scope():
        if callable(kwargs.get("optimizer")):
            kwargs["optimizer"] = kwargs["optimizer"]()
        return compiled(make(), **kwargs)


def fit(model, x=None, y=None, **kwargs):
    if x is None:
        x, y = data()
    return model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, **kwargs).history


def outcome(model, history=None, **values):
    """Returns the result of a row: numbers to compare with one device, and a digest that all workers must share."""
    optimizer = getattr(model, "optimizer", None)
    variables = model.variables + (optimizer.variables if optimizer else [])
    return {
        "weights": [np.asarray(weight) for weight in model.get_weights()],
        "history": {name: np.asarray(numbers, "float64") for name, numbers in (history or {}).items()},
        "values": {name: np.asarray(value) for name, value in values.items()},
        "digest": _digest(variables),
        "replicas_agree": all(_agrees(variable) for variable in variables),
    }


def _copies(variable):
    value = getattr(variable, "value", variable)
    if isinstance(value, ShardedState):  # Replicas have different parts.
        return [value.numpy()]
    return [copy.numpy() for copy in getattr(value, "values", [value])]


def _agrees(variable):
    first, *others = _copies(variable)
    return all(first.tobytes() == other.tobytes() for other in others)


def _digest(variables):
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(_copies(variable)[0].tobytes())
    return digest.hexdigest()
