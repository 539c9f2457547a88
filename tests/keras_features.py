"""The table of Keras features: each row is one function that trains, under any strategy or none.

A row returns what it computed: weights, history, predictions. `test_keras_features.py` runs every row on one device
and on several replicas and compares. Rows import nothing from the test and run in worker processes.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

STEPS = 10
BATCH = 8
ROWS: dict[str, "Row"] = {}


@dataclasses.dataclass(frozen=True)
class Row:
    """One feature.

    Attributes:
      run: Trains and returns what it computed.
      tolerance: Relative difference allowed to one device.
      exempt: Why the result may differ from one device altogether; replicas must agree all the same.
      same_bits: Whether two workers and two devices give the same bits.
    """

    run: Callable[["Place"], dict[str, Any]]
    tolerance: float = 1e-5
    exempt: str = ""
    same_bits: bool = True


@dataclasses.dataclass
class Place:
    """Where a row runs: its strategy, or `None` for one device, and a folder that all its workers share."""

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
def strategy_of(placement: str, compression: Any = None):
    if placement == "single":
        return None
    if placement.startswith("1x"):
        return tfdist.MirroredStrategy(compression=compression)
    return tfdist.MultiWorkerMirroredStrategy(compression=compression)


def run_row(name: str, placement: str, folder: str, compression: Any = None) -> dict[str, Any]:
    """Runs one row in this process; called in every worker of a placement."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy("float32")
    try:
        return ROWS[name].run(Place(strategy_of(placement, compression), folder, placement))
    finally:
        keras.mixed_precision.set_global_policy("float32")


# What rows are made of.


def data(rows=STEPS * BATCH, features=6, classes=3):
    """Rows of unlike mean, so that a step on the wrong share shows."""
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
    """What a row returns: numbers to compare with one device, and a digest that must be equal on all workers."""
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
    return [copy.numpy() for copy in getattr(value, "values", [value])]


def _agrees(variable):
    first, *others = _copies(variable)
    return all(first.tobytes() == other.tobytes() for other in others)


def _digest(variables):
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(_copies(variable)[0].tobytes())
    return digest.hexdigest()


# Ways to call a model.


@row()
def fit_numpy(place):
    model = built(place)
    return outcome(model, fit(model))


@row()
def fit_shuffled_two_epochs(place):
    model = built(place)
    x, y = data()
    keras.utils.set_random_seed(3)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
    # The order of rows within a batch follows the shard, so compare what does not depend on it: all of it.
    return outcome(model, history)


@row()
def evaluate_uneven(place):
    model = built(place, weighted_metrics=["mae"], loss="mse", make=lambda: one_output())
    x, y = data(37)
    loss = model.evaluate(x, y.astype("float32"), sample_weight=np.linspace(0, 1, 37), batch_size=BATCH, verbose=0)
    return outcome(model, loss=loss)


@row()
def predict_uneven(place):
    model = built(place)
    x, _ = data(37)
    return outcome(model, prediction=model.predict(x, batch_size=BATCH, verbose=0))


@row()
def on_batch(place):
    model = built(place)
    x, y = data()
    trained = [model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, 40, BATCH)]
    tested = model.test_on_batch(x[:BATCH], y[:BATCH])
    return outcome(model, trained=trained, tested=tested, predicted=model.predict_on_batch(x[:5]))


@row()
def run_eagerly(place):
    model = built(place, run_eagerly=True)
    x, y = data(36)
    return outcome(model, fit(model, x, y))


@row()
def steps_per_execution(place):
    model = built(place, steps_per_execution=4)
    history = fit(model)
    x, y = data(37)
    return outcome(
        model,
        history,
        evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0),
        predicted=model.predict(x, batch_size=BATCH, verbose=0),
    )


# Input.


@row()
def input_tf_data(place):
    model = built(place)
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    return outcome(model, model.fit(dataset, verbose=0).history)


@row()
def input_tf_data_infinite(place):
    model = built(place)
    dataset = tf.data.Dataset.from_tensor_slices(data()).repeat().batch(BATCH)
    return outcome(model, model.fit(dataset, steps_per_epoch=5, epochs=2, verbose=0).history)


@row()
def input_last_batch_short(place):
    model = built(place)
    x, y = data(37)
    history = fit(model, x, y, epochs=2)
    return outcome(model, history)


