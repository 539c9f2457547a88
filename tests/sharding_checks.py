"""Small trainings with sharded optimizer state, which tests run in worker processes."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

import tfdist
from keras_features import start_anew
from keras_features import strategy_of as strategy
from strategy_checks import own_index
from tfdist.strategies.sharding.sharded_state import ShardedState

ROWS, BATCH = 96, 24
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optimizers.Lion(0.001),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adamax": lambda: optimizers.Adamax(0.01),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.01),
    "average": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "average_at_end": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, weight_decay=0.1),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "muon": lambda: optimizers.Muon(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
}
# TensorFlow computes 1 / sqrt(x) differently at the end of a tensor, and norms are summed in another order.
ROUNDED = {
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
}


def data():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(ROWS, 7)).astype("float32")
    return x, (x @ draws.normal(size=(7, 3))).astype("float32")


def compiled(optimizer):
    model = keras.Sequential(
        [
            *(layers.Input((7,)), layers.Dense(33, activation="tanh"), layers.BatchNormalization()),
            *(layers.Dense(10), layers.Dense(3)),
        ]
    )
    model.compile({**OPTIMIZERS, **ROUNDED}[optimizer](), "mse")
    return model


def build(optimizer, place):
    start_anew()
    with place.scope():
        return compiled(optimizer)


def train(model):
    return model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]


def results(model, losses):
    """Returns what a training has computed, and the bytes of optimizer state on each replica of this worker."""
    place = model.distribute_strategy
    state = [variable.numpy() for variable in model.optimizer.variables if "gradient_accum" not in variable.path]
    local = [place.experimental_local_results(variable.value) for variable in model.optimizer.variables]
    sharded = [values for values, of in zip(local, model.optimizer.variables, strict=True) if is_sharded(of)]
    taken = [sum(value.numpy().nbytes for value in replica) for replica in zip(*sharded, strict=True)]
    whole = sum(np.prod(each.shape) * 4 for each in model.optimizer.variables if is_sharded(each))
    return {"losses": losses, "weights": model.get_weights(), "state": state, "bytes": taken, "whole": int(whole)}


def is_sharded(variable):
    return isinstance(variable.value, ShardedState)


def trained(placement, optimizer, sharding, **options):
    model = build(optimizer, strategy(placement, model_sharding=sharding, **options))
    return results(model, train(model))


class Named(layers.Layer):
    """Multiplies by a matrix with a name that ends as those of moving averages."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], 3), name="moving_average")

    def call(self, x):
        return x @ self.matrix


def trained_with_the_name_of_an_average(sharding):
    start_anew()
    with strategy("1x2", model_sharding=sharding).scope():
        model = keras.Sequential([layers.Input((7,)), Named()])
        model.compile(optimizers.Adafactor(0.01), "mse")
    return results(model, train(model))


def round_trip(placement, folder, saved_with, loaded_with, **options):
    """Trains, saves and loads a model, and trains on. Returns the results, and those of the same model unloaded."""
    model = build("adam", strategy(placement, model_sharding=saved_with, **options))
    train(model)
    path = os.path.join(folder, f"{own_index() if placement.startswith('2') else 0}.keras")
    model.save(path)
    with strategy(placement, model_sharding=loaded_with).scope():
        loaded = keras.models.load_model(path)
    return results(loaded, train(loaded)), results(model, train(model))


def saved(placement, path, sharding, optimizer="adam"):
    """Trains and saves a model; workers but the chief write to a path of their own. Returns its weights and state."""
    model = build(optimizer, strategy(placement, model_sharding=sharding) or tf.distribute.get_strategy())
    train(model)
    model.save(path if tfdist.cluster.is_chief() else f"{path}-{own_index()}.keras")
    return model.get_weights(), [variable.numpy() for variable in model.optimizer.variables]


def loaded(placement, path, sharding):
    """Loads a model and trains on. Returns the weights and state that were loaded, and the losses afterwards."""
    with (strategy(placement, model_sharding=sharding) or tf.distribute.get_strategy()).scope():
        model = keras.models.load_model(path)
    state = [variable.numpy() for variable in model.optimizer.variables]
    return model.get_weights(), state, train(model)


def saved_by_callback(placement, folder, whole):
    """Trains with a `ModelCheckpoint`. Returns the results, and those of the loaded file on the chief."""
    place = strategy(placement, model_sharding="optimizer")
    model = build("adam", place)
    path = os.path.join(folder, "model.keras" if whole else "model.weights.h5")
    callback = tfdist.callbacks.ModelCheckpoint(path, save_weights_only=not whole)
    losses = model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    result = results(model, losses.history["loss"])
    if not whole:
        model.load_weights(path)
        return result, result
    loaded = keras.models.load_model(path)
    state = [variable.numpy() for variable in loaded.optimizer.variables]
    return result, {**result, "weights": loaded.get_weights(), "state": state}


def report(placement, sharding):
    place = strategy(placement, model_sharding=sharding)
    before = place.memory_report()
    model = build("adam", place)
    with place.scope():
        model.optimizer.build(model.trainable_variables)
    after = place.memory_report()
    return before.optimizer_state, after.optimizer_state - before.optimizer_state, after, model.count_params()


