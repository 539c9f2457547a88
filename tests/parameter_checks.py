"""Small trainings of models with divided weights, which tests run in worker processes."""

import os
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops, optimizers

import sharding_checks
import tfdist
from keras_features import small_weights_too, start_anew
from keras_features import strategy_of as strategy
from strategy_checks import own_index
from tfdist.strategies import keras_calls
from tfdist.strategies.sharding import work_ahead
from tfdist.strategies.sharding.sharded_weight import ShardedWeight

WIDTH = 7


class OwnStep(keras.Model):
    """A model with a training step of its own: its loss is a mean over rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class UnknownLoss(OwnStep):
    """A model with a training step of its own: its loss grows with the root of the number of rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.sqrt(ops.sum(ops.square(y - self(x, training=True))))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class TwiceDifferentiated(OwnStep):
    """A model with a loss that contains gradients of its weights."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            loss += sum(ops.sum(ops.square(each)) for each in tape.gradient(loss, weights))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


def mlp(kind=keras.Model, **options):
    inputs = layers.Input((WIDTH,))
    hidden = layers.Dense(33, activation="tanh", **options)(inputs)
    hidden = layers.Dense(12, activation="gelu", **options)(layers.LayerNormalization()(hidden))
    return kind(inputs, layers.Dense(3)(hidden))


def shared():
    """Returns a model that uses a layer twice, and a weight in a branch."""
    inputs = layers.Input((WIDTH,))
    twice = layers.Dense(WIDTH, activation="tanh")
    return keras.Model(inputs, layers.Dense(3)(twice(twice(inputs))))


def conv():
    inputs = layers.Input((WIDTH,))
    hidden = layers.Conv1D(8, 3, activation="relu")(layers.Reshape((WIDTH, 1))(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.BatchNormalization()(hidden))))


def attention():
    inputs = layers.Input((WIDTH,))
    hidden = layers.Dense(8)(layers.Reshape((WIDTH, 1))(inputs))
    # The bias of keys would have no gradient but rounding, from which Adam makes updates.
    hidden = layers.MultiHeadAttention(2, 4, use_bias=False)(hidden, hidden)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))


def recurrent():
    inputs = layers.Input((WIDTH,))
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(6)(layers.Reshape((WIDTH, 1))(inputs))))


def embedding():
    inputs = layers.Input((WIDTH,))
    rows = layers.Lambda(lambda x: ops.cast(ops.abs(x) * 7, "int32"))(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.Embedding(40, 4)(rows))))


def mixed():
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        return mlp()
    finally:
        keras.mixed_precision.set_dtype_policy(before)


MODELS = {
    "mlp": mlp,
    "shared": shared,
    "conv": conv,
    "attention": attention,
    "recurrent": recurrent,
    "embedding": embedding,
    "mixed": mixed,
    "own_step": lambda: mlp(OwnStep),
    "constrained": lambda: mlp(kernel_constraint="max_norm", kernel_regularizer="l2"),
    "unknown_loss": lambda: mlp(UnknownLoss),
    "twice_differentiated": lambda: mlp(TwiceDifferentiated),
}
OPTIONS = {
    "run_eagerly": {"run_eagerly": True},
    "several_steps": {"steps_per_execution": 2},
}


def build(name, place, optimizer=None):
    start_anew()
    with place.scope(), small_weights_too():
        model = MODELS.get(name, mlp)()
        model.compile((optimizer or (lambda: optimizers.Adam(0.01)))(), "mse", **OPTIONS.get(name, {}))
    return model


def is_divided(variable):
    return isinstance(variable.value, ShardedWeight)


def trained(placement, name, sharding, **options):
    """Trains a model. Returns its losses, weights and predictions, and whether any weight is divided."""
    model = build(name, strategy(placement, model_sharding=sharding, **options))
    losses = sharding_checks.train(model)
    x, y = sharding_checks.data()
    evaluated = model.evaluate(x, y, batch_size=20, verbose=0)
    predicted = model.predict(x[:10], batch_size=4, verbose=0)
    result = {"losses": [*losses, evaluated], "weights": model.get_weights(), "predicted": predicted}
    return result | {"divided": sum(is_divided(each) for each in model.variables)}


def trained_with(placement, optimizer, sharding, **options):
    """Trains a model with one of the optimizers of `sharding_checks`."""
    make = {**sharding_checks.OPTIMIZERS, **sharding_checks.ROUNDED}[optimizer]
    model = build("mlp", strategy(placement, model_sharding=sharding, **options), make)
    losses = sharding_checks.train(model)
    state = [variable.numpy() for variable in model.optimizer.variables if "accum" not in variable.path]
    return {"losses": losses, "weights": model.get_weights(), "state": state}


def unequal_shares(placement, sharding):
    """Trains in a custom loop on batches that do not divide evenly among replicas, the last one with one row."""
    place = strategy(placement, model_sharding=sharding)
    model = build("own_step", place)
    x, y = sharding_checks.data()
    model.fit(x[:25], y[:25], batch_size=12, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def round_trip(placement, folder, saved_with, loaded_with):
    """Trains, saves and loads a model, and trains on. Returns the results, and those of the same model unloaded."""
    model = build("mlp", strategy(placement, model_sharding=saved_with))
    sharding_checks.train(model)
    path = os.path.join(folder, f"{own_index() if placement.startswith('2') else 0}.keras")
    model.save(path)
    with strategy(placement, model_sharding=loaded_with).scope(), small_weights_too():
        loaded = keras.models.load_model(path)
    return [{"losses": sharding_checks.train(each), "weights": each.get_weights()} for each in (loaded, model)]


def reported(placement, **options):
    """Returns the bytes of divided weights on each replica of this worker, of the whole weights, and the report."""
    place = strategy(placement, model_sharding="parameters", **options)
    model = build("mlp", place)
    with place.scope():
        model.optimizer.build(model.trainable_variables)
    divided = [variable for variable in model.variables if is_divided(variable)]
    parts = [place.experimental_local_results(variable.value) for variable in divided]
    taken = [sum(part.numpy().nbytes for part in replica) for replica in zip(*parts, strict=True)]
    return taken, sum(int(np.prod(variable.shape)) * 4 for variable in divided), place.memory_report()


def returns_of_small_blocks(sharding):
    """Returns how often the process returns freed memory in two `fit`s of a model."""
    with mock.patch.object(keras_calls, "return_small_blocks") as returns:
        model = build("mlp", strategy("1x2", model_sharding=sharding))
        sharding_checks.train(model)
        sharding_checks.train(model)
    return returns.call_count


def exchanges(number):
    """Returns how many gathers, and sums of gradients, of all replicas a training step of a deep model has."""
    counts = {"all_gather_parts": 0, "reduce_scatter_tensors": 0}
    place = strategy("1x2", model_sharding="parameters")
    for name in counts:
        _count(place.extended.parts, name, counts)
    start_anew()
    with place.scope(), small_weights_too():
        model = keras.Sequential(
            [layers.Input((WIDTH,)), *(layers.Dense(WIDTH, use_bias=False) for _ in range(number))]
        )
        model.compile("sgd", "mse")
    x, _ = sharding_checks.data()
    model.fit(x, x, batch_size=24, verbose=0)
    return tuple(counts.values())


def _count(owner, name, counts):
    """Counts how often a step traces a call of a method."""
    method = getattr(owner, name)

    def counted(*args, **kwargs):
        counts[name] += not tf.executing_eagerly()
        return method(*args, **kwargs)

    setattr(owner, name, counted)


def alive(number):
    """Returns how many weights, whole gradients and updates may be in memory at once in a step of a deep model.

    Every weight counts as large. What is not before another operation in the graph may run together with it.
    """
    place = strategy("1x2", model_sharding="parameters")
    gathers = _recorded(place.extended.reducer, "gather_parts", lambda parts: parts)
    sums = _recorded(
        place.extended.reducer, "reduce", lambda request: request.values if any(request.partitions) else []
    )
    start_anew()
    with place.scope(), small_weights_too(), mock.patch.object(work_ahead, "AHEAD_BYTES", 0):
        model = keras.Sequential(
            [layers.Input((WIDTH,)), *(layers.Dense(WIDTH, use_bias=False) for _ in range(number))]
        )
        model.compile("adam", "mse")
        x, _ = sharding_checks.data()
        model.fit(x, x, batch_size=24, verbose=0)
    graph = gathers[0][0].graph  # Keras traces a step several times.
    of_first = [each for each in graph.get_operations() if each.device.endswith("CPU:0")]
    assigned = [each for each in of_first if each.type == "AssignVariableOp"]
    assigned = [each for each in assigned if each.inputs[1].shape == gathers[0][0].shape]
    return (
        _most_at_once([(part.op, list(_uses(whole))) for part, whole in gathers if part.graph is graph]),
        _most_at_once([(gradient.op, [part.op]) for gradient, part in sums if part.graph is graph]),
        _most_at_once([(each, [each]) for each in assigned]),
    )


def _recorded(owner, name, given):
    """Returns a list of the first replica's tensors that a method takes and returns, while it is traced."""
    method, found = getattr(owner, name), []

    def recorded(argument, *args, **kwargs):
        results = method(argument, *args, **kwargs)
        step = args[-1]
        if step.replica == 0 and not tf.executing_eagerly() and given(argument):
            found.extend(zip(given(argument), results, strict=True))
        return results

    setattr(owner, name, recorded)
    return found


