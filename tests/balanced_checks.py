"""Functions that the tests of balanced sharding run in worker processes."""

import gc
import json
import os
import time
import weakref

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from keras_features import Place, outcome, start_anew, strategy_of
from tfdist.data import BalancedSharding
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.example_order import Shuffled

ROWS, BATCH, EPOCHS, SEED = 258, 32, 3, 5  # 27 steps; the last step of each epoch has fewer rows than replicas
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def arrays(rows=ROWS):
    """Rows with different means and classes of different sizes, so that training on other rows changes the result."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)) + np.linspace(-1, 1, rows)[:, None]
    return x.astype("float32"), (rng.random(rows) ** 2 * 3).astype("int64")


def weighted_arrays():
    return *arrays(), np.linspace(0, 2, ROWS).astype("float32")


def token_arrays():
    """Sequences that end in padding (0), with one class per token."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 20, (ROWS, 7)) * (np.arange(7) < rng.integers(1, 8, ROWS)[:, None])
    return tokens, tokens % 3


def dense(**arguments):
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, activation="tanh", **arguments), layers.Dense(3)])


def regularised():
    return dense(kernel_regularizer=keras.regularizers.L2(0.05), activity_regularizer=keras.regularizers.L1(0.01))


def masked():
    return keras.Sequential([layers.Input((7,)), layers.Embedding(20, 4, mask_zero=True), layers.Dense(3)])


def normalised():
    normalisation = layers.BatchNormalization(momentum=0.8, synchronized=True)
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, use_bias=False), normalisation, layers.Dense(3)])


# Name: (arrays, model, optimizer, `compile` options, tolerance)
CASES = {
    "plain": (arrays, dense, lambda: keras.optimizers.SGD(0.1, momentum=0.9), {}, 1e-5),
    "steps_per_execution": (arrays, dense, lambda: keras.optimizers.Adam(0.01), {"steps_per_execution": 4}, 1e-5),
    "weights_and_regularisers": (
        weighted_arrays,
        regularised,
        lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
        {"weighted_metrics": ["accuracy"]},
        1e-5,
    ),
    "accumulation": (arrays, dense, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), {}, 1e-5),
    "masks": (token_arrays, masked, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5), {}, 1e-5),
    "batch_normalization": (arrays, normalised, lambda: keras.optimizers.SGD(0.1), {}, 1e-4),
}
FIT_OPTIONS = {"steps_per_execution": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}}


def prepared(strategy, case="plain"):
    """Returns the compiled model of a case, under a strategy or without one."""
    _, make, make_optimizer, options, _ = CASES[case]
    start_anew()
    with Place(strategy, "", "").scope():
        model = make()
        model.compile(make_optimizer(), CROSSENTROPY, **{"metrics": ["accuracy"], **options})
    return model


def distributed(strategy, source, size=BATCH, **options):
    """Returns a sharding and its distributed dataset."""
    sharding = BalancedSharding(source, size, SEED, **options)
    return sharding, strategy.distribute_datasets_from_function(sharding)


def one_device(case):
    """Trains on the global batches of the plan, without a sharding."""
    examples = CASES[case][0]()
    plan = BatchPlan(ROWS, BATCH, Shuffled(ROWS, SEED))
    model = prepared(None, case)
    history = {}
    for epoch in range(EPOCHS):
        order = np.concatenate([plan.batch(epoch, step) for step in range(plan.steps_per_epoch)])
        batches = tf.data.Dataset.from_tensor_slices(tuple(array[order] for array in examples)).batch(BATCH)
        for name, values in model.fit(batches, verbose=0, **FIT_OPTIONS.get(case, {})).history.items():
            history.setdefault(name, []).extend(values)
    return outcome(model, history)


def train(placement, case, policy, compression=None):
    """Trains with a sharding. Also returns the rows of each step and the final position."""
    strategy = strategy_of(placement, compression)
    model = prepared(strategy, case)
    rows = []
    listener = lambda report: rows.append(tuple(report.rows.tolist()))  # noqa: E731
    strategy.reports.listeners.append(listener)
    sharding, data = distributed(strategy, CASES[case][0](), policy=policy)
    history = model.fit(data, epochs=EPOCHS, verbose=0, **FIT_OPTIONS.get(case, {})).history
    strategy.reports.listeners.remove(listener)
    return outcome(model, history) | {"rows": rows, "position": sharding.position}


