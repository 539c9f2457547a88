"""Functions that the tests of the strategies run in worker processes."""

import contextlib
import functools
import json
import logging as pylogging
import os
import random
import sys
import time
import traceback
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import layers

import tfdist
from keras_features import strategy_of as strategy
from launched import eventually
from tfdist._compat import keras_stack
from tfdist.strategies import outside_scope
from untuned_pipelines import tuned_pipelines


def own_index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def wait_until_sent(place):
    """Waits until this worker has sent, and counted, all messages of its exchanges: a step does not wait for that."""
    peers = getattr(place.extended, "_peers", None)
    assert peers is None or eventually(lambda: not any(peers._sender._waiting.values()))


class MadeLate(layers.Layer):
    """A layer without `build`. Keras creates its dropout while tracing its shapes."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([_DropoutMadeInBuild()])

    def call(self, x, training=False):
        return self.inner(x, training=training)


class _DropoutMadeInBuild(layers.Layer):
    def build(self, input_shape):
        self.dropout = layers.Dropout(0.5)

    def call(self, x, training=False):
        return self.dropout(x, training=training)


def masks(placement, seed, late):
    """Returns the dropout masks that the replicas of this worker draw in two steps, [step, local replica, 20]."""
    keras.utils.set_random_seed(seed)
    with strategy(placement).scope():
        dropout = _built(late)

    @tf.function
    def step():
        return strategy(placement).run(lambda: dropout(tf.ones([1, 20]), training=True))

    drawn = [strategy(placement).experimental_local_results(step()) for _ in range(2)]
    return np.array([[mask.numpy()[0] for mask in of_step] for of_step in drawn])


def one_device_masks(seed, late):
    keras.utils.set_random_seed(seed)
    dropout = _built(late)
    return np.array([dropout(tf.ones([1, 20]), training=True).numpy()[0] for _ in range(2)])


def _built(late):
    return keras.Sequential([layers.Input((20,)), MadeLate() if late else layers.Dropout(0.5)])


def traces_of_a_fit(placement):
    """Returns how often a `fit` traces its step."""
    keras.backend.clear_session()
    extended, traces = strategy(placement).extended, []
    run = extended._call_for_each_replica

    def counted(*args):
        traces.append(not tf.executing_eagerly())
        return run(*args)

    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(1), layers.Dropout(0.5)])
        model.compile("adam", "mse")
    with mock.patch.object(extended, "_call_for_each_replica", counted):
        model.fit(np.zeros((16, 3)), np.zeros((16, 1)), batch_size=4, epochs=2, verbose=0)
    return sum(traces)


def lookups(placement, policy):
    """Looks up rows of an embedding in a step. Returns the types of the operations that gather rows."""
    with strategy(placement).scope():
        layer = layers.Embedding(50, 4, dtype=policy)
        layer.build()
    step = tf.function(lambda ids: strategy(placement).run(layer, (ids,)), autograph=False)
    ids = tf.constant([[1, 49, -1]])
    expected = layer.get_weights()[0][[[1, 49, 49]]].astype(layer.compute_dtype)
    for rows in strategy(placement).experimental_local_results(step(ids)):
        np.testing.assert_array_equal(rows, expected)
    operations = step.get_concrete_function(ids).graph.get_operations()
    return {each.type for each in operations if "Gather" in each.type}


def initial_weights(placement):
    """Builds a model on each worker with another seed. Returns its initial variables."""
    keras.utils.set_random_seed(100 + own_index())
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3), layers.Dropout(0.5)])
    return [np.asarray(variable) for variable in model.variables]


def rows_of_an_epoch(placement):
    """Counts how often each row is seen in two epochs that Keras shuffles, without a seed from the user."""
    # As in a new process, in which nobody has set a seed.
    keras.backend.clear_session(free_memory=False)
    tf.random.set_seed(None)
    random.seed(os.urandom(8))
    place = tfdist.MirroredStrategy() if placement == "1x2" else tfdist.MultiWorkerMirroredStrategy()
    with place.scope():
        model = Recorder()
        model.compile("sgd")
    model.fit(np.arange(24, dtype="float32")[:, None], batch_size=4, verbose=0)
    model.fit(Rows(), verbose=0)
    return model.seen.numpy()


class Rows(keras.utils.PyDataset):
    """The rows of the arrays, shuffled by Python's `random`, which Keras also uses to shuffle batches."""

    def __init__(self):
        super().__init__()
        self.rows = random.sample(range(24), 24)

    def __len__(self):
        return 6

    def __getitem__(self, batch):
        return np.array(self.rows[4 * batch : 4 * batch + 4], "float32")[:, None]