@row()
def input_last_batch_of_one_row(place):
    model = built(place)
    x, y = data(33)
    return outcome(model, fit(model, x, y, epochs=2))


@row()
def input_first_batch_does_not_divide(place):
    model = built(place)
    x, y = data(35)
    return outcome(model, model.fit(x, y, batch_size=7, verbose=0, shuffle=False).history)


@row()
def input_unequal_rows_per_worker(place):
    """One of two replicas reads 3 rows of each 8, the other 5; on one device the same global batches."""
    model = built(place)
    x, y = data()

    def dataset_fn(context):
        sizes = {1: [8], 2: [3, 5], 4: [1, 2, 3, 2]}[context.num_replicas_in_sync]
        local = len(sizes) // context.num_input_pipelines
        own = range(context.input_pipeline_id * local, (context.input_pipeline_id + 1) * local)

        def batches():
            for start in range(0, len(x), BATCH):
                for replica in own:
                    low = start + sum(sizes[:replica])
                    yield x[low : low + sizes[replica]], y[low : low + sizes[replica]]

        spec = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int64))
        return tf.data.Dataset.from_generator(batches, output_signature=spec)

    if place.strategy:
        dataset = place.strategy.distribute_datasets_from_function(dataset_fn)
    else:
        dataset = dataset_fn(tf.distribute.InputContext())
    return outcome(model, model.fit(dataset, verbose=0).history)


@row(exempt="a worker runs out of rows before the other: one device has no such thing", same_bits=False)
def input_one_worker_ends_early(place):
    model = built(place)
    x, y = data()

    def dataset_fn(context):
        rows = 40 - 16 * context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(4)

    dataset = place.strategy.distribute_datasets_from_function(dataset_fn) if place.strategy else (x[:40], y[:40])
    if not place.strategy:
        return outcome(model, fit(model, *dataset))
    history = model.fit(dataset, verbose=0).history
    if not np.isfinite(history["loss"]).all():
        raise AssertionError(f"loss {history['loss']}")
    return outcome(model, history)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        x, y = data()
        return x[index * BATCH : (index + 1) * BATCH], y[index * BATCH : (index + 1) * BATCH]


@row()
def input_py_dataset(place):
    model = built(place)
    return outcome(model, model.fit(Batches(), verbose=0, shuffle=False).history)


@row()
def input_generator(place):
    model = built(place)
    x, y = data()

    def batches():
        while True:
            for i in range(0, len(x), BATCH):
                yield x[i : i + BATCH], y[i : i + BATCH]

    return outcome(model, model.fit(batches(), steps_per_epoch=5, epochs=2, verbose=0).history)


def two_towers():
    a, b = layers.Input((6,), name="a"), layers.Input((6,), name="b")
    hidden = layers.Dense(5, activation="tanh")(layers.Concatenate()([a, b]))
    outputs = {"label": layers.Dense(3, name="label")(hidden), "value": layers.Dense(1, name="value")(hidden)}
    return keras.Model({"a": a, "b": b}, outputs)


@row()
def input_dict_several_outputs(place):
    with place.scope():
        model = two_towers()
        model.compile(
            "sgd",
            loss={"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"},
            loss_weights={"label": 1.0, "value": 0.5},
            metrics={"label": ["accuracy"], "value": ["mae"]},
        )
    x, y = data(36)
    targets = {"label": y, "value": x[:, :1]}
    history = fit(model, {"a": x, "b": x[:, ::-1]}, targets)
    predicted = model.predict({"a": x[:9], "b": x[:9]}, verbose=0)
    return outcome(model, history, label=predicted["label"], value=predicted["value"])


@row()
def input_nested(place):
    with place.scope():
        a, b = layers.Input((6,)), layers.Input((6,))
        model = keras.Model([a, {"b": b}], layers.Dense(3)(layers.Add()([a, b])))
        compiled(model)
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices(((x, {"b": x}), y)).batch(BATCH)
    return outcome(model, model.fit(dataset, verbose=0).history)


@row()
def validation_data(place):
    model = built(place)
    x, y = data(37)
    return outcome(model, fit(model, epochs=2, validation_data=(x, y)))


@row()
def validation_split(place):
    model = built(place)
    x, y = data(50)
    return outcome(model, fit(model, x, y, epochs=2, validation_split=0.25))


