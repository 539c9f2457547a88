"""Small trainings with embeddings whose rows are divided among replicas, which tests run in worker processes."""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

import tfdist
from backup_checks import BreakOff, BrokenOffError
from keras_features import start_anew
from keras_features import strategy_of as strategy
from strategy_checks import own_index
from tfdist.callbacks import BackupAndRestore
from tfdist.layers import ShardedEmbedding
from tfdist.strategies.sharding import table_rows

TABLE, LENGTH, ROWS, BATCH = (11, 5), 4, 50, 24  # The last batch has 2 rows, fewer than replicas of "2x2".
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lion": lambda: optimizers.Lion(0.001),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.001),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.01),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.01),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "average": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "average_at_end": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
}


def data(rows=ROWS):
    """Rows of ids that repeat within a row and a batch, two of them negative, and targets."""
    draws = np.random.default_rng(0)
    x = draws.integers(-2, TABLE[0], (rows, LENGTH))
    return x, draws.normal(size=(rows, 3)).astype("float32")


def scope_of(place):
    return contextlib.nullcontext() if place is None else place.scope()


def embedding(place, *args, **kwargs):
    """A layer of Keras on one device, and of tfdist on several."""
    return (layers.Embedding if place is None else ShardedEmbedding)(*args, name="table", **kwargs)


def sequential(place):
    return keras.Sequential(
        [layers.Input((LENGTH,), dtype="int64"), embedding(place, *TABLE), layers.Flatten(), layers.Dense(3)]
    )


def built(place, optimizer, make=sequential, **options):
    start_anew()
    with scope_of(place):
        model = make(place)
        model.compile(OPTIMIZERS[optimizer](), options.pop("loss", "mse"), **options)
    return model


def results(model, losses):
    optimizer = model.optimizer
    return {
        "losses": losses,
        "weights": model.get_weights(),
        "state": [each.numpy() for each in optimizer.variables if "gradient_accum" not in each.path],
    }


def fitted(model, x=None, y=None, **options):
    if x is None:
        x, y = data()
    return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **options).history["loss"]


def trained(placement, optimizer, **options):
    model = built(strategy(placement, **options), optimizer)
    losses = fitted(model)
    losses += [model.evaluate(*data(), batch_size=BATCH, verbose=0)]
    return results(model, [*losses, model.predict(data()[0], batch_size=BATCH, verbose=0)])


def trained_in_blocks(placement, optimizer, rows):
    """As `trained`, where optimizers update blocks of this number of rows."""
    with mock.patch.multiple(table_rows, _LEAST_BLOCK_BYTES=TABLE[1] * 4 * rows, _MOST_BLOCKS=TABLE[0]):
        return trained(placement, optimizer)


FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def with_feature(placement, name):
    return FEATURES[name](strategy(placement))


@feature
def run_eagerly(place):
    model = built(place, "adam", run_eagerly=True)
    return results(model, fitted(model))


@feature
def steps_per_execution(place):
    model = built(place, "adagrad", steps_per_execution=3)
    return results(model, fitted(model))


class Subclassed(keras.Model):
    """A model that is built late, and looks up two tables, one of them twice."""

    def __init__(self, place):
        super().__init__()
        self.one = embedding(place, *TABLE)
        self.two = (layers.Embedding if place is None else ShardedEmbedding)(20, 3, mask_zero=True, name="two")
        self.recurrent, self.head = layers.LSTM(4), layers.Dense(3)

    def call(self, x):
        own = tf.reduce_mean(self.one(x), axis=1) + tf.reduce_sum(self.one((x + 1) % TABLE[0]), axis=1)
        return self.head(tf.concat([own, self.recurrent(self.two(x + 2))], axis=1))


@feature
def subclassed(place):
    model = built(place, "adam", Subclassed)
    return results(model, fitted(model))