class Recorder(keras.Model):
    """Counts on each replica how often the replica saw each row; a row's value is its number."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="zeros")
        self.seen = tf.Variable(
            tf.zeros([24]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def call(self, x):
        return x

    def train_step(self, data):
        rows, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.seen.assign_add(tf.reduce_sum(tf.one_hot(tf.cast(rows[:, 0], tf.int32), 24), axis=0))
        return {"loss": tf.constant(0.0)}


def saved_weights(placement, folder):
    """Trains and saves the same model on every worker by itself. Returns the variables in its file."""
    keras.utils.set_random_seed(1)
    with strategy(placement).scope():
        model = keras.Sequential(
            [layers.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.1)]
        )
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
    model.fit(x, x[:, :3], batch_size=8, verbose=0, shuffle=False)
    path = os.path.join(folder, f"{own_index()}.keras")
    model.save(path)  # Saving on one worker must not wait for peers, on the chief neither.
    loaded = keras.models.load_model(path)
    return [np.asarray(variable) for variable in loaded.variables + loaded.optimizer.variables]


def is_tuned(kind):
    """Whether the pipeline of `fit`, and its parts on the devices, use autotuning; and the steps of such a fit."""
    arrays = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    given = tf.data.Dataset.from_tensor_slices(arrays).batch(4) if kind == "dataset" else arrays[0]
    more = {} if kind == "dataset" else {"y": arrays[1], "batch_size": 4}
    with strategy("1x2").scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    with tuned_pipelines():
        taken = keras_stack.keras_trainer.TFEpochIterator(x=given, distribute_strategy=strategy("1x2"), **more)
        distributed = taken._distributed_dataset
        (of_worker,) = iter(distributed)._iterators
        on_devices = [part._dataset.options().autotune.enabled for part in of_worker._iterator._device_iterators]
        model.fit(given, verbose=0, **more)
    is_tuned = distributed._dataset._original_dataset.options().autotune.enabled
    return is_tuned, on_devices, int(model.optimizer.iterations)


def compiled_alone():
    """Returns weights of a training that XLA compiles, without a strategy and on one replica; balanced data's error."""
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def trained(place, data):
        keras.utils.set_random_seed(1)
        with place.scope() if place else contextlib.nullcontext():
            model = keras.Sequential([layers.Input((4,)), layers.Dense(4), layers.Dense(1)])
            model.compile("adam", "mse", jit_compile=True)
        model.fit(*data, batch_size=None if place and len(data) == 1 else 8, verbose=0, shuffle=False)
        return [np.asarray(weight) for weight in model.get_weights()]

    place = tfdist.MirroredStrategy(["CPU:0"])
    results = [trained(where, (x, x[:, :1])) for where in (None, place)]
    sharding = tfdist.data.BalancedSharding((x, x[:, :1]), 8)
    try:
        trained(place, (place.distribute_datasets_from_function(sharding),))
    except tfdist.errors.CompiledCollectivesError as error:
        return results, str(error)
    return results, ""


def only_chief_saves(placement, folder, in_scope):
    """Saves on the chief in all ways. The strategy's scope encloses everything, or only the creation of the model."""
    x, path = np.ones((8, 4), "float32"), functools.partial(os.path.join, folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy(placement).scope())
        model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        if not in_scope:
            stack.close()
        in_fit = tfdist.callbacks.ModelCheckpoint(path("in_fit.keras")), tfdist.callbacks.TensorBoard(path("board"))
        model.fit(x, x[:, :1], verbose=0, callbacks=in_fit)
        if tfdist.cluster.is_chief():
            model.save(path("model.keras"))
            model.save_weights(path("model.weights.h5"))
            model.export(path("exported"), verbose=False)
        return model.evaluate(x, x[:, :1], verbose=0)