@row()
def class_weight(place):
    model = built(place)
    return outcome(model, fit(model, class_weight={0: 0.5, 1: 1.0, 2: 3.0}))


@row()
def sample_weight(place):
    model = built(place, weighted_metrics=["accuracy"])
    x, y = data(36)
    return outcome(model, fit(model, x, y, sample_weight=np.linspace(0, 2, 36)))


@row()
def masks_that_reach_the_loss(place):
    def tagger():
        tokens = layers.Input((7,))
        hidden = layers.Embedding(20, 4, mask_zero=True)(tokens)
        return keras.Model(tokens, {"tag": layers.Dense(3, name="tag")(hidden), "value": layers.Dense(1)(hidden)})

    x, _ = tokens(36)
    x *= np.arange(7) < np.arange(36)[:, None] % 7 + 1  # Sentences of unlike length, padded.
    y = {"tag": x % 3, "value": x[..., None] / 20.0}
    losses = {"tag": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"}
    weights = {"tag": np.linspace(0, 2, 36 * 7).reshape(36, 7), "value": np.linspace(1, 0, 36)[:, None]}
    model = built(place, tagger, loss=losses, metrics={"tag": "accuracy", "value": "mae"})
    return outcome(model, fit(model, x, y, sample_weight=weights, epochs=2))


@row()
def losses_by_sums_and_by_weights(place):
    return _losses_by_sums_and_by_weights(place)


# Replicas of a process take turns at each exchange.
@row()
def losses_by_sums_and_by_weights_eagerly(place):
    return _losses_by_sums_and_by_weights(place, run_eagerly=True)


def _losses_by_sums_and_by_weights(place, **arguments):
    x, y = data(36)
    label_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    losses = {"label": label_loss, "value": keras.losses.MeanSquaredError(reduction="sum")}
    optimizer = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    model = built(place, two_towers, optimizer=optimizer, loss=losses, metrics=None, **arguments)
    inputs, targets = {"a": x, "b": x[:, ::-1]}, {"label": y, "value": x[:, :1]}
    weights = {"label": np.linspace(0, 2, 36), "value": np.linspace(1, 0, 36)}
    history = fit(model, inputs, targets, sample_weight=weights, validation_data=(inputs, targets, weights))
    return outcome(model, history)


@row()
def losses_left_unreduced(place):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model = built(place, loss=loss, optimizer=lambda: keras.optimizers.SGD(0.01))
    x, y = data(40)
    weights = np.linspace(0, 2, 40)
    history = fit(model, x, y, sample_weight=weights, validation_data=(x, y, weights))
    fit(model, x[:29], y[:29])  # A short last batch.
    return outcome(model, history)


# Optimizers.


def _optimizer_row(name, tolerance=1e-5, **arguments):
    def run(place):
        model = built(place, optimizer=lambda: getattr(keras.optimizers, name)(**arguments), metrics=[])
        x, y = data(77 if "gradient_accumulation_steps" not in arguments else 46)
        return outcome(model, fit(model, x, y))

    suffix = "_".join(["", *arguments]) if arguments else ""
    run.__name__ = f"optimizer_{name.lower()}{suffix}"
    row(tolerance=tolerance)(run)


for _name in ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion"):
    _optimizer_row(_name)
_optimizer_row("Lamb")
_optimizer_row("Muon", exclude_layers=["dense_1"])
_optimizer_row("SGD", momentum=0.9, nesterov=True)
_optimizer_row("SGD", gradient_accumulation_steps=3)
_optimizer_row("Adam", gradient_accumulation_steps=2, global_clipnorm=0.3)
_optimizer_row("SGD", clipnorm=0.1)
_optimizer_row("SGD", clipvalue=0.01)
_optimizer_row("SGD", global_clipnorm=0.1)
_optimizer_row("SGD", use_ema=True, ema_overwrite_frequency=3)
_optimizer_row("SGD", weight_decay=0.1)
_optimizer_row("SGD", loss_scale_factor=8.0)


@row()
def learning_rate_schedule(place):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = built(place, optimizer=lambda: keras.optimizers.SGD(schedule))
    return outcome(model, fit(model))


@row()
def loss_scaling(place):
    inner = functools.partial(keras.optimizers.SGD, global_clipnorm=0.1)
    model = built(place, optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner(), dynamic_growth_steps=4))
    return outcome(model, fit(model), scale=model.optimizer.dynamic_scale)


