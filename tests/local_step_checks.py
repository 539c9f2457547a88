"""Trainings by local steps, which tests run in worker processes, and a plain reference of the same algorithms."""

import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from exchange_checks import Recorder
from keras_features import start_anew, strategy_of
from strategy_checks import own_index, wait_until_sent
from tfdist.strategies.local_steps.fragments import deal_out, has_arrived, is_due

FEATURES, CLASSES, BATCH, STEPS = 6, 3, 8, 12
LOCAL = tfdist.LocalSGD(every=4)
DILOCO = tfdist.DiLoCo(every=4)
STREAMING = tfdist.DiLoCo(every=4, fragments=2, overlap_steps=3)  # Both fragments travel at once for a step.


def data(steps=STEPS, batch=BATCH):
    rng = np.random.default_rng(0)
    rows = steps * batch
    x = rng.normal(size=(rows, FEATURES)) + np.linspace(-1, 1, rows)[:, None]
    return x.astype("float32"), rng.integers(0, CLASSES, rows)


def mlp():
    return keras.Sequential(
        [
            *(layers.Input((FEATURES,)), layers.Dense(5, activation="tanh")),
            *(layers.BatchNormalization(), layers.Dense(CLASSES)),
        ]
    )


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
}


def compiled(optimizer="adam", **options):
    model = mlp()
    model.compile(OPTIMIZERS[optimizer](), loss(), metrics=["accuracy"], **options)
    return model