def checkpoint_round_trip(placement, folder):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def make():
        with strategy(placement).scope():
            model = keras.Sequential(
                [layers.Input((4,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
            )
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def train(model):
        model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False)

    model = make()
    train(model)
    path = tf.train.Checkpoint(model=model).save(os.path.join(folder, str(own_index()), "checkpoint"))
    train(model)
    resumed = make()
    train(resumed)
    tf.train.Checkpoint(model=resumed).restore(path).assert_existing_objects_matched()
    train(resumed)
    return model.get_weights(), resumed.get_weights()


def reductions(placement):
    """Returns the results of a user's own reductions over replicas with different values."""
    place = strategy(placement)
    per_replica = place.experimental_distribute_values_from_function(
        lambda context: tf.range(2.0) + 10.0 * context.replica_id_in_sync_group
    )
    whole = place.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)

    @tf.function
    def in_replicas():
        def step(value):
            context = tf.distribute.get_replica_context()
            nested = context.all_reduce("SUM", {"a": value, "b": [tf.cast(value, tf.float16), tf.ones([], tf.int64)]})
            return nested["a"], nested["b"][0], nested["b"][1], context.all_gather(value, axis=0)

        return place.run(step, args=(per_replica,))

    return {
        "sum": place.reduce("SUM", per_replica, axis=None).numpy(),
        "mean": place.reduce("MEAN", per_replica, axis=None).numpy(),
        "mean over rows": place.reduce("MEAN", per_replica, axis=0).numpy(),
        "nested": [leaf.numpy() for leaf in place.reduce("SUM", (per_replica, per_replica), axis=None)],
        "whole numbers": place.reduce("SUM", whole, axis=None).numpy(),
        "gathered": place.gather(per_replica, axis=0).numpy(),
        "in replicas": [place.experimental_local_results(value)[0].numpy() for value in in_replicas()],
    }


def reductions_of_types(placement):
    """Returns the values and the sums by all-reduce and `reduce`, in types that collectives do not support."""
    place = strategy(placement)
    own = [np.array([np.iinfo(kind).max - 3, 5], kind) for kind in ("int8", "uint8", "int16", "uint16", "uint32")]
    own += [np.array([2**63 + 3, 5], "uint64"), np.array([1 + 2j, 3], "complex64"), np.array(1 - 2j, "complex128")]

    @tf.function
    def in_replicas():
        return place.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", own))

    totals = [place.experimental_local_results(total)[0].numpy() for total in in_replicas()]
    values = [place.run(functools.partial(tf.constant, each)) for each in own]
    return own, totals, [place.reduce("SUM", value, axis=None).numpy() for value in values]


def number_of_devices(placement):
    return len(strategy(placement).extended.worker_devices), strategy(placement).num_replicas_in_sync


def message_of(placement, mistake):
    """Returns the class and message of the error that a mistake raises on this worker."""
    try:
        mistakes[mistake](placement)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _compiled(placement):
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def _compiled_part(placement):
    """Compiles the exchange of a replica, but not its step."""
    compiled = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])), jit_compile=True)
    strategy(placement).run(lambda: compiled())


def _compiled_function(placement):
    total = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])), jit_compile=True)
    strategy(placement).run(total)


def _outside_scope(placement):
    strategy(placement)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    with strategy(placement).scope():
        wrapped = keras.Sequential([layers.Input((4,)), model])
        wrapped.compile("sgd", "mse")
    wrapped.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def _all_outside_scope(placement):
    x = np.ones((8, 4), "float32")
    sharding = tfdist.data.BalancedSharding((x, x[:, :1]), 4, seed=1)
    dataset = strategy(placement).distribute_datasets_from_function(sharding)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(dataset, verbose=0)


class Recipe(keras.Model):
    """A model that computes loss and gradients by given functions in its training step."""

    def __init__(self, loss_of, gradients_of=lambda gradients: gradients):
        super().__init__()
        self.outputs_of, self.loss_of, self.gradients_of = layers.Dense(1), loss_of, gradients_of

    def call(self, x):
        return self.outputs_of(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, tf.square(self(x) - y))
        gradients = self.gradients_of(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def _fit_by_recipe(placement, *recipe):
    with strategy(placement).scope():
        model = Recipe(*recipe)
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def _sum_and_penalty(model, squares):
    return tf.reduce_sum(squares) / 8.0 + tf.nn.l2_loss(model.trainable_variables[0])


def _mean_by_hand(model, squares):
    total = tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_mean(squares))
    return total / model.distribute_strategy.num_replicas_in_sync


def _summed_by_hand(gradients):
    return tf.distribute.get_replica_context().all_reduce("SUM", gradients)


def _compiled_alone_in_scope(placement):
    place = strategy(placement)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    with place.scope():
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def uses_tf_keras(placement):
    """Returns the errors of `compression` and callbacks with a tf_keras model, and its weights without them."""
    import tf_keras

    kind = tfdist.MirroredStrategy if placement == "1x2" else tfdist.MultiWorkerMirroredStrategy
    x, said = np.ones((8, 4), "float32"), []

    def train(place, *callbacks):
        with place.scope():
            model = tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="ones", input_shape=(4,))])
            model.compile(tf_keras.optimizers.SGD(0.1), "mse")
        try:
            model.fit(x, 0 * x[:, :1], batch_size=8, verbose=0, callbacks=list(callbacks))
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        return model.get_weights()

    weights = train(kind(compression="int8"))
    callbacks = tfdist.callbacks
    for callback in (
        callbacks.Traffic(),
        callbacks.Balance(),
        callbacks.BackupAndRestore("x"),
        callbacks.CSVLogger("x"),
    ):
        train(strategy(placement), callback)
    return weights, train(strategy(placement)), said


def trains_outside(placement):
    """Returns the errors and logs of training outside a strategy, and under a strategy for one device of its own."""
    strategy(placement)
    outside_scope._Guard.has_trained = False  # Earlier tests have trained in this process.
    keras.backend.clear_session(free_memory=False)  # Freeing earlier datasets may wait a minute for their tuners.
    with strategy(placement).scope():
        pass
    said, handler = [], pylogging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.get_absl_logger().addHandler(handler)
    x, messages = np.ones((8, 4)), []
    for scope in (contextlib.nullcontext(), tf.distribute.OneDeviceStrategy("CPU:0").scope()):
        with scope:
            model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
            model.compile("sgd", "mse")
        model.evaluate(x, x[:, :1], verbose=0)
        try:
            model.fit(x, x[:, :1], verbose=0)
            messages.append("trained")
        except tfdist.errors.ScopeError as error:
            messages.append(str(error))
    logging.get_absl_logger().removeHandler(handler)
    return messages, [words for words in said if "outside" in words]