@row()
def loss_scaling_skips_inf(place):
    """A row of one replica overflows: the step is skipped on all."""
    model = built(place, optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), metrics=[])
    x, y = data()
    x[20] = np.inf
    fit(model, x, y)
    return outcome(model, scale=model.optimizer.dynamic_scale, steps=model.optimizer.iterations)


@row(tolerance=2e-2)
def mixed_float16(place):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = built(place)
    return outcome(model, fit(model), scale=model.optimizer.dynamic_scale)


@row(tolerance=5e-2)
def mixed_bfloat16(place):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = built(place)
    return outcome(model, fit(model))


# Models.


@row()
def functional(place):
    def make():
        inputs = layers.Input((6,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.Add()([inputs, hidden])))

    model = built(place, make)
    return outcome(model, fit(model))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


@row()
def subclassed(place):
    model = built(place, Subclassed)
    return outcome(model, fit(model))


class CustomStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=prediction)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, y, prediction)


@row()
def custom_train_step(place):
    model = built(place, CustomStep, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2))
    x, y = data(37)
    history = fit(model, x, y, epochs=2)
    return outcome(model, history)


class InPython(layers.Layer):
    """Three times its input, by Python functions forward and back."""

    def call(self, x):
        def by_python(x):
            return tf.ensure_shape(tf.numpy_function(lambda x: 3 * x, [x], x.dtype), x.shape)

        @tf.custom_gradient
        def triple(x):
            return by_python(x), by_python

        return triple(x)


# TensorFlow runs Python functions one after another, also those of two replicas in one graph.
@row()
def python_functions(place):
    model = built(place, lambda: keras.Sequential([layers.Input((6,)), layers.Dense(5), InPython(), layers.Dense(3)]))
    return outcome(model, fit(model, epochs=2))


class AddLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


# TensorFlow's graph optimizer folds constants another way where two replicas share them in one graph: 3e-10 apart here,
# equal with tf.config.optimizer.set_experimental_options({"constant_folding": False}).
@row(same_bits=False)
def add_loss_and_regularizers(place):
    def make():
        regular = {
            "kernel_regularizer": keras.regularizers.L2(0.1),
            "activity_regularizer": keras.regularizers.L1(0.01),
        }
        return keras.Sequential([layers.Input((6,)), layers.Dense(5, **regular), AddLoss(), layers.Dense(3)])

    model = built(place, make)
    x, y = data(40)
    return outcome(model, fit(model, x, y, epochs=2))


# Replicas of a process take turns at each exchange, and Keras gathers losses in lists that they share.
@row()
def add_loss_around_exchanges_eagerly(place):
    def make():
        exchange = layers.BatchNormalization(synchronized=True)
        middle = [AddLoss(), layers.Dense(5, use_bias=False), exchange, layers.Dense(4, activity_regularizer="l2")]
        return keras.Sequential([layers.Input((6,)), *middle, AddLoss(), layers.Dense(3)])

    model = built(place, make, run_eagerly=True)
    x, y = data(24)
    return outcome(model, fit(model, x, y, epochs=2))


def normalized(**arguments):
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(5, use_bias=False),
            layers.BatchNormalization(momentum=0.8, **arguments),
            layers.Dense(3),
        ]
    )


@row(exempt="each replica normalises its own rows; the moving statistics agree all the same")
def batch_normalization(place):
    model = built(place, normalized)
    x, y = data(36)
    history = fit(model, x, y, epochs=2)
    return outcome(model, history, evaluated=model.evaluate(x, y, verbose=0), moving=model.layers[1].moving_mean)


@row(tolerance=1e-4)
def batch_normalization_synchronized(place):
    model = built(place, functools.partial(normalized, synchronized=True))
    x, y = data(36)
    history = fit(model, x, y)
    return outcome(model, history, evaluated=model.evaluate(x, y, verbose=0))


@row(exempt="replicas draw different masks")
def dropout(place):
    model = built(
        place, lambda: keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dropout(0.5), layers.Dense(3)])
    )
    history = fit(model)
    return outcome(model, history, predicted=model.predict(data(5)[0], verbose=0))