def _uses(tensor):
    """Yields the operations that compute with a tensor."""
    for operation in tensor.consumers():
        places = [i for i, each in enumerate(operation.inputs) if each is tensor]
        if operation.type in ("Identity", "IdentityN", "Reshape", "EnsureShape"):
            yield from _uses(operation.outputs[places[0]])
        else:
            yield operation


def _most_at_once(lifetimes):
    """Returns how many of these (first operation, last operations) may be in memory at once, at most.

    This is the number of chains, one after the other in the graph, that they make up.
    """
    before = [sharding_checks.before(first) for first, _ in lifetimes]
    later = [[i for i, known in enumerate(before) if known.issuperset(last)] for _, last in lifetimes]
    follows = {}  # For each that follows another in its chain, that one.

    def extend(i, tried):
        for other in later[i]:
            if other not in tried:
                tried.add(other)
                if other not in follows or extend(follows[other], tried):
                    follows[other] = i
                    return True
        return False

    return len(lifetimes) - sum(extend(i, set()) for i in range(len(lifetimes)))


class Routed(keras.Model):
    """Runs eagerly, and takes one of two layers by the first row; with `reads_both` it calls both before."""

    def __init__(self, reads_both):
        super().__init__()
        self.first, self.second, self.reads_both = layers.Dense(WIDTH), layers.Dense(WIDTH), reads_both

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        is_first = float(x[0, 0]) > 0
        if self.reads_both:
            of_first, of_second = self.first(x), self.second(x)
            return of_first if is_first else of_second
        return (self.first if is_first else self.second)(x)