def labels_after_training(placement, source):
    """Returns labels after training on them. Python code yields slices of the labels without a copy."""
    memory = np.zeros(48 * 4 + 64, "uint8")  # TensorFlow copies arrays that are not aligned to 64 bytes.
    labels = memory[-memory.ctypes.data % 64 :][: 48 * 4].view("float32").reshape(48, 1)
    labels[:] = np.arange(48)[:, None]
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, batch):
            rows = slice(8 * batch, 8 * batch + 8)
            return x[rows], labels[rows]

    def generated():
        batches = Batches()
        yield from (batches[batch] for batch in range(6))

    signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    sources = {
        "generator": generated,
        "PyDataset": Batches,
        "dataset": lambda: tf.data.Dataset.from_generator(generated, output_signature=signature),
    }
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(sources[source](), verbose=0)
    return labels[:, 0].tolist()


def counters_after_data_of_unknown_length(placement, epochs):
    """Returns each device's counts of steps and random draws after epochs that end with the data."""
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dropout(0.5), layers.Dense(1)])
        model.compile("adam", "mse")
    rows = tf.data.Dataset.from_generator(
        lambda: (np.ones(4, "float32") for _ in range(16)), output_signature=tf.TensorSpec([4])
    )
    model.fit(rows.map(lambda x: (x, x[:1])).batch(8), epochs=epochs, verbose=0)
    counters = model.optimizer.iterations, model.layers[0].seed_generator.state
    return [[copy.numpy().tolist() for copy in counter.value.values] for counter in counters]


def _optimizer_outside_scope(placement):
    with strategy(placement).scope() if placement != "single" else tfdist.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def _metric_outside_scope(placement):
    metric = keras.metrics.MeanAbsoluteError()
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric])
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


class KeepsItsOwn(keras.metrics.Metric):
    """A metric that counts in a variable of its own."""

    def __init__(self, make):
        super().__init__(name="own")
        self.count = make(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + 1.0)

    def result(self):
        return self.count + 0.0


def _metric_of_its_own(placement, make=keras.Variable):
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[KeepsItsOwn(make)])
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def chief_loads_alone(placement, used, bias=1.0):
    """Returns the error of a model method after the chief alone has set weights.

    With "fit again", all workers train first; then the chief changes the bias, and the kernel by a rounding error.
    """
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("adam", "mse")
    if used == "fit again":
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, epochs=2)
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    if tfdist.cluster.is_chief():
        kernel, before = model.get_weights()
        kernel = kernel * (1 + 1e-6) if used == "fit again" else np.ones_like(kernel)
        model.set_weights([kernel, np.full_like(before, bias)])
    try:
        getattr(model, used.split()[0])(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def chief_rounds_and_draws(placement):
    """Counts the steps of a `fit` after the chief alone has rounded weights differently and drawn random numbers."""
    keras.utils.set_random_seed(1)
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3), layers.Dropout(0.5), layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.ones((8, 4)), np.ones((8, 1))
    model.fit(x, y, verbose=0, epochs=2)
    if tfdist.cluster.is_chief():
        model(x, training=True)
        model.set_weights([weight * (1 + 1e-6) for weight in model.get_weights()])
    model.fit(x, y, verbose=0)
    return model.optimizer.iterations.numpy()


def drawn_in_a_step(placement):
    """Returns the numbers that `tf.random` draws in a step, for each replica of this worker."""
    draw = tf.function(lambda: strategy(placement).run(lambda: tf.random.uniform([])))
    return [float(value) for value in strategy(placement).experimental_local_results(draw())]


def loop_and_fit(placement):
    """Trains BatchNormalization by a custom loop and by `fit`; the last batch has one row. Returns both weights."""
    place = strategy(placement)
    x = np.random.default_rng(0).normal(size=(33, 4)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)

    def make():
        keras.utils.set_random_seed(1)
        with place.scope():
            model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    fitted, looped = make(), make()

    @tf.function
    def train(batch):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(looped(x, training=True) - y)) / tf.cast(rows, tf.float32)
            variables = looped.trainable_variables
            looped.optimizer.apply(tape.gradient(loss, variables), variables)

        rows = place.reduce("SUM", place.run(lambda x, y: tf.shape(x)[0], args=batch), axis=None)
        place.run(step, args=batch)

    for batch in place.experimental_distribute_dataset(dataset):
        train(batch)
    fitted.fit(dataset, verbose=0)
    return [[np.asarray(weight) for weight in model.get_weights()] for model in (looped, fitted)]