class Noise(layers.Layer):
    """Draws without a seed, from what Keras has for the whole program."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


@row(exempt="each replica draws its own noise")
def unseeded_noise(place):
    model = built(place, lambda: keras.Sequential([layers.Input((6,)), Noise(), layers.Dense(3)]))
    return outcome(model, fit(model))


def tokens(rows=36, length=7):
    rng = np.random.default_rng(1)
    return rng.integers(1, 20, (rows, length)), rng.integers(0, 3, rows)


@row()
def recurrent_over_embedding(place):
    model = built(
        place, lambda: keras.Sequential([layers.Input((7,)), layers.Embedding(20, 4), layers.LSTM(5), layers.Dense(3)])
    )
    x, y = tokens()
    return outcome(model, fit(model, x, y))


@row()
def embedding_adam_sparse(place):
    model = built(
        place,
        lambda: keras.Sequential([layers.Input((7,)), layers.Embedding(50, 4), layers.Flatten(), layers.Dense(3)]),
        optimizer=lambda: keras.optimizers.Adam(0.01),
    )
    x, y = tokens()
    return outcome(model, fit(model, x, y, epochs=2))


@row()
def embedding_sgd_sparse_clipped(place):
    model = built(
        place,
        lambda: keras.Sequential([layers.Input((7,)), layers.Embedding(50, 4), layers.Flatten(), layers.Dense(3)]),
        optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    )
    x, y = tokens()
    return outcome(model, fit(model, x, y))


class OverRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = layers.Dense(3)
        self.out.build((None, 1))
        self.built = True

    def call(self, x):
        return self.out(tf.reduce_mean(tf.cast(x, tf.float32), axis=1, keepdims=True))


@row()
def ragged_input_and_a_replica_without_rows(place):
    model = built(place, OverRagged)
    rows = tf.RaggedTensor.from_row_lengths(tf.range(1, 100) % 7, [3] * 33)
    dataset = tf.data.Dataset.from_tensor_slices((rows, data(33)[1])).batch(BATCH)
    return outcome(model, model.fit(dataset, verbose=0, epochs=2).history)


@row(tolerance=1e-4)
def convolutions_and_a_replica_without_rows(place):
    """Fused convolutions and reshapes fail on no rows; the last batch has one row."""
    model = built(
        place,
        lambda: keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.Conv2D(4, 3, activation="relu"),
                layers.BatchNormalization(synchronized=True),
                layers.Reshape((-1,)),
                layers.Dense(3),
            ]
        ),
    )
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(33, 8, 8, 1)).astype("float32"), rng.integers(0, 3, 33)
    history = fit(model, x, y, validation_data=(x, y))
    return outcome(model, history, predicted=model.predict(x, batch_size=BATCH, verbose=0))


def one_output(activation=None):
    return keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dense(1, activation=activation)])


@row()
def metrics_with_state(place):
    with place.scope():
        model = one_output("sigmoid")
        model.compile(
            "sgd",
            "binary_crossentropy",
            metrics=[keras.metrics.AUC(), keras.metrics.BinaryIoU(), keras.metrics.Precision()],
        )
    x, y = data(37)
    history = fit(model, x, (y > 0).astype("float32"), validation_data=(x, (y > 0).astype("float32")))
    return outcome(model, history)


@row()
def metrics_of_vectors(place):
    with place.scope():
        model = compiled(mlp(), metrics=[keras.metrics.F1Score(average=None)], loss="categorical_crossentropy")
    x, y = data(40)
    seen = []
    model.fit(
        x,
        keras.utils.to_categorical(y, 3),
        batch_size=BATCH,
        verbose=0,
        shuffle=False,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))],
    )
    shapes = [np.shape(log["f1_score"]) for log in seen]
    return outcome(model, shapes=shapes, f1=model.evaluate(x, keras.utils.to_categorical(y, 3), verbose=0)[1])


class MoreLogs(Subclassed):
    """Whose steps return more than Keras knows of, so that it takes logs as they are; which lists a metric twice."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    @property
    def metrics(self):
        return [*super().metrics, self.mean]

    def train_step(self, data):
        self.mean.reset_state()
        self.mean.update_state(data[0])
        mean = self.mean.result()
        self.mean.reset_state()
        return {**super().train_step(data), "mean_of_step": mean, "extra": tf.constant(1.0)}

    def test_step(self, data):
        logs = super().test_step(data)
        return {"error": 1.0 - logs["accuracy"], "area": logs["auc"]}


