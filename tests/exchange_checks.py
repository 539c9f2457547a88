"""Functions that the tests of exchange counts run in worker processes."""

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from keras_features import start_anew, strategy_of
from tfdist import compression

STEPS, BATCH, EPOCHS = 6, 8, 3
# Divides STEPS, so that each call of an epoch runs equally many steps.
STEPS_PER_EXECUTION = 3
INT8 = compression.Int8(min_elements=20, block_size=16)


def exchanges(strategy):
    """Returns how many exchanges this worker has started: collectives and exchanges over own connections."""
    extended = strategy.extended
    transports = {id(each): each for each in (extended._cross_device_ops, extended._host_cross_device_ops)}
    return sum(int(launcher.count) for each in transports.values() for launcher in each._launchers)


class Recorder(keras.callbacks.Callback):
    """Records the exchanges at the begin of each epoch and after each call of a step, one list per epoch."""

    def __init__(self, strategy):
        super().__init__()
        self._strategy, self.epochs = strategy, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([exchanges(self._strategy)])

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[-1].append(exchanges(self._strategy))

    on_test_begin = on_predict_begin = lambda self, logs=None: self.epochs.append([exchanges(self._strategy)])
    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def _model(strategy, **options):
    start_anew()
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(8, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **options)
    return model


def _arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(STEPS * BATCH, 6)).astype("float32"), rng.integers(0, 3, STEPS * BATCH)


def _counts(recorder):
    """Returns the exchanges after the first epoch: of the first call of a step, of later calls, between two epochs."""
    epochs = recorder.epochs[1:]
    return {
        "first": sorted({epoch[1] - epoch[0] for epoch in epochs}),
        "later": sorted({count for epoch in epochs for count in np.diff(epoch[1:]).tolist()}),
        "between": sorted({after[0] - before[-1] for before, after in itertools.pairwise(epochs)}),
    }


def of_fit(placement, data, codec=None, **options):
    """Counts the exchanges of `fit` on arrays, a pipeline of unknown length, or a `BalancedSharding`."""
    strategy = strategy_of(placement, INT8 if codec == "int8" else None)
    model, recorder = _model(strategy, **options), Recorder(strategy)
    x, y = _arrays()
    if data == "arrays":
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[recorder])
        return _counts(recorder)
    if data == "pipeline":
        rows = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True).batch(BATCH)
    else:
        rows = strategy.distribute_datasets_from_function(tfdist.data.BalancedSharding((x, y), BATCH, seed=1))
    model.fit(rows, epochs=EPOCHS, verbose=0, callbacks=[recorder])
    return _counts(recorder)


def of_evaluate_and_predict(placement):
    """Counts the exchanges of each batch of `evaluate` and of `predict`."""
    strategy = strategy_of(placement)
    model, (x, y) = _model(strategy), _arrays()
    evaluated, predicted = Recorder(strategy), Recorder(strategy)
    for _ in range(2):
        model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[evaluated])
        model.predict(x, batch_size=BATCH, verbose=0, callbacks=[predicted])
    return _counts(evaluated), _counts(predicted)


def of_custom_loop(placement):
    """Counts the exchanges of each step of a custom loop over a distributed dataset."""
    strategy = strategy_of(placement)
    model, (x, y) = _model(strategy), _arrays()
    loss_of, recorder = keras.losses.SparseCategoricalCrossentropy(from_logits=True), Recorder(strategy)
    with strategy.scope():
        optimizer = strategy.distributed_optimizer(keras.optimizers.SGD(0.1))
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = tf.function(lambda batch: strategy.run(on_replica, args=batch))
    for epoch in range(EPOCHS):
        recorder.on_epoch_begin(epoch)
        for number, batch in enumerate(data):
            step(batch)
            recorder.on_train_batch_end(number)
    return _counts(recorder)