def said_of_a_loop(placement):
    """Returns what TensorFlow logs when AutoGraph converts a custom loop, and the names of converted functions in it.

    AutoGraph puts "tf__" before the name of a function that it has converted.
    """
    place = (tfdist.MirroredStrategy if placement == "1x2" else tfdist.MultiWorkerMirroredStrategy)()
    with place.scope():
        variable = tf.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    said, converted = [], set()
    handler = pylogging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    tf.get_logger().addHandler(handler)

    @tf.autograph.experimental.do_not_convert
    def note_converted():
        for innermost in sys._current_frames().values():  # A replica may have a thread of its own.
            names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(innermost)}
            converted.update(name for name in names if name.startswith("tf__"))

    def update():
        note_converted()
        optimizer.apply([tf.ones([])], [variable])

    @tf.function
    def step(batch):
        with place.scope():
            place.run(update)
            ones = place.run(lambda rows: 1.0 if tf.reduce_sum(rows) > 0 else 2.0, (batch,))
            return place.reduce("SUM", ones, axis=None)

    total = float(step(next(iter(place.experimental_distribute_dataset(tf.data.Dataset.range(1, 9).batch(8))))))
    tf.get_logger().removeHandler(handler)
    return [words for words in said if "AutoGraph" in words], converted, total


def deterministic_fit():
    """Returns the loss of a `fit` on two devices, while TensorFlow refuses non-deterministic operations."""
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    with tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression="int8").scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
    return model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0).history["loss"]


def _compression(placement):
    (tfdist.MirroredStrategy if placement == "1x2" else tfdist.MultiWorkerMirroredStrategy)(compression="int9")


def _loss_scaling(placement):
    place = strategy(placement)
    with place.scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        optimizer.build(model.trainable_variables)

    @tf.function
    def train():
        def step():
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(model(tf.ones([2, 4]))))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        place.run(step)

    train()


class Alone(keras.optimizers.Optimizer):
    """A faulty optimizer: updates variables without exchanging gradients between replicas."""

    def apply(self, grads, trainable_variables=None):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)


def _optimizer_alone(placement):
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile(Alone(0.1), "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def _gradients_of_other_variables(placement):
    """Applies gradients of different variables on each replica, in a step that is not traced."""
    place = strategy(placement)
    with place.scope():
        variables = [keras.Variable([1.0], name=name) for name in ("common", "even", "odd")]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(variables)

    def step():
        odd = int(tf.distribute.get_replica_context().replica_id_in_sync_group) % 2
        gradients = [tf.ones([1]), None if odd else tf.ones([1]), tf.ones([1]) if odd else None]
        optimizer.apply(gradients, variables)

    place.run(step)


mistakes = {
    "gradients of other variables": _gradients_of_other_variables,
    "optimizer that exchanges nothing": _optimizer_alone,
    "loss scaling": _loss_scaling,
    "jit_compile": _compiled,
    "jit_compile of a function": _compiled_function,
    "jit_compile of a part": _compiled_part,
    "outside scope": _outside_scope,
    "all outside scope": _all_outside_scope,
    "metric outside scope": _metric_outside_scope,
    "metric that keeps a Keras variable": _metric_of_its_own,
    "metric that keeps a tf.Variable": functools.partial(_metric_of_its_own, make=tf.Variable),
    "optimizer outside scope": _optimizer_outside_scope,
    "compression": _compression,
    "compiled alone in scope": _compiled_alone_in_scope,
    "sum and penalty in a step": lambda placement: _fit_by_recipe(placement, _sum_and_penalty),
    "gradients summed by hand": lambda placement: _fit_by_recipe(
        placement, lambda model, squares: tf.reduce_mean(squares), _summed_by_hand
    ),
    "mean over replicas by hand": lambda placement: _fit_by_recipe(placement, _mean_by_hand),
}


def loop_and_fit_in_turns(placement):
    """Mixes collectives of devices and of hosts, in graphs and in eager mode, in one process."""
    place = strategy(placement)
    with place.scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones((12, 4), "float32")

    @tf.function
    def total():
        return place.reduce("SUM", place.run(lambda: tf.ones([])), axis=None)

    totals = []
    for _ in range(2):
        totals += [float(total()), float(place.reduce("SUM", place.run(lambda: tf.ones([])), axis=None))]
        model.fit(x, x[:, :1], batch_size=8, verbose=0, validation_data=(x, x[:, :1]))
        dataset = place.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)
        )
        model.evaluate(dataset, verbose=0)
    return totals


def counts_around_the_end_of_data(placement, kind):
    """Returns the collective counters of local replicas before and after a step that finds no more data."""
    place = strategy(placement)
    data = place.distribute_datasets_from_function(tfdist.data.BalancedSharding((np.ones((8, 1), "float32"),), 8))

    def on_replica(rows):
        total = tf.reduce_sum(rows[0])
        for _ in range(10):
            total = tf.distribute.get_replica_context().all_reduce("SUM", tf.tanh(total))
        return total

    steps = {
        "run": lambda iterator: place.run(on_replica, args=(next(iterator),)),
        "reduce": lambda iterator: place.reduce("SUM", next(iterator)[0], axis=0),
    }
    step = tf.function(steps[kind])
    iterator, counts = iter(data), []
    step(iterator)
    for _ in range(2):
        counts.append([int(launcher.count) for launcher in place.extended._cross_device_ops._launchers])
        with contextlib.suppress(tf.errors.OutOfRangeError):
            step(iterator)
    return counts