@row()
def logs_other_than_metrics(place):
    with place.scope():
        metrics = ["accuracy", keras.metrics.AUC(name="auc")]
        model = compiled(MoreLogs(), loss="categorical_crossentropy", metrics=metrics)
    x, y = data(37)
    y = keras.utils.to_categorical(y, 3)
    history = fit(model, x, y, validation_data=(x[:24], y[:24]))
    history.pop("val_error")  # Computed of a metric's result by the step itself, so a mean over replicas.
    return outcome(model, history)


# Callbacks.


@row()
def callbacks_that_decide(place):
    model = built(place)
    x, y = data(40)
    seen = []
    history = fit(
        model,
        x,
        y,
        epochs=8,
        validation_data=(x[:13], y[:13]),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])),
        ],
    )
    return outcome(model, history, seen=seen)


@row()
def callbacks_that_write(place):
    model = built(place)
    x, y = data(40)
    best, weights = os.path.join(place.folder, "best.keras"), os.path.join(place.folder, "e{epoch}.weights.h5")
    log, board = os.path.join(place.folder, "log.csv"), os.path.join(place.folder, "board")
    callbacks = tfdist.callbacks if place.strategy else keras.callbacks
    history = fit(
        model,
        x,
        y,
        epochs=2,
        validation_data=(x, y),
        callbacks=[
            callbacks.ModelCheckpoint(best, save_best_only=True),
            callbacks.ModelCheckpoint(weights, save_weights_only=True),
            callbacks.CSVLogger(log),
            callbacks.TensorBoard(board, histogram_freq=1),
        ],
    )
    if place.is_chief:
        files = sorted(os.listdir(place.folder))
        if files != ["best.keras", "board", "e1.weights.h5", "e2.weights.h5", "log.csv"]:
            raise AssertionError(f"files {files}")
        boards = os.listdir(os.path.join(board, "train"))
        if len(boards) != 1:
            raise AssertionError(f"event files {boards}")
        loaded = keras.models.load_model(best)
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
        with open(log) as lines:
            if len(list(lines)) != 3:
                raise AssertionError("log.csv has not one line an epoch")
    return outcome(model, history)


# Saving.


@row(exempt="BatchNormalization; what is saved must be the same whichever worker saves")
def save_and_load(place):
    model = built(place, normalized, optimizer="adam")
    fit(model)
    own = os.path.join(place.folder, f"worker{os.environ.get('TF_CONFIG', '')[-20:].count('1')}-{os.getpid()}")
    x, _ = data(9)
    before = model.predict(x, verbose=0)
    model.save(own + ".keras")
    model.save_weights(own + ".weights.h5")
    model.export(own + "-export", verbose=False)
    with place.scope():
        loaded = keras.models.load_model(own + ".keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), before)
    plain = keras.models.load_model(own + ".keras")
    np.testing.assert_allclose(plain.predict(x, verbose=0), before, rtol=1e-5, atol=1e-6)
    exported = tf.saved_model.load(own + "-export")
    np.testing.assert_allclose(exported.serve(x), before, rtol=1e-5, atol=1e-6)
    loaded.load_weights(own + ".weights.h5")
    history = fit(loaded)
    return outcome(loaded, history, before=before, variables=np.concatenate([np.ravel(w) for w in plain.get_weights()]))


# Custom loops, and more than one model.


@row()
def custom_loop(place):
    strategy = place.strategy or tf.distribute.get_strategy()
    with place.scope():
        model = mlp()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        model.optimizer = optimizer
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data(36)).batch(BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    losses = [float(train(batch)) for _ in range(2) for batch in dataset]
    return outcome(model, losses=losses)


@row()
def custom_loop_clips_and_scales(place):
    strategy = place.strategy or tf.distribute.get_strategy()
    with place.scope():
        model = mlp()
        model.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=0.05))
        model.optimizer.build(model.trainable_variables)
    optimizer = place.strategy.distributed_optimizer(model.optimizer) if place.strategy else model.optimizer
    x, y = data(40)
    x[20] = np.inf
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function
    def train(batch):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(loss_of(y, model(x))) / BATCH)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(step, args=batch)

    for batch in dataset:
        train(batch)
    return outcome(model, scale=model.optimizer.dynamic_scale)