def refused_unlike_branches(placement, reads_both):
    """Trains on a first row per replica that leads to another layer."""
    start_anew()
    with strategy(placement, model_sharding="parameters").scope(), small_weights_too():
        model = Routed(reads_both)
        model.compile("sgd", "mse", run_eagerly=True)
        model.build((None, WIDTH))
        x = np.repeat([[1.0], [-1.0]], 4, axis=0) * np.ones((1, WIDTH), "float32")
        model.fit(x, x, batch_size=8, shuffle=False, verbose=0)


class Conditional(Routed):
    """Takes one of two layers by the first row, in a graph."""

    def call(self, x):
        return tf.cond(x[0, 0] > 0, lambda: self.first(x), lambda: self.second(x))


def refused_branch():
    start_anew()
    place = strategy("1x2", model_sharding="parameters")
    with place.scope(), small_weights_too():
        model = Conditional(reads_both=False)
        model.build((None, WIDTH))
    place.run(tf.function(lambda: model(tf.ones([2, WIDTH]))))


def refused_unknown_loss():
    sharding_checks.train(build("unknown_loss", strategy("1x2", model_sharding="parameters")))


def refused_gradients_of_gradients():
    sharding_checks.train(build("twice_differentiated", strategy("1x2", model_sharding="parameters")))


def refused_optimizer():
    model = build("mlp", strategy("1x2", model_sharding="parameters"), lambda: optimizers.Adafactor(0.01))
    sharding_checks.train(model)


def refused_export():
    model = build("mlp", strategy("1x2", model_sharding="parameters"))
    with tempfile.TemporaryDirectory() as folder:
        model.export(os.path.join(folder, "exported"))


def refused_apply():
    place = strategy("1x2", model_sharding="parameters")
    model = build("mlp", place, lambda: optimizers.SGD(0.1))
    weights = model.trainable_variables
    place.run(tf.function(lambda: model.optimizer.apply([tf.ones(each.shape) for each in weights], weights)))


def saved_by_callback(folder):
    """Trains with a `ModelCheckpoint` of the weights only. Returns the weights, and those of the file."""
    model = build("mlp", strategy("2x1", model_sharding="parameters"))
    path = os.path.join(folder, "model.weights.h5")
    callback = tfdist.callbacks.ModelCheckpoint(path, save_weights_only=True)
    x, y = sharding_checks.data()
    model.fit(x, y, batch_size=24, verbose=0, callbacks=[callback])
    weights = model.get_weights()
    model.load_weights(path)
    return weights, model.get_weights()