def numbers_of_variables(placement):
    """Converts scalar variables of several kinds to Python numbers."""
    with strategy(placement).scope():
        optimizer = keras.optimizers.SGD(0.25)
        metric = keras.metrics.Sum()
    metric.update_state([3.0])
    return [float(optimizer.learning_rate), int(optimizer.iterations), float(metric.total)]


def reductions_after_unequal_counts(placement):
    """Returns reductions outside of a step and in one, after counters differ as if a step had failed halfway."""
    place = strategy(placement)
    first = place.extended._cross_device_ops._launchers[0]
    totals = []
    for step in (lambda run: run(), tf.function(lambda run: run())):
        first.count.assign_add(3)
        totals.append(float(step(lambda: place.reduce("SUM", place.run(lambda: tf.ones([])), axis=None))))
    first.count.assign_add(3)
    total = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])))
    in_step = place.run(total, args=None)  # some users pass None
    first.count.assign_add(3)
    gathered = place.gather(place.run(lambda: tf.ones([1]), args=None), axis=0)
    return [*totals, float(place.experimental_local_results(in_step)[0]), float(tf.reduce_sum(gathered))]


def captured_by_a_lone_replica():
    """Returns the names of the variables that a function captures when it runs a step on the only replica."""
    place = tfdist.MirroredStrategy(["CPU:0"])
    function = tf.function(lambda value: place.run(lambda own: own * 2, args=(value,)))
    return [capture.name for capture in function.get_concrete_function(tf.ones([])).captured_inputs]


def states_of_rows(placement):
    """Returns the state that a stateful layer keeps on each local replica."""
    keras.utils.set_random_seed(1)
    place = strategy(placement)
    with place.scope():
        layer = layers.LSTM(2, stateful=True)
        layer.build((3, 4, 5))

    def step():
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return layer(tf.ones([3, 4, 5]) * (replica - 0.5))

    place.run(tf.function(step))
    return [state.numpy() for state in layer.states[0].value.values]


def hooks_run_by(placement):
    """Returns the hooks of a `ChiefOnly` callback that run on this worker."""
    ran = []

    class Writer(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            ran.append(epoch)

    class Nested(Writer):
        def on_train_end(self, logs=None):
            ran.append("end")

    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")

    class Functions(tfdist.callbacks.ChiefOnly, keras.callbacks.LambdaCallback):
        pass

    functions = Functions(on_epoch_end=lambda epoch, logs: ran.append(sorted(logs)))
    for _ in range(2):
        model.fit(x, x[:, :1], verbose=0, callbacks=[Nested(), functions])
    return ran


def found_after_fit(placement, folder, fails):
    """Whether each worker finds the file that a slow callback of the chief writes; and the error of `fit`."""
    path = os.path.join(folder, "written")

    class Slow(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            time.sleep(1)
            with open(path, "w") as file:
                file.write("whole")

        def on_train_end(self, logs=None):
            super().on_train_end(logs)
            if fails:
                raise OSError("the disk is full")

    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    raised = None
    try:
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[Slow()])
    except (OSError, tfdist.errors.ClusterError) as error:
        raised = type(error).__name__, str(error)
    return os.path.exists(path), raised


def reads_other_batches_than_others(placement, kind):
    """Returns the error when workers read different numbers of batches, or batches of different sizes."""
    x, first = np.ones((32, 4), "float32"), own_index() == 0
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x, batch_size = (x if first or kind == "batch_size" else x[:16]), (16 if first or kind == "rows" else 8)
    try:
        model.fit(x, x[:, :1], batch_size=batch_size, verbose=0)
    except tfdist.errors.ClusterError as error:
        return str(error)


def fits_unlike_others(placement, folder, kind):
    """Returns the error when `fit` has different arguments on one worker."""
    x, first = np.ones((8, 4), "float32"), own_index() == 0
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    given = {
        "epochs": {"epochs": 2 if first else 3},
        "validation": {} if first else {"validation_data": (x, x[:, :1])},
        "backup": {"callbacks": [tfdist.callbacks.BackupAndRestore(folder)] if first else []},
    }[kind]
    try:
        model.fit(x, x[:, :1], verbose=0, **given)
    except tfdist.errors.ClusterError as error:
        return str(error)


def warnings_of_callbacks(placement, folder):
    """Returns the warnings of a `fit` with Keras' `CSVLogger` and with tfdist's."""
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    path, said = f"{folder}/{own_index()}", []
    for given in (keras.callbacks.CSVLogger(path), [tfdist.callbacks.CSVLogger(path)]):
        with mock.patch.object(logging, "warning", lambda text, *values: said.append(text % values)):
            model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=given)
    return [each for each in said if "Keras' own" in each]  # the rest may be about a slow machine