@row()
def custom_loop_with_a_traced_step(place):
    """The step given to `strategy.run` is a `tf.function`, and its `if` is turned into a branch."""
    strategy = place.strategy or tf.distribute.get_strategy()
    with place.scope():
        model = keras.Sequential([layers.Input((6,)), layers.BatchNormalization(synchronized=True), layers.Dense(3)])
        model.optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
        model.optimizer.build(model.trainable_variables)
    optimizer = place.strategy.distributed_optimizer(model.optimizer) if place.strategy else model.optimizer
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data(40)).batch(BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
            if tf.reduce_sum(tf.cast(y, tf.float32)) < -1.0:
                loss = 0.0 * loss
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in dataset]
    return outcome(model, losses=losses)


@dataclasses.dataclass(frozen=True)
class Held:
    optimizer: keras.optimizers.Optimizer


class SeveralOptimizers(Subclassed):
    """Applies one optimizer twice a step, some that are kept in other things, and one in a branch every other step."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.others = [keras.optimizers.SGD(0.1, global_clipnorm=0.1)]
        self.pair = (keras.optimizers.SGD(0.02, clipnorm=0.05), None)
        self.held = Held(keras.optimizers.SGD(0.03, clipvalue=0.01))
        self.seldom = keras.optimizers.SGD(0.05, clipvalue=0.02)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            self.optimizer.apply(*self.gradients(x, y))
        for optimizer in (self.others[0], self.pair[0], self.held.optimizer):
            optimizer.apply(*self.gradients(x, y))
        gradients, variables = self.gradients(x, y)
        if not self.seldom.built:
            self.seldom.build(variables)
        due = tf.equal(self.optimizer.iterations.value % 4, 0)
        tf.cond(due, lambda: self.apply_seldom(gradients, variables), lambda: tf.zeros([]))
        rate = self.optimizer.learning_rate
        return {**self.compute_metrics(x, y, self(x)), "rate": rate, "steps": self.optimizer.iterations, "due": due}

    def apply_seldom(self, gradients, variables):
        self.seldom.apply(gradients, variables)
        return tf.zeros([])

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        return tape.gradient(loss, variables), variables


@row()
def several_optimizers_in_a_custom_step(place):
    model = built(place, SeveralOptimizers, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2))
    x, y = data(37)
    return outcome(model, fit(model, x, y))


class UpdatesInALoop(Subclassed):
    """Several updates in a step, in a loop of TensorFlow's."""

    def train_step(self, data):
        x, y = data
        self(x)
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)

        def update(number):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return [number + 1]

        tf.while_loop(lambda number: number < 3, update, [tf.constant(0)])
        return self.compute_metrics(x, y, self(x))


# Two replicas of a process have a loop each, by which TensorFlow tells collectives apart.
@row()
def updates_in_a_loop(place):
    model = built(place, UpdatesInALoop, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2))
    x, y = data(37)
    return outcome(model, fit(model, x, y))


@row()
def optimizer_multi(place):
    def make():
        inner = keras.optimizers.SGD(0.1, global_clipnorm=0.05), keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(lambda variable: inner["bias" in variable.path])

    model = built(place, optimizer=make)
    x, y = data(37)
    return outcome(model, fit(model, x, y))


@row()
def predict_other_than_rows(place):
    """Two rows of output for each of input."""
    with place.scope():
        inputs = layers.Input((6,))
        model = keras.Model(inputs, Halves()(layers.Dense(4)(inputs)))
    return outcome(model, predicted=model.predict(data(33)[0], batch_size=BATCH, verbose=0))


class Halves(layers.Layer):
    def call(self, x):
        return tf.reshape(x, [-1, x.shape[1] // 2])


@row()
def weight_constraints(place):
    model = built(place, functools.partial(mlp, kernel_constraint=keras.constraints.MaxNorm(0.5)))
    return outcome(model, fit(model))


@row()
def two_models(place):
    first, second = built(place), built(place, Subclassed, optimizer="adam")
    x, y = data(20)
    for _ in range(2):
        fit(first, x, y)
        history = fit(second, x, y)
    return outcome(second, history, first=first.get_weights()[0])