class Weights(keras.callbacks.Callback):
    """Records the copies of all replicas of this worker after each step, and the weights that callbacks see."""

    def __init__(self):
        super().__init__()
        self.copies, self.at_epoch_ends = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.copies.append(copies_of(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.at_epoch_ends.append(copies_of(self.model))


def copies_of(model):
    """Returns the values of all weights, [weight][replica of this worker]."""
    local = model.distribute_strategy.experimental_local_results
    return [[copy.numpy() for copy in local(weight.value)] for weight in model.weights if "seed" not in weight.path]


def trained(
    placement, synchronization, *, epochs=1, optimizer="adam", steps=STEPS, extra=0, compression=None, **options
):
    """Trains by `fit`; returns the copies after each step, the history, and the final weights."""
    start_anew()
    strategy = strategy_of(placement, compression, synchronization=synchronization)
    with strategy.scope():
        model = compiled(optimizer, **options)
    x, y = data(steps)
    recorder = Weights()
    rows = len(x) - BATCH + extra if extra else len(x)
    history = model.fit(
        x[:rows], y[:rows], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[recorder]
    ).history
    return {
        "copies": recorder.copies,
        "ends": recorder.at_epoch_ends,
        "history": history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(x, y, batch_size=BATCH, verbose=0),
    }


def refusal_of_fit(placement, synchronization):
    """Returns the error of a `fit` that is refused, and whether its training has begun."""
    start_anew()
    with strategy_of(placement, synchronization=synchronization).scope():
        model = compiled()
    begun = []
    x, y = data()
    try:
        callback = keras.callbacks.LambdaCallback(on_train_begin=begun.append)
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    except ValueError as error:
        return str(error), bool(begun)
    return "", bool(begun)


def reference(synchronization, *, replicas=2, epochs=1, optimizer="adam", steps=STEPS, extra=0, until=None):
    """The same training on one device, one replica after another. Returns the weights at each synchronization.

    With `overlap_steps`, returns the weights after each step instead, [step][weight][replica], and at ends of epochs.
    """
    start_anew()
    first = mlp()
    start = [weight.numpy() for weight in first.weights]
    trainable = [any(weight is each for each in first.trainable_weights) for weight in first.weights]
    models = []
    for _ in range(replicas):
        model = mlp()
        model.set_weights(start)
        models.append((model, OPTIMIZERS[optimizer]()))
    fragments, outer = [list(range(len(start)))], None
    if isinstance(synchronization, tfdist.DiLoCo):
        trained = [i for i, is_one in enumerate(trainable) if is_one]
        dealt = deal_out([start[i].size for i in trained], synchronization.fragments)
        fragments = [[trained[place] for place in places] for places in dealt]
        fragments[0] += [i for i, is_one in enumerate(trainable) if not is_one]  # the statistics
        anchors = [[keras.Variable(start[i]) for i in fragment if trainable[i]] for fragment in fragments]
        outer = [synchronization.new_outer_optimizer() for _ in fragments]
    x, y = data(steps)
    rows = len(x) - BATCH + extra if extra else (until or steps) * BATCH
    synchronized, seen = [], np.zeros([len(fragments), replicas])
    overlap, travelling, after_steps, at_ends = getattr(synchronization, "overlap_steps", 0), {}, [], []

    def depart(fragment):
        counts = seen[fragment] if seen[fragment].any() else np.ones([replicas])
        ends = [model.get_weights() for model, _ in models]
        share, places = counts / counts.sum(), fragments[fragment]
        mean = {i: sum(part * end[i] for part, end in zip(share, ends, strict=True)) for i in places}
        travelling[fragment] = {i: start[i] - mean[i] if outer and trainable[i] else mean[i] for i in places}
        seen[fragment] = 0

    def arrive(fragment, own_part):
        mean = travelling.pop(fragment)
        if outer is not None:
            changed = [i for i in fragments[fragment] if trainable[i]]
            outer[fragment].apply([tf.constant(mean[i], tf.float32) for i in changed], anchors[fragment])
            mean |= {i: anchor.numpy() for i, anchor in zip(changed, anchors[fragment], strict=True)}
        for model, _ in models:
            own = model.get_weights()
            model.set_weights([own_part * w + (1 - own_part) * mean[i] if i in mean else w for i, w in enumerate(own)])
        for i in fragments[fragment]:
            start[i] = np.array(mean[i])
        synchronized.append(list(start))

    def synchronize(fragment):
        depart(fragment)
        arrive(fragment, own_part=0)

    for _ in range(epochs):
        for step, begin in enumerate(range(0, rows, BATCH), start=1):
            batch = x[begin : min(begin + BATCH, rows)], y[begin : min(begin + BATCH, rows)]
            share = -(-len(batch[0]) // replicas)
            for replica, (model, own) in enumerate(models):
                part = slice(replica * share, (replica + 1) * share)
                if not len(batch[0][part]):
                    continue
                with tf.GradientTape() as tape:
                    value = loss()(batch[1][part], model(batch[0][part], training=True))
                    value = own.scale_loss(value)
                own.apply(tape.gradient(value, model.trainable_weights), model.trainable_weights)
                seen[:, replica] += len(batch[0][part])
            for fragment in range(len(fragments)):
                if overlap and has_arrived(step, fragment, len(fragments), synchronization.every, overlap):
                    arrive(fragment, own_part=0.5)
            for fragment in range(len(fragments)):
                if is_due(step, fragment, len(fragments), synchronization.every):
                    (depart if overlap else synchronize)(fragment)
            after_steps.append([model.get_weights() for model, _ in models])
        if seen.any() or travelling:
            for fragment in list(travelling):
                arrive(fragment, own_part=0.5)
            for fragment in range(len(fragments)):
                synchronize(fragment)
        at_ends.append(list(start))
    return (after_steps, at_ends) if overlap else synchronized


def loop(placement, synchronization, *, viewed=False):
    """Trains by a custom loop, with losses divided by the size of the global batch. Returns the final weights."""
    start_anew()
    strategy = strategy_of(placement, synchronization=synchronization)
    with strategy.scope():
        model, optimizer = mlp(), OPTIMIZERS["adam"]()
        optimizer.build(model.trainable_variables)
    applies = strategy.distributed_optimizer(optimizer) if viewed else optimizer
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH))

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        applies.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda batch: strategy.run(on_replica, args=batch))
    for number, batch in enumerate(batches):
        if number < STEPS - 2:
            step(batch)
    strategy.synchronize()
    return model.get_weights()