def asked_for_on_the_chief_alone(placement):
    """Returns the errors of a chief-only callback that calls collective operations, and output that it may compute."""
    x, answers, messages = np.ones((8, 4), "float32"), [], []
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])

    def made_in_scope():
        with strategy(placement).scope():
            return tf.Variable(1.0)

    together = [
        lambda: model.predict(x, verbose=0),
        lambda: model.evaluate(x, x[:, :1], verbose=0),
        lambda: model.predict_on_batch(x),
        lambda: model.metrics[0].result(),
        made_in_scope,
    ]

    class Asks(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            answers.append(model(x).shape)
            for ask in together:
                try:
                    ask()
                except tfdist.errors.ClusterError as error:
                    messages.append(str(error))

    model.fit(x, x[:, :1], verbose=0, callbacks=[Asks()])
    return len(answers), messages, model.predict(x, verbose=0).shape


def predicted_without_compile(placement):
    """Returns the predictions and the direct output of a model that was never compiled."""
    x = np.arange(28, dtype="float32").reshape(7, 4)
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3)])
    return model.predict(x, batch_size=4, verbose=0), model(x).numpy()


def two_strategies(kind):
    first, second = getattr(tfdist, kind)(), getattr(tfdist, kind)()
    totals = []
    for place in (first, second, first):
        with place.scope():
            model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        totals.append(float(place.reduce("SUM", place.run(tf.function(lambda: tf.ones([]))), axis=None)))
    return totals


def other_cross_device_ops():
    place = tfdist.MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice())
    keras.utils.set_random_seed(1)
    with place.scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model.train_on_batch(x, x[:, :1])
    return model.get_weights()


def on_gpus():
    """Returns the collectives that a strategy would choose for gradients, counts and integers on GPUs; uses no GPU."""
    extended = tfdist.MirroredStrategy().extended
    extended._devices = ("/device:GPU:0", "/device:GPU:1")
    chosen = [extended._get_cross_device_ops(value) for value in ([tf.ones([2])], tf.ones([2]), tf.constant(1))]
    return [type(ops).__name__ for ops in chosen]


def normalized_on(device):
    """Trains batch normalization on one device, by a strategy of that device alone or (None) without a strategy."""
    keras.utils.set_random_seed(1)
    with tfdist.MirroredStrategy([device]).scope() if device else contextlib.nullcontext():
        model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def sharding_of_another_strategy():
    """Trains on a BalancedSharding that another strategy of the same devices has distributed. Returns the error."""
    x = np.ones((8, 4), "float32")
    with tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    other = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    data = other.distribute_datasets_from_function(tfdist.data.BalancedSharding((x, x[:, :1]), global_batch_size=4))
    try:
        model.fit(data, verbose=0)
    except tfdist.errors.ScopeError as error:
        return str(error)
    return ""


def unequal_devices():
    if own_index() == 1:
        tfdist.testing.virtual_devices(2)
    try:
        tfdist.MultiWorkerMirroredStrategy()
    except tfdist.errors.ClusterError as error:
        return str(error)
    return ""


def train_with_bounds(placement):
    """Runs `train_on_batch` with different batches on each worker, which form one global batch."""
    keras.utils.set_random_seed(1)
    with strategy(placement).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    own = x[:3] if own_index() == 0 else x[3:]
    model.train_on_batch(own, own[:, :1])
    return model.get_weights()


def one_device_on_batch():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model.train_on_batch(x, x[:, :1])
    return model.get_weights()


class Delayed(layers.Layer):
    """A layer that sleeps in its forward pass, and as long in its backward pass, on the last worker."""

    seconds = 0.2

    def __init__(self, workers):
        super().__init__()
        self.workers = workers

    def call(self, x):
        is_last = own_index() == self.workers - 1

        def wait(x):
            time.sleep(self.seconds if is_last else 0)
            return x

        @tf.custom_gradient
        def both_ways(x):
            return waited(x), waited

        def waited(x):
            return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)

        return both_ways(x)