class CountsTraces(layers.Layer):
    """Counts how often Python runs the layer: when the model is built, and when a step is traced."""

    count = 0

    def call(self, x):
        CountsTraces.count += 1
        return x


class WrapsTrainFunction(keras.Model):
    """A model that calls Keras' train function in a function of its own."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            keras_own = self.train_function
            self.train_function = lambda iterator: dict(keras_own(iterator))


def train_by_wrapped_function(placement, policy):
    """Returns the result of a model of `WrapsTrainFunction`, and how often its step was traced after its first run."""
    strategy = strategy_of(placement)
    start_anew()
    with Place(strategy, "", "").scope():
        hidden = layers.Dense(5, activation="tanh")(CountsTraces()(inputs := layers.Input((6,))))
        model = WrapsTrainFunction(inputs, layers.Dense(3)(hidden))
        model.compile(CASES["plain"][2](), CROSSENTROPY, metrics=["accuracy"])
    traces = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: traces.append(CountsTraces.count))
    _, data = distributed(strategy, arrays(), policy=policy)
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[note]).history
    return outcome(model, history) | {"later_traces": traces[-1] - traces[0]}


def train_by_own_iterators(placement, kind, policy):
    """Returns the result of a `fit` of one epoch, after which `train_function` reads iterators of the user's own."""
    strategy = None if placement == "single" else strategy_of(placement)
    model = prepared(strategy)
    if kind == "plain":
        data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    else:
        _, data = distributed(strategy, arrays(), policy=policy)
    model.fit(data, verbose=0)
    for _ in range(EPOCHS - 1):
        iterator = iter(data)
        for _ in range(-(-ROWS // BATCH)):
            logs = model.train_function(iterator)
            assert np.isfinite(float(logs["loss"]))
    return outcome(model, {})


def evaluate_and_predict(placement):
    strategy = strategy_of(placement)
    model = prepared(strategy)
    x, y = arrays(37)
    _, data = distributed(strategy, (x, y), 8)
    evaluated = [model.evaluate(data, verbose=0), model.evaluate(x, y, verbose=0)]
    return evaluated, model.predict(data, verbose=0), model.predict(x, verbose=0)


class StopAfter(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.model.stop_training = True


def stop_or_continue(placement, folder, stop_after=None, epochs=EPOCHS):
    """Continues from a checkpoint in `folder` if there is one. Stops after some steps and saves, or finishes."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    sharding, data = distributed(strategy, arrays())
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    whole = tf.train.Checkpoint(model=model, data=sharding)
    worker = own_index()
    if found := tf.train.latest_checkpoint(f"{folder}/0"):
        whole.restore(found).assert_existing_objects_matched()
    start = sharding.position
    callbacks = [StopAfter(stop_after)] if stop_after else []
    model.fit(data, epochs=epochs - start[0], verbose=0, callbacks=callbacks)
    if stop_after:
        whole.save(f"{folder}/{worker}/state")
    return outcome(model) | {"start": start, "end": sharding.position, "saved": len(sharding.serialize())}


def own_index():
    return json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]


def let_go(placement):
    """Returns whether shardings or arrays outlive their datasets, and whether the strategy keeps the last one only."""
    gc.freeze()  # Otherwise `collect` frees garbage of other tests and waits up to a minute for each pipeline's tuner.
    strategy = strategy_of(placement)
    model = prepared(strategy)
    before = strategy.shardings  # Holds the shardings of other tests, which could disappear during this one.

    def references(use, **options):
        sharding, data = distributed(strategy, arrays(), **options)
        use(data)
        return [weakref.ref(sharding), weakref.ref(sharding.source._columns[0])]

    made = [
        *references(lambda data: model.evaluate(data, verbose=0)),
        *references(lambda data: model.fit(data, verbose=0), map_fn=lambda *example: example),
        *references(lambda data: next(iter(data))),
    ]
    last, data = distributed(strategy, arrays())
    model.fit(data, verbose=0)
    # A thread that reads ahead may hold them until it has noticed the end of its iterator.
    wait_until(lambda: gc.collect() >= 0 and all(reference() is None for reference in made))
    gc.unfreeze()
    alive = [reference() is not None for reference in made]
    return alive, [sharding for sharding in strategy.shardings if sharding not in before] == [last]


def together(placement):
    """Trains with two shardings in one fit, then on other input. Returns logs and the positions in between."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    x, y = arrays()
    sharding, data = distributed(strategy, (x, y))
    held_out, validation = distributed(strategy, (x[:37], y[:37]), 8)
    history = model.fit(data, validation_data=validation, epochs=2, verbose=0).history
    positions = [sharding.position, held_out.position]
    expected = model.evaluate(x[:37], y[:37], verbose=0)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    positions.append(sharding.position)
    model.fit(data, verbose=0)
    positions.append(sharding.position)
    return history, expected, positions


def with_itself_as_validation(placement):
    """Reads one sharding for training and validation in turns, with epochs that end before the data does."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    x, y = arrays()
    sharding, data = distributed(strategy, (x, y))
    positions = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: positions.append(sharding.position))
    callbacks = [note, tfdist.callbacks.Audit(sharding)]
    history = model.fit(data, steps_per_epoch=3, epochs=4, validation_data=data, verbose=0, callbacks=callbacks).history
    return history, model.evaluate(x, y, verbose=0), positions


class FitWithin(keras.callbacks.Callback):
    """In the first epoch, reads a batch of the training data and fits another model on other data."""

    def __init__(self, inner, inner_data, data=()):
        super().__init__()
        self.inner, self.inner_data, self.data = inner, inner_data, data

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            next(iter(self.data), None)
            for data in self.inner_data:
                self.inner.fit(data, steps_per_epoch=2, verbose=0)
            self.inner_data = ()


def one_fit_within_another(placement):
    """Fits one model inside the fit of another. Also returns positions, and the errors of two mistakes."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    with strategy.scope():
        inner = dense()
        inner.compile("sgd", CROSSENTROPY)
    sharding, data = distributed(strategy, arrays())
    other_sharding, other_data = distributed(strategy, arrays(37), 8)
    plain = tf.data.Dataset.from_tensor_slices(arrays(37)).batch(8)
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[FitWithin(inner, [other_data, plain], data)]).history
    trained = outcome(model, history) | {"positions": [sharding.position, other_sharding.position]}
    try:
        model.fit(data, verbose=0, callbacks=[FitWithin(model, [plain])])
    except ValueError as error:
        trained |= {"error": str(error)}
    with strategy.scope():
        unknown = StepOfItsOwn(model.inputs, model.outputs)
        unknown.compile("sgd", CROSSENTROPY)
    try:
        unknown.fit(data, verbose=0)
    except ValueError as error:
        return trained | {"unknown_step": str(error)}


class StepOfItsOwn(keras.Model):
    def make_train_function(self, force=False):
        def run_step(batch):
            return super(StepOfItsOwn, self).train_step(batch)

        strategy = self.distribute_strategy
        self.train_function = tf.function(lambda iterator: strategy.run(run_step, args=(next(iterator),)))


def without_end(strategy):
    """Returns the positions after three parts of endless epochs."""
    model = prepared(strategy)
    sharding, data = distributed(strategy, arrays(), repeat=True)
    positions = []
    for _ in range(3):
        model.fit(data, steps_per_epoch=5, verbose=0)
        positions.append(sharding.position)
    return positions


class Slow(layers.Layer):
    """A layer that sleeps for a time per row on one worker."""

    def __init__(self, worker, seconds_per_row):
        super().__init__()
        self.seconds_per_row = seconds_per_row if own_index() == worker else 0.0

    def call(self, x):
        def wait(x):
            time.sleep(len(x) * self.seconds_per_row)
            return x

        slowed = tf.ensure_shape(tf.numpy_function(wait, [tf.stop_gradient(x)], x.dtype), x.shape)
        return x + 0.0 * slowed

    def compute_output_shape(self, shape):
        return shape


def slowed(placement, by_callback=False):
    """Returns the rows of each step when worker 1 has a slow layer or a slow callback."""
    strategy = strategy_of(placement)
    keras.utils.set_random_seed(1)
    # Much slower than the other worker, also if that one has to wait for a busy processor in each step.
    slow = Slow(own_index(), 0.006) if by_callback else Slow(1, 0.02)
    pause = 0.08 if by_callback and own_index() == 1 else 0
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(pause))
    with strategy.scope():
        model = keras.Sequential([layers.Input((6,)), slow, layers.Dense(3)])
        model.compile("sgd", CROSSENTROPY)
    rows = []
    listener = lambda report: rows.append(tuple(report.rows.tolist()))  # noqa: E731
    strategy.reports.listeners.append(listener)
    sharding, data = distributed(strategy, arrays())
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[callback])
    strategy.reports.listeners.remove(listener)
    return rows, sharding.serialize(), sharding.statistics()