def exchanges_of_fit(placement, kind, synchronization, **options):
    """Returns how many exchanges each call of a step takes, without those of the first epoch."""
    strategy = strategy_of(placement, synchronization=synchronization)
    start_anew()
    with strategy.scope():
        model = compiled(**options)
    x, y = data()
    recorder = Recorder(strategy)
    if kind == "arrays":  # with one row in the last batch
        x, y = x[: 1 - BATCH], y[: 1 - BATCH]
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[recorder])
    elif kind == "repeated":
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).repeat()
        model.fit(rows, steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[recorder])
    elif kind == "pipeline":
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
        model.fit(rows, epochs=2, verbose=0, callbacks=[recorder])
    else:
        sharding = tfdist.data.BalancedSharding((x, y), BATCH, seed=1, policy="equal")
        model.fit(strategy.distribute_datasets_from_function(sharding), epochs=2, verbose=0, callbacks=[recorder])
    return np.diff(recorder.epochs[-1]).tolist()


def steps_while_the_peer_waits(placement, synchronization, until, path):
    """Worker 1 begins step 4 once worker 0 has ended step `until`. Returns the steps and the weights."""
    strategy = strategy_of(placement, synchronization=synchronization)
    start_anew()
    with strategy.scope():
        model = compiled()
    signal, taken = pathlib.Path(path), []

    def wait(batch, logs):
        deadline = time.monotonic() + 100
        while own_index() == 1 and batch == 3 and not signal.exists():
            assert time.monotonic() < deadline, f"worker 0 has not ended step {until} in time"
            time.sleep(0.02)

    def tell(batch, logs):
        taken.append(batch + 1)
        if own_index() == 0 and batch + 1 == until:
            signal.touch()

    hooks = keras.callbacks.LambdaCallback(on_train_batch_begin=wait, on_train_batch_end=tell)
    model.fit(*data(8), batch_size=BATCH, verbose=0, callbacks=[hooks])
    return taken, model.get_weights()


def memory_of(placement, synchronization):
    """Returns the memory report after a step."""
    strategy = strategy_of(placement, synchronization=synchronization)
    start_anew()
    with strategy.scope():
        model = compiled()
    model.fit(*data(1), batch_size=BATCH, verbose=0)
    return strategy.memory_report()


def bytes_of_fit(placement, synchronization, compression, steps):
    """Returns the bytes that this worker has sent to peers in some steps of a model with 40,000 parameters."""
    strategy = strategy_of(placement, compression, synchronization=synchronization)
    start_anew()
    with strategy.scope():
        model = keras.Sequential([layers.Input((200,)), layers.Dense(200), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(64, 200)).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(64, drop_remainder=True).repeat()
    model.fit(rows, steps_per_epoch=steps, epochs=1, verbose=0)  # with the exchanges of the first step
    wait_until_sent(strategy)
    before = strategy.extended.sent_and_received_bytes()[0]
    model.fit(rows, steps_per_epoch=steps, epochs=1, verbose=0)
    wait_until_sent(strategy)
    return strategy.extended.sent_and_received_bytes()[0] - before


def requests_to_stop(placement, synchronization, asker):
    """Worker `asker` asks to stop in the second step. Returns, for each step, whether its report tells so, and rows."""
    strategy = strategy_of(placement, synchronization=synchronization)
    start_anew()
    with strategy.scope():
        model = compiled()
    heard = []

    def ask(batch, logs):
        if batch == 1 and own_index() == asker:
            strategy.reports.ask_to_stop()

    strategy.reports.listeners.append(listener := lambda report: heard.append((report.stop, report.rows.tolist())))
    try:
        model.fit(
            *data(), batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=ask)]
        )
    finally:
        strategy.reports.listeners.remove(listener)
    return heard