def seconds_of_replicas(placement):
    """Returns computing and own seconds, by step and replica; the last worker has a slow layer and a slow callback."""
    keras.utils.set_random_seed(1)
    place = strategy(placement) or tfdist.MirroredStrategy(["CPU:0"])
    workers = place.num_replicas_in_sync // len(place.extended.worker_devices)
    with place.scope():
        delayed = Delayed(workers)
        model = keras.Sequential([layers.Input((4,)), layers.Dense(4), delayed, layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    delay = 2 * Delayed.seconds
    is_last = own_index() == workers - 1
    seconds = []
    listener = lambda report: seconds.append((report.compute_seconds, report.own_seconds))  # noqa: E731
    place.reports.listeners.append(listener)
    after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(delay if is_last else 0))
    sharding = tfdist.data.BalancedSharding((np.ones((48, 4), "float32"), np.zeros(48)), 8, policy="equal")
    model.fit(place.distribute_datasets_from_function(sharding), callbacks=[after], verbose=0)
    place.reports.listeners.remove(listener)
    return *np.moveaxis(np.array(seconds), 1, 0), delay


def own_data_of_each(policy):
    """Trains on data of which each worker reads its own rows: 70 on worker 0, 26 on worker 1, numbered from 0 to 95.

    Returns:
      By kind of cardinality: steps, weighted mean and number of rows in `fit`, their mean in `evaluate`. Also the
      errors of `predict`, and the rows that a custom loop reads.
    """
    place, worker = strategy("2x1"), own_index()
    own = np.arange(96, dtype="float32")[:, None]
    own = own if policy == "HINT" else own[:70] if worker == 0 else own[70:]

    def dataset(kind):
        rows = tf.data.Dataset.from_tensor_slices((own, own))
        if policy == "HINT":
            rows = rows.shard(tf.data.experimental.SHARD_HINT, tf.data.experimental.SHARD_HINT)
        rows = rows.filter(lambda x, y: True) if kind == "unknown" else rows
        batches = rows.batch(32).repeat() if kind == "infinite" else rows.batch(32)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
        return batches.with_options(options)

    with place.scope():
        model = keras.Sequential([layers.Input((1,)), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[OfTargets(name="mean")])

    def trained(data, **steps):
        before = int(model.optimizer.iterations)
        logs = model.fit(data(), verbose=0, epochs=2, validation_data=data(), **steps).history
        return int(model.optimizer.iterations) - before, logs["mean"], logs["val_mean"]

    results = {kind: trained(lambda kind=kind: dataset(kind)) for kind in ("known", "unknown")}
    results["distributed"] = trained(lambda: place.experimental_distribute_dataset(dataset("known")))
    results["infinite"] = trained(lambda: dataset("infinite"), steps_per_epoch=4, validation_steps=4)
    errors = []
    for data in (dataset("known"), place.experimental_distribute_dataset(dataset("known"))):
        try:
            model.predict(data, verbose=0)
        except ValueError as error:
            errors.append(str(error))
    looped = [
        place.experimental_local_results(x)[0].numpy()
        for x, _ in place.experimental_distribute_dataset(dataset("known"))
    ]
    return results, errors, np.concatenate(looped).ravel()


class OfTargets(keras.metrics.Mean):
    """A metric with the mean of the targets."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true)


class HidesNaN(layers.Layer):
    def call(self, x):
        return tf.where(tf.math.is_nan(x), 0.0, x)


class Magnitude(layers.Layer):
    """An absolute value with the gradient NaN at 0."""

    def call(self, x):
        return tf.sqrt(tf.square(x))


def _one_row_of_zeros(shape, dtype=None):
    return tf.concat([tf.ones([shape[0] - 1, shape[1]]), tf.zeros([1, shape[1]])], 0)


def told_of_not_finite(placement, case):
    """Trains while row 13 of 16, which the last replica reads in the second batch, has a bad value.

    Returns:
      For each warning of this worker: the number of batches that had ended, and the text.
    """
    place, rows = strategy(placement), np.random.default_rng(0).uniform(1, 2, (16, 5)).astype("float32")
    wide = layers.Dense(6, use_bias=False)
    inner, bad, loss, optimizer = {
        "an input": ([layers.Dense(3)], np.nan, "mse", "sgd"),
        "an input that the forward pass hides": ([wide, HidesNaN()], [1, np.nan, 1, 1, 1], "mse", "sgd"),
        "a gradient": ([wide, Magnitude()], 0, "mse", "sgd"),
        "a gradient of rows": (
            [layers.Embedding(8, 4, _one_row_of_zeros), Magnitude(), layers.Flatten()],
            *(7, "mse", "adam"),
        ),
        "a replica without rows": ([], 1, lambda y, x: -tf.math.log(tf.reduce_sum(x, 1)), "sgd"),
        "a step that is skipped": ([layers.Dense(3)], 1e30, "mae", "a scaled one"),
    }[case]
    with place.scope():
        if optimizer == "a scaled one":
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=1e12)
        is_last = {"kernel_initializer": "ones", "use_bias": False} if not inner else {}
        model = keras.Sequential([layers.Input((5,)), *inner, layers.Dense(1, **is_last)])
        model.compile(optimizer, loss)
    if case == "a gradient of rows":
        rows = np.ones_like(rows)
    rows[13] = bad
    rows = rows[: 9 if case == "a replica without rows" else 16]
    told, ended = [], []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(batch))
    with mock.patch.object(logging, "warning", lambda text, *values: told.append((len(ended), text % values))):
        model.fit(rows, np.ones([len(rows), 1]), batch_size=8, shuffle=False, epochs=2, verbose=0, callbacks=[count])
    return [each for each in told if "Inf or NaN" in each[1]]