class WithTrainStep(Subclassed):
    """A step of the user's own."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@feature
def train_step(place):
    model = built(place, "adam", WithTrainStep)
    with scope_of(place):
        model(data()[0][:1])
    fitted(model)
    return results(model, [])  # The step logs the loss of its own rows.


def loop_of(place, name):
    """Returns a model, and a step of a custom loop that trains it on a batch for each replica."""
    model, around = built(place, name), place or tf.distribute.get_strategy()
    with scope_of(place):
        model.optimizer.build(model.trainable_variables)
    optimizer = model.optimizer if place is None else place.distributed_optimizer(model.optimizer)

    @tf.function
    def train(batch):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(y - model(x))) / BATCH
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return around.reduce("SUM", around.run(step, args=batch), axis=None)

    return model, train


@feature
def custom_loop(place):
    model, train = loop_of(place, "adam")
    dataset = tf.data.Dataset.from_tensor_slices(data(48)).batch(BATCH)
    batches = (place or tf.distribute.get_strategy()).experimental_distribute_dataset(dataset)
    return results(model, [float(train(batch)) for batch in batches])


@feature
def ragged(place):
    def make(place):
        inputs = layers.Input((None,), dtype="int64", ragged=True)
        return keras.Model(inputs, layers.Dense(3)(layers.Lambda(_mean, (TABLE[1],))(embedding(place, *TABLE)(inputs))))

    model, (x, y) = built(place, "adam", make), data()
    lengths = np.arange(ROWS) % LENGTH + 1
    ids = tf.RaggedTensor.from_row_lengths(x[np.arange(LENGTH) < lengths[:, None]], lengths)
    dataset = tf.data.Dataset.from_tensor_slices((ids, y)).batch(BATCH)
    return results(model, model.fit(dataset, epochs=2, verbose=0).history["loss"])


def _mean(rows):
    return tf.reduce_mean(rows, axis=1)


@feature
def several_optimizers(place):
    def several():
        inner = {True: optimizers.Adam(0.01), False: optimizers.SGD(0.1)}
        return optimizers.MultiOptimizer(lambda variable: inner["table" in variable.path])

    OPTIMIZERS["several"] = several
    model = built(place, "several")
    return results(model, fitted(model))


@feature
def frozen(place):
    model = built(place, "adam")
    model.get_layer("table").trainable = False
    with scope_of(place):
        model.compile(OPTIMIZERS["adam"](), "mse")
    return results(model, fitted(model))


@feature
def set_weights(place):
    model = built(place, "sgd")
    model.set_weights([np.arange(each.size).reshape(each.shape) / each.size for each in model.get_weights()])
    return results(model, fitted(model))


@feature
def called_outside(place):
    model = built(place, "sgd")
    return {"weights": [model.get_layer("table")(data()[0]).numpy(), model(data()[0]).numpy()]}


def mixed(placement):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = built(strategy(placement), "adam")
        losses = fitted(model)
        return {"losses": losses, "weights": model.get_weights()}
    finally:
        keras.mixed_precision.set_global_policy("float32")


def sharded_data(placement):
    """Trains on a `BalancedSharding` with unequal shares."""
    place = strategy(placement)
    model = built(place, "adam")
    if place is None:
        return results(model, fitted(model))
    shares = [1.0, *[2.0] * (place.num_replicas_in_sync - 1)]
    sharding = tfdist.data.BalancedSharding(data(), BATCH, shuffle=False, policy=shares)
    dataset = place.distribute_datasets_from_function(sharding)
    return results(model, model.fit(dataset, epochs=2, verbose=0).history["loss"])


def parts(placement):
    """Returns the shapes of the table and of its state on each replica of this worker, and the memory report."""
    model = built(strategy(placement), "adam")
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    of_table = [each for each in (*model.weights, *model.optimizer.variables) if "table" in each.path]
    shapes = [tuple(local.shape) for each in of_table for local in each.value.values]
    return shapes, model.distribute_strategy.memory_report()


def with_a_table(optimizer):
    """Returns a model with a large table and a large weight."""
    table = ShardedEmbedding(10_001, 8)
    model = keras.Sequential([layers.Input((8,), dtype="int64"), table, layers.Flatten(), layers.Dense(128)])
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def memory_with_a_table(optimizer, sharding):
    """Returns the memory report of a strategy with this model only."""
    place = tfdist.MirroredStrategy(model_sharding=sharding)
    start_anew()
    with place.scope():
        model = with_a_table(optimizer)
        model.optimizer.build(model.trainable_variables)
    return place.memory_report()


def reads_of_whole_parts(placement, optimizer):
    """Returns the operations of a step that read a whole part of the table, or of its state."""
    model, train = loop_of(strategy(placement), optimizer)
    part = model.get_layer("table").embeddings.value.values[0].shape
    read = (each for each in train.get_concrete_function(data(BATCH)).graph.get_operations() if "Read" in each.type)
    return [each.name for each in read if each.outputs[0].shape == part]


def bad_ids(placement, bad):
    model, (x, y) = built(strategy(placement), "sgd"), data(48)
    x[30, 2] = bad
    try:
        model.fit(x, y, batch_size=48, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    return "nothing"


def round_trip(placement, folder, loaded_by):
    """Trains, saves and loads a model, and trains on. Returns the results, and those of the model unsaved."""
    place = strategy(placement)
    model = built(place, "adam")
    fitted(model)
    path = os.path.join(folder, f"{own_index() if placement.startswith('2') else 0}.keras")
    model.save(path)
    with contextlib.nullcontext() if loaded_by is None else place.scope():
        loaded = keras.models.load_model(path)
    assert type(loaded.get_layer("table")) is ShardedEmbedding
    return results(loaded, fitted(loaded)), results(model, fitted(model))


def in_checkpoint(placement, folder):
    """Writes a `tf.train.Checkpoint`, which a plain model reads. Returns the weights of both."""
    model = built(strategy(placement), "adam")
    fitted(model)
    path = os.path.join(folder, str(own_index() if placement.startswith("2") else 0))
    path = tf.train.Checkpoint(model=model).write(path)
    plain = built(None, "adam")
    tf.train.Checkpoint(model=plain).read(path).expect_partial()
    return plain.get_weights(), model.get_weights()


def resumed(placement, directory, before=None, after=None):
    """Continues a broken-off training with another number of devices, if given. Returns its results and unbroken ones.

    The number of devices is that of the strategy of a placement by default.
    """

    def train_on(devices, *callbacks):
        place = strategy(placement) if devices is None else tfdist.MirroredStrategy(devices)
        model = built(place, "adam")
        fitted(model, callbacks=callbacks)
        return {key: value for key, value in results(model, []).items() if key != "losses"}

    with contextlib.suppress(BrokenOffError):
        train_on(before, BackupAndRestore(directory, save_freq=2), BreakOff(3, kills=False))
    return train_on(after, BackupAndRestore(directory, save_freq=2)), train_on(after)


def by_checkpoint(placement, folder, name):
    """Trains with a `ModelCheckpoint`. Returns the weights, and those of the chief's file on one device."""
    model = built(strategy(placement), "adam")
    path = os.path.join(folder, name)
    fitted(model, callbacks=[tfdist.callbacks.ModelCheckpoint(path, save_weights_only="weights" in name)])
    if "weights" not in name:
        plain = keras.models.load_model(path)
    else:
        table = ShardedEmbedding(*TABLE, name="table")
        plain = keras.Sequential([layers.Input((LENGTH,), dtype="int64"), table, layers.Flatten(), layers.Dense(3)])
        plain.load_weights(path)
    return plain.get_weights(), model.get_weights()