def memory_of(optimizer, sharding):
    """Returns bytes of weights, optimizer state and accumulated gradients of the only model of a strategy."""
    place = tfdist.MirroredStrategy(model_sharding=sharding)
    model = build(optimizer, place)
    with place.scope():
        model.optimizer.build(model.trainable_variables)
    report = place.memory_report()
    return report.weights, report.optimizer_state, report.accumulated_gradients


def memory_in_groups(kind, sharding, group_size):
    """Returns the memory report of the only model of a strategy, a model with layers of usual widths."""
    place = tfdist.MirroredStrategy(model_sharding=sharding, shard_group_size=group_size)
    start_anew()
    with place.scope():
        model = compiled_large(kind)
        model.optimizer.build(model.trainable_variables)
    return place.memory_report()


def compiled_large(kind):
    model = large(kind)
    model.compile(OPTIMIZERS["adam"](), "mse")
    return model


def large(kind):
    """Returns a model with layers of usual widths."""
    if kind == "mlp":
        return keras.Sequential([layers.Input((784,)), layers.Dense(512), layers.Dense(512), layers.Dense(10)])
    if kind == "cnn":
        convolutions = [layers.Conv2D(64, 3), layers.BatchNormalization(), layers.Conv2D(128, 3), layers.Flatten()]
        return keras.Sequential([layers.Input((8, 8, 3)), *convolutions, layers.Dense(100)])
    x = inputs = layers.Input((16,), dtype="int32")
    x = layers.Embedding(2000, 128)(x)
    x = x + layers.MultiHeadAttention(4, 32)(x, x)
    x = x + layers.Dense(128)(layers.Dense(512)(layers.LayerNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10)(x))


def bytes_of_state(placement, optimizer, kind):
    """Returns the bytes of optimizer state on the fullest replica, and what they would be without sharding."""
    place = strategy(placement, model_sharding="optimizer")
    with place.scope():
        model, made = large(kind), OPTIMIZERS[optimizer]()
        made.build(model.trainable_variables)
    parts = [[each.numpy().nbytes for each in variable.value.values] for variable in made.variables]
    return max(map(sum, zip(*parts, strict=True))), sum(variable.numpy().nbytes for variable in made.variables)


def read_outside():
    """Returns whether reads of state outside of the scope, of several kinds, give the whole value."""
    place = strategy("1x2", model_sharding="optimizer")
    model = build("adam", place)
    with place.scope():
        model.optimizer.build(model.trainable_variables)
    state = next(each for each in model.optimizer.variables if is_sharded(each))
    state.assign(np.arange(np.prod(state.shape)).reshape(state.shape))
    reads = [state.numpy(), np.asarray(state), state + 0, state.value + 0, tf.identity(state.value), state.value[:]]
    return [np.array_equal(each, np.arange(np.prod(state.shape)).reshape(state.shape)) for each in reads]


def sums_before_gathers():
    """Returns, for each gather of new weights in a step, how many sums of gradients it waits for."""
    start_anew()
    place = strategy("1x2", model_sharding="optimizer")
    with place.scope():
        model = keras.Sequential([layers.Input((400,)), *(layers.Dense(400) for _ in range(4))])
        optimizer = place.distributed_optimizer(optimizers.AdamW())
        optimizer.build(model.trainable_variables)

    def on_replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones([2, 400])))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    operations = tf.function(lambda: place.run(on_replica)).get_concrete_function().graph.get_operations()
    gathers = [before(each) for each in operations if each.type == "CollectiveGatherV2"]
    sums = [sum(each.type == "CollectiveAllToAllV2" for each in others) for others in gathers]
    return [count for count in sums if count]  # Without the exchange of the numbers of rows.


def before(operation):
    """Returns all operations of a graph for which one of them waits."""
    found, ahead = set(), [operation]
    while ahead:
        each = ahead.pop()
        new = {*(tensor.op for tensor in each.inputs), *each.control_inputs} - found
        found |= new
        ahead += new
    return found


class Hidden(optimizers.Optimizer):
    """An optimizer that scales gradients by a number for each weight, in a dict, which only the owner would update."""

    def build(self, variables):
        super().build(variables)
        self.counts = {}
        for variable in variables:
            self.add_variable_from_reference(variable, name="unused")
            self.counts[variable.path] = self.add_variable((), name="count")

    def update_step(self, gradient, variable, learning_rate):
        count = next(iter(self.counts.values()))
        self.assign_add(count, 1.0)
        self.assign_sub(variable, gradient * learning_rate / count)


def hidden_state():
    OPTIMIZERS["hidden"] = lambda: Hidden(0.1)
    return train(build("hidden", strategy("1x2", model_sharding="optimizer")))


def plain_apply(placement):
    """Applies gradients in a custom loop without a view of the optimizer."""
    place = strategy(placement, model_sharding="optimizer")
    model = build("adam", place)
    variables = model.trainable_variables
    place.run(tf.function(lambda: model.optimizer.apply([tf.ones(v.shape) for v in variables], variables)))
