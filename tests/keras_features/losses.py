"""Rows for losses of outputs and layers, masks and weights."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_features.inputs import two_towers
from keras_features.models import tokens
from keras_features.table import BATCH, built, data, fit, outcome, row


@row(placements=("1x2",))
def masks_that_reach_the_loss(place):
    def tagger():
        tokens = layers.Input((7,))
        hidden = layers.Embedding(20, 4, mask_zero=True)(tokens)
        return keras.Model(tokens, {"tag": layers.Dense(3, name="tag")(hidden), "value": layers.Dense(1)(hidden)})

    x, _ = tokens(36)
    x *= np.arange(7) < np.arange(36)[:, None] % 7 + 1  # padded sentences
    y = {"tag": x % 3, "value": x[..., None] / 20.0}
    losses = {"tag": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"}
    weights = {"tag": np.linspace(0, 2, 36 * 7).reshape(36, 7), "value": np.linspace(1, 0, 36)[:, None]}
    model = built(place, tagger, loss=losses, metrics={"tag": "accuracy", "value": "mae"})
    return outcome(model, fit(model, x, y, sample_weight=weights, epochs=2))


@row()
def masks_that_losses_make(place):
    x, _ = tokens(33)
    x *= np.arange(7) < np.arange(33)[:, None] % 7 + 1
    y = {"tag": np.where(x % 4, x % 3, 9), "value": x % 3, "rest": x % 3}

    def tagger():
        words = layers.Input((7,))
        masked, plain = (layers.Embedding(20, 4, mask_zero=masks)(words) for masks in (True, False))
        return keras.Model(words, {name: layers.Dense(3)(masked if name == "tag" else plain) for name in y})

    def loss(reduction, **arguments):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction, **arguments)

    losses = {"tag": loss("mean", ignore_class=9), "value": loss("mean", ignore_class=0)}
    losses["rest"] = loss("mean_with_sample_weight", ignore_class=0)
    model = built(place, tagger, loss=losses, metrics=None)
    return outcome(model, fit(model, x, y, epochs=2, validation_data=(x, y)))


@row()
def a_masked_loss_by_weights_without_weights(place):
    x, _ = tokens(33)
    x *= np.arange(7) < np.arange(33)[:, None] % 7 + 1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    words = lambda: keras.Sequential([layers.Input((7,)), layers.Embedding(20, 4, mask_zero=True), layers.Dense(3)])  # noqa: E731
    return outcome(model := built(place, words, loss=loss, metrics=None), fit(model, x, x % 3))


@row()
def losses_that_are_matched_in_a_custom_loop(place):
    """Keras matches losses with outputs at the first call, here in the step."""
    strategy = place.strategy or tf.distribute.get_strategy()
    losses = {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)}
    losses["value"] = keras.losses.MeanSquaredError(reduction="sum")
    model = built(place, two_towers, optimizer=lambda: keras.optimizers.SGD(0.01), loss=losses, metrics=None)
    x, y = data(8)
    batch = {"a": x, "b": x[:, ::-1]}, {"label": y, "value": x[:, :1]}
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(batch).batch(8))

    @tf.function
    def train(batch):
        strategy.run(model.train_step, args=(batch,))

    for _ in range(3):
        for distributed in batches:
            train(distributed)
    return outcome(model, **model.get_metrics_result())


@row()
def losses_that_are_numbers(place):
    def error(y, predicted):
        return keras.ops.mean(keras.ops.square(keras.ops.one_hot(y, 3) - predicted))

    model = built(place, loss=error, optimizer=lambda: keras.optimizers.SGD(0.1), metrics=None)
    x, y = data(37)
    history = fit(model, x, y, validation_data=(x, y))
    return outcome(model, history, once=model.train_on_batch(x[:BATCH], y[:BATCH]))


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
def losses_of_some_outputs(place):
    losses = {"value": keras.losses.MeanSquaredError(reduction="sum")}
    model = built(place, two_towers, optimizer=lambda: keras.optimizers.SGD(0.01), loss=losses, metrics=None)
    x, y = data(33)
    return outcome(model, fit(model, {"a": x, "b": x[:, ::-1]}, {"label": y, "value": x[:, :1]}))


@row()
def losses_left_unreduced(place):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model = built(place, loss=loss, optimizer=lambda: keras.optimizers.SGD(0.01))
    x, y = data(40)
    weights = np.linspace(0, 2, 40)
    history = fit(model, x, y, sample_weight=weights, validation_data=(x, y, weights))
    fit(model, x[:29], y[:29])  # The last batch is short.
    return outcome(model, history)


class AddLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


# TensorFlow's graph optimizer folds constants differently if two replicas share them in one graph. Results differ by
# 3e-10 here, and are equal with tf.config.optimizer.set_experimental_options({"constant_folding": False}).
@row(placements=("1x2",), same_bits=False)
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


# Replicas of a process take turns at each exchange, and Keras collects losses in lists that they share.
@row()
def add_loss_around_exchanges_eagerly(place):
    def make():
        exchange = layers.BatchNormalization(synchronized=True)
        middle = [AddLoss(), layers.Dense(5, use_bias=False), exchange, layers.Dense(4, activity_regularizer="l2")]
        return keras.Sequential([layers.Input((6,)), *middle, AddLoss(), layers.Dense(3)])

    model = built(place, make, run_eagerly=True)
    x, y = data(24)
    return outcome(model, fit(model, x, y, epochs=2))
