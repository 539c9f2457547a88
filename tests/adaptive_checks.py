"""Small trainings with `tfdist.callbacks.AdaptiveBatch` for the tests, run in worker processes."""

import contextlib
import hashlib

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist
from backup_checks import await_save
from keras_features import start_anew
from tfdist.adaptive.noise_scale import NoiseSample, NoiseScale

BATCH = 64


def digits():
    data = load_digits()
    return (data.data / 16).astype("float32"), data.target.astype("int32")


def network():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy_of(placement):
    workers, devices = map(int, placement.split("x"))
    if workers > 1:
        return tfdist.MultiWorkerMirroredStrategy()
    return tfdist.MirroredStrategy([f"CPU:{device}" for device in range(devices)])


def prepared(strategy, optimizer=None, **compiled):
    with strategy.scope():
        model = network()
        optimizer = optimizer() if callable(optimizer) else optimizer or keras.optimizers.SGD(0.1)
        model.compile(optimizer, loss(), **compiled)
    return model


class BrokenOffError(Exception):
    """Ends a `fit` as an error in the user's code would."""


class Watch(keras.callbacks.Callback):
    """Records the learning rate of each step, and ends the `fit` after a given step."""

    def __init__(self, stop_after):
        super().__init__()
        self.rates, self._stop_after = [], stop_after

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == self._stop_after:
            raise BrokenOffError


def train(placement, every, folder=None, stop_after=None, epochs=4, optimizer=None, steps_per_execution=1, **fit):
    """Trains on digits with the goal "noise_scale", which needs no clock. Returns what a test compares."""
    start_anew()
    strategy = strategy_of(placement)
    model = prepared(strategy, optimizer, steps_per_execution=steps_per_execution)
    sharding = tfdist.data.BalancedSharding(digits(), BATCH, seed=3, policy="equal", batch_size_range=(16, 512))
    data = strategy.distribute_datasets_from_function(sharding)
    adaptive = tfdist.callbacks.AdaptiveBatch(sharding, every, goal="noise_scale")
    watch, sizes = Watch(stop_after), []
    strategy.reports.listeners.append(lambda report: sizes.append(int(report.rows.sum())))
    callbacks = [adaptive, watch, tfdist.callbacks.Audit(sharding)]
    if folder is not None:
        callbacks.append(tfdist.callbacks.BackupAndRestore(folder, save_freq=7, delete_checkpoint=False))
    history = {}
    with contextlib.suppress(BrokenOffError):
        history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **fit).history
    await_save()  # Otherwise a copy of the folder lacks the newest commit, or fails at a file that is moved meanwhile.
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return {
        "sizes": sizes,
        "rates": watch.rates,
        "history": history,
        "decisions": [str(each) for each in adaptive.decisions],
        "replicas": [each.replicas for each in adaptive.decisions],
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
        "position": sharding.position,
        "steps": sharding.steps_of_epoch,
    }


def noise_in_training_and_of_small_batches(placement, policy):
    """Returns two noise scales of one state of the weights: from the reports of `fit`, and from many small batches."""
    start_anew()
    strategy, (x, y) = strategy_of(placement), digits()
    model = prepared(strategy)
    sharding = tfdist.data.BalancedSharding((x, y), BATCH, seed=3, policy=policy)
    data = strategy.distribute_datasets_from_function(sharding)
    model.fit(data, epochs=1, verbose=0)
    model.optimizer.learning_rate = 0.0  # The weights stay as they are.
    strategy.reports.measured.add(model)
    model.train_function = None
    noise = NoiseScale()

    def take(report):
        assert len(report.own_squares) == strategy.num_replicas_in_sync
        if report.rows.sum() == BATCH:
            noise.observe(NoiseSample.of(report.rows.tolist(), report.own_squares.tolist(), report.sum_square, len(x)))

    strategy.reports.listeners.append(take)
    model.fit(data, epochs=8, verbose=0)
    return noise.value, _noise_scale_of_small_batches(model.get_weights(), x, y)


def _noise_scale_of_small_batches(weights, x, y, size=8):
    single = network()
    single.set_weights(weights)
    mean_loss = loss()

    @tf.function(reduce_retracing=True)
    def gradient(x, y):
        with tf.GradientTape() as tape:
            value = mean_loss(y, single(x))
        gradients = tape.gradient(value, [variable.value for variable in single.trainable_variables])
        return tf.concat([tf.reshape(each, [-1]) for each in gradients], 0)

    order = np.random.default_rng(0).permutation(len(x))[: len(x) // size * size]
    small = np.stack([gradient(x[part], y[part]).numpy() for part in np.split(order, len(order) // size)])
    noise = size * small.var(0, ddof=1).sum()
    return noise / (gradient(x, y).numpy() ** 2).sum()


def refusals():
    """Returns the messages with which AdaptiveBatch refuses what it cannot measure or change."""
    start_anew()
    strategy, found = strategy_of("1x2"), []

    def attempt(optimizer, **arguments):
        model = prepared(strategy, optimizer)
        sharding = tfdist.data.BalancedSharding(digits(), BATCH, batch_size_range=(16, 512))
        data = strategy.distribute_datasets_from_function(sharding)
        try:
            model.fit(data, verbose=0, callbacks=[tfdist.callbacks.AdaptiveBatch(sharding, **arguments)])
        except ValueError as error:
            found.append(str(error))

    attempt(lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100)))
    attempt(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    return found