def custom_loop(placement):
    """Returns the rows that a custom loop reads in two epochs, and the position after each epoch."""
    strategy = strategy_of(placement)
    sharding, data = distributed(strategy, np.arange(ROWS))
    seen, positions = [], []
    for _ in range(2):
        for batch in data:
            seen += [row for part in strategy.experimental_local_results(batch) for row in part.numpy().tolist()]
        positions.append(sharding.position)
    return seen, positions


def wait_until(is_so):
    """Waits up to a minute for a condition. Returns whether it became true."""
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def look_and_train(placement):
    """Returns the positions after one read batch with all data prefetched, after `fit`, and after a loop in a graph."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    sharding, data = distributed(strategy, tuple(each[:64] for each in arrays()), size=16)
    iterator = iter(data)
    next(iterator)
    assert wait_until(lambda: sharding.assignments.position._counted.finished), "all was read ahead"
    positions = [sharding.position]
    del iterator
    model.fit(data, epochs=1, verbose=0, callbacks=[tfdist.callbacks.Audit(sharding)])
    positions.append(sharding.position)

    @tf.function
    def take(iterator):
        for batch in iterator:
            del batch

    take(iter(data))
    assert wait_until(lambda: sharding.assignments.position._counted.finished)
    return [*positions, sharding.position]


def look_beside_training(placement):
    """Returns the rows of each step of a `fit`, the position after it, and the rows that the chief read before."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    sharding, data = distributed(strategy, arrays())
    looked_at, rows = None, []
    if tfdist.cluster.is_chief():
        x, _ = next(iter(sharding()))
        looked_at = [len(x), sum(len(x) for x, _ in sharding(training=False))]
    listener = lambda report: rows.append(int(report.rows.sum()))  # noqa: E731
    strategy.reports.listeners.append(listener)
    model.fit(data, verbose=0, callbacks=[tfdist.callbacks.Audit(sharding)])
    strategy.reports.listeners.remove(listener)
    return rows, sharding.position, looked_at