def refused(placement, what):
    ops = {"cross_device_ops": tf.distribute.ReductionToOneDevice()} if what == "cross_device_ops" else {}
    place = strategy(placement, **ops)
    start_anew()
    options = {"regularizer": {"embeddings_regularizer": "l2"}, "constraint": {"embeddings_constraint": "non_neg"}}
    with place.scope():
        table = ShardedEmbedding(*TABLE, **options.get(what, {}))
        model = keras.Sequential([layers.Input((LENGTH,)), table, layers.Flatten(), layers.Dense(3)])
        model.compile(keras.optimizers.Muon(0.01) if what == "optimizer" else "adam", "mse")
    if what == "lora":
        table.enable_lora(2)
    elif what == "quantize":
        model.quantize("int8")
    elif what == "export":
        model.export(os.path.join(os.environ.get("TMPDIR", "/tmp"), "never_written"))
    elif what == "read":
        place.run(tf.function(lambda: tf.reduce_sum(table.embeddings)))
    elif what == "apply":
        variables = model.trainable_variables

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(data()[0]))
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        place.run(tf.function(step))
    elif what == "branch":

        def look_up():
            ids = data()[0]
            return tf.cond(tf.reduce_sum(ids) >= 0, lambda: table(ids), lambda: tf.zeros([*ids.shape, TABLE[1]]))

        place.run(tf.function(look_up))
    else:
        fitted(model)