def drawn_by_workers():
    """Returns the numbers that `tf.random` draws in `map_fn` on two workers with equal seeds, in two epochs."""
    drawn = []
    for worker in range(2):
        tf.random.set_seed(1)
        draw = lambda i: tf.random.uniform([], dtype=tf.float64)  # noqa: E731
        data = BalancedSharding(np.arange(64), 16, map_fn=draw)(tf.distribute.InputContext(2, worker, 2))
        drawn += [float(value) for _ in range(2) for batch in data for value in batch]
    tf.random.set_seed(None)  # Other tests share the process.
    return drawn


def beside_the_strategy():
    """Returns the errors of workers that bypass the strategy to read a sharding, or start at different positions."""
    strategy = strategy_of("2x1")
    model = prepared(strategy)
    sharding, data = distributed(strategy, arrays())
    other = BalancedSharding(arrays(), BATCH)
    if tfdist.cluster.is_chief():
        sharding.deserialize(sharding.serialize().replace('"step":0', '"step":5'))
    way_out, said = "strategy.distribute_datasets_from_function(sharding)", []
    for misuse in (
        lambda: model.fit(other(), verbose=0),
        lambda: model.predict(other(training=False).prefetch(1), verbose=0),
        lambda: strategy.distribute_datasets_from_function(lambda context: other(context)),
        lambda: strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.zip((other(), other()))),
        lambda: model.fit(data, verbose=0),
    ):
        try:
            misuse()
        except (ValueError, tfdist.errors.ClusterError) as error:
            said.append(way_out if way_out in str(error) else str(error))
    return said


def train_on_doubled(placement, policy):
    """Returns the error of a `fit` on batches that a map has made twice as long."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    _, data = distributed(strategy, arrays(), policy=policy)
    try:
        model.fit(data.map(lambda x, y: (tf.concat([x, x], 0), tf.concat([y, y], 0))), verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return str(error)


def train_on_plain_dataset(placement):
    model = prepared(strategy_of(placement))
    sharding = BalancedSharding(arrays(), BATCH, SEED)
    history = model.fit(sharding(), epochs=EPOCHS, verbose=0).history
    return outcome(model, history) | {"position": sharding.position}


def audit_of_another(strategy):
    """Returns the errors of `fit` under the Audit of another sharding, and of a sharding without a strategy."""
    model = prepared(strategy)
    _, data = distributed(strategy, arrays())
    other, _ = distributed(strategy, arrays())
    said = []
    for sharding in (other, tfdist.data.BalancedSharding(arrays(), 16)):
        try:
            model.fit(data, epochs=1, verbose=0, callbacks=[tfdist.callbacks.Audit(sharding)])
        except tfdist.errors.AuditError as error:
            said.append(str(error))
    return said


class Repeating(BatchPlan):
    """A faulty plan: repeats the first example of each global batch in place of the last."""

    def examples(self, epoch, first, rows):
        batch = super().examples(epoch, first, rows)
        return np.append(batch[:-1], batch[0])


def audited(placement, broken=False):
    """Trains one epoch, a part of one and its rest under an audit. Returns the error, the logs and the position."""
    strategy = strategy_of(placement)
    model = prepared(strategy)
    sharding, data = distributed(strategy, arrays(), policy="speed")
    if broken:
        sharding.assignments.plan = Repeating(**vars(sharding.plan))
    callbacks = [tfdist.callbacks.Audit(sharding), tfdist.callbacks.Balance()]
    try:
        history = model.fit(data, epochs=1, verbose=0, callbacks=callbacks).history
        for step in (3, 6):
            model.fit(data, epochs=1, verbose=0, callbacks=[*callbacks, StopAfter(step)])
    except tfdist.errors.AuditError as error:
        return str(error), None, sharding.position
    return None, history, sharding.position


def fail_in_training(kind, path=None):
    """Trains on two workers until one cannot read: example 41 is invalid, or the file is truncated meanwhile."""
    strategy = tfdist.MultiWorkerMirroredStrategy()
    model = prepared(strategy)

    def divide(x, y):
        quotient = tf.numpy_function(lambda y: np.int64(840 // (int(y) - 41)), [y], tf.int64)
        return x, tf.ensure_shape(quotient, []) % 3

    def parse(record):
        example = tf.io.parse_tensor(record, tf.float32)
        return tf.ensure_shape(example, [6]), tf.constant(1)

    x, _ = arrays(96)
    source, map_fn = {"map_fn": ((x, np.arange(96)), divide), "file": (path, parse)}[kind]
    _, data = distributed(strategy, source, 8, shuffle=False, map_fn=map_fn)
    model.fit(data, epochs=9, verbose=0, callbacks=[CutShort(path, 3)])


def write_records(path):
    """Writes 96 records of 6 floats."""
    with tf.io.TFRecordWriter(path) as writer:
        for row in arrays(96)[0]:
            writer.write(tf.io.serialize_tensor(row).numpy())


class CutShort(keras.callbacks.Callback):
    """Truncates a file after a few steps."""

    def __init__(self, path, steps):
        super().__init__()
        self.path, self.steps = path, steps

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.steps:
            os.truncate(self.path, 50 * 47)


def unlike_shardings(folder):
    """Returns the errors of workers that read different examples, orders or files, and "alike" for equal ones."""
    strategy = strategy_of("2x1")
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    def told(source, seed):
        try:
            strategy.distribute_datasets_from_function(BalancedSharding(source, 8, seed))
        except tfdist.errors.ClusterError as error:
            return str(error)
        return "alike"

    def files(records):
        path = os.path.join(folder, f"of_{worker}")
        with tf.io.TFRecordWriter(path) as writer:
            for record in records:
                writer.write(record)
        return [path]

    return [
        told(np.arange(20 - worker), 0),
        told(np.arange(20), worker),
        told(np.arange(20), 0),
        told(files([b"same"] * 20), 0),
        told(files([b"%d" % worker] * 20), 0),
    ]
