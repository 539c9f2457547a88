"""Rows for models and layers."""

import functools
import gc
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_features.inputs import order_options
from keras_features.table import BATCH, built, compiled, data, fit, mlp, outcome, row


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


def without_a_name(step):
    def wrapper(self, data):
        return step(self, data)

    return wrapper


class DecoratedStep(Subclassed):
    train_step = without_a_name(Subclassed.train_step)


class TracedStep(Subclassed):
    @tf.function
    def train_step(self, data):
        logs = super().train_step(data)
        if tf.reduce_mean(data[0]) < 0:
            logs["steps"] = tf.constant(1.0)
        else:
            logs["steps"] = tf.constant(0.0)
        return logs


@row()
def step_under_a_decorator(place):
    x, y = data(37)
    models = []
    for make in (DecoratedStep, TracedStep):
        models.append(built(place, make, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2)))
        history = fit(models[-1], x, y)
    del history["steps"]  # counts the steps of one replica
    return outcome(models[0], history, weights=np.concatenate([each.ravel() for each in models[1].get_weights()]))


@row(placements=("1x2",), exempt="the rounding of halves")
def bfloat16_weights_and_small_integers(place):
    model = built(place, functools.partial(mlp, dtype="bfloat16"))
    history = fit(model)
    x, _ = data(9)
    outputs = model.predict(x, batch_size=BATCH, verbose=0)
    # Keras collects garbage here, and freeing the datasets of earlier rows may wait half a minute for their tuners.
    with place.scope(), mock.patch.object(gc, "collect"):
        model.quantize("int8")
    return outcome(model, history, outputs=outputs.astype("float32"))


@row(tolerance=1e-2)  # A sum in another order may round to another float8.
def float8_layers(place):
    x, y = data(33)
    x *= np.linspace(0.1, 3, 33, dtype="float32")[:, None]
    makes = [functools.partial(mlp, dtype="float8_from_float32"), Float8WithoutScaledLoss]
    models = [built(place, make) for make in makes]
    histories = [fit(model, x, y) for model in models]
    # The loss is not scaled, so a replica's gradients are not those of the whole batch.
    same = [variable for variable in models[1].variables if "outputs_grad" not in variable.path]
    weights = np.concatenate([np.ravel(variable) for variable in same])
    return outcome(models[0], histories[0], loss=histories[1]["loss"], weights=weights)


class Float8WithoutScaledLoss(CustomStep):
    """Does not scale the loss in its step."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5, activation="tanh", dtype="float8_from_float32")


class InPython(layers.Layer):
    """Returns three times its input, computed by Python functions in the forward and the backward pass."""

    def call(self, x):
        def by_python(x):
            return tf.ensure_shape(tf.numpy_function(lambda x: 3 * x, [x], x.dtype), x.shape)

        @tf.custom_gradient
        def triple(x):
            return by_python(x), by_python

        return triple(x)


# TensorFlow runs Python functions one after another, including those of two replicas in one graph.
@row()
def python_functions(place):
    model = built(place, lambda: keras.Sequential([layers.Input((6,)), layers.Dense(5), InPython(), layers.Dense(3)]))
    return outcome(model, fit(model, epochs=2))


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


class NormalizedStep(CustomStep):
    """Exchanges gradients between replicas before the step weights them."""

    def __init__(self):
        super().__init__()
        self.before, self.normalize = layers.Dense(5, use_bias=False), layers.BatchNormalization(synchronized=True)

    def call(self, x, training=None):
        return super().call(self.normalize(self.before(x), training=training))


@row(placements=("1x2",), tolerance=1e-4)
def batch_normalization_synchronized_in_a_custom_step(place):
    model = built(place, NormalizedStep)
    x, y = data(37)  # The last batch has a row on one replica only.
    return outcome(model, fit(model, x, y, epochs=2))


class Attention(layers.Layer):
    """Creates its sublayers while shapes are traced, and has no `build`."""

    def __init__(self):
        super().__init__()
        self.attention, self.normalize = layers.MultiHeadAttention(1, 2, dropout=0.5), layers.BatchNormalization()

    def call(self, x):
        x = x[..., None]
        return self.normalize(self.attention(x, x)[..., 0])


@row(
    placements=("1x2",),
    exempt="each replica normalises its own rows and draws its own masks; the moving statistics agree all the same",
)
def model_that_fit_builds(place):
    model = built(place, lambda: keras.Sequential([layers.Dense(5), Attention(), layers.Dense(3)]))
    x, y = data(33)  # the last batch leaves a replica without rows
    history = fit(model, x, y, epochs=2)
    return outcome(model, history, evaluated=model.evaluate(x, y, verbose=0))


@row(placements=("2x1",), exempt="replicas draw different masks")
def dropout(place):
    model = built(
        place, lambda: keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dropout(0.5), layers.Dense(3)])
    )
    history = fit(model)
    return outcome(model, history, predicted=model.predict(data(5)[0], verbose=0))


class Noise(layers.Layer):
    """Draws random numbers without a seed, from Keras' global generator."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


@row(placements=("1x2",), exempt="each replica draws its own noise")
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


@row(placements=("2x2",))
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


class WithPositions(keras.Model):
    """Adds a vector for the position of each token, which does not depend on the rows."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.out = layers.Embedding(50, 4), layers.Embedding(9, 4), layers.Dense(3)

    def call(self, x):
        places = self.positions(tf.range(tf.shape(x)[1]))
        return self.out(tf.reduce_mean(tf.tanh(self.tokens(x) + places), axis=1))


@row()
def embedding_of_positions(place):
    model = built(place, WithPositions, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens()
    return outcome(model, fit(model, x, y, epochs=2))


@row()
def embedding_of_positions_under_loss_scaling(place):
    """Replicas exchange gradients in a branch inside of a loop."""

    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.1))

    model = built(place, WithPositions, optimizer=optimizer, steps_per_execution=3)
    x, y = tokens()
    return outcome(model, fit(model, x, y, epochs=2))


@row()
def embedding_of_positions_in_texts_of_any_length(place):
    model = built(place, WithPositions, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens(40)
    texts = tf.data.Dataset.from_generator(
        lambda: ((x[i, : 3 + i % 5], y[i]) for i in range(40)),
        output_signature=(tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)),
    )
    dataset = texts.padded_batch(BATCH).with_options(order_options())
    return outcome(model, model.fit(dataset, verbose=0, epochs=2).history)


@row()
def embedding_of_positions_by_a_constant(place):
    class WithConstant(WithPositions):
        def __init__(self):
            super().__init__()
            self.places = tf.range(7)

        def call(self, x):
            return self.out(tf.reduce_mean(tf.tanh(self.tokens(x) + self.positions(self.places)), axis=1))

    model = built(place, WithConstant, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens()
    return outcome(model, fit(model, x, y, epochs=2))


@row(exempt="each replica counts its own rows")
def embedding_of_places_counted_from_the_last_row(place):
    """Each replica looks up different rows, according to its rows of the batch."""

    class FromTheLast(WithPositions):
        def call(self, x):
            places = self.positions(tf.shape(x)[0] % 2 + tf.range(7))
            return self.out(tf.reduce_mean(tf.tanh(self.tokens(x) + places), axis=1))

    model = built(place, FromTheLast, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens(35)
    return outcome(model, fit(model, x, y, epochs=2))


class ForEachRow(WithPositions):
    """Looks up positions for each row, so that one device has one gradient per row and position."""

    def call(self, x):
        places = self.positions(tf.tile(tf.range(7)[None], [tf.shape(x)[0], 1]))
        return self.out(tf.reduce_mean(tf.tanh(self.tokens(x) + places), axis=1))


@row()
def embedding_of_positions_for_each_row(place):
    model = built(place, ForEachRow, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens(37)
    return outcome(model, fit(model, x, y))


@row(same_bits=False)
def embedding_of_positions_for_each_of_so_many_rows(place):
    """Replicas have different, static numbers of rows; two devices have five rows together."""
    model = built(place, ForEachRow, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens(5)
    own = slice(5)
    if place.strategy is not None and place.strategy.extended._num_workers > 1:
        own = slice(3) if place.is_chief else slice(3, 5)
    for _ in range(3):
        model.train_on_batch(x[own], y[own])
    return outcome(model)


@row(placements=("1x2",))
def embedding_of_all_items_beside_those_of_the_batch(place):
    class Scores(keras.Model):
        def __init__(self):
            super().__init__()
            self.items = layers.Embedding(20, 4)

        def call(self, x):
            return tf.reduce_mean(self.items(x), axis=1) @ tf.transpose(self.items(tf.range(20)))

    model = built(place, Scores, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens()
    return outcome(model, fit(model, x, y, epochs=2))


@row()
def embedding_of_each_token_once(place):
    class Once(WithPositions):
        def call(self, x):
            once, places = tf.unique(tf.reshape(x, [-1]))
            return self.out(tf.reduce_mean(tf.gather(self.tokens(once), tf.reshape(places, tf.shape(x))), axis=1))

    model = built(place, Once, optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1))
    x, y = tokens()
    return outcome(model, fit(model, x, y, epochs=2))


class ByEachReplica(WithPositions):
    """Looks up different positions on each replica, although its graph does not depend on the batch."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def call(self, x):
        places = self.positions(self.places(x))
        return self.out(tf.reduce_mean(tf.tanh(self.tokens(x) + places), axis=1))


@tf.function
def drawn():
    return tf.random.uniform([7], maxval=9, dtype=tf.int32)


@row(exempt="each replica draws places of its own", same_bits=False)
def embedding_of_places_drawn_in_a_function(place):
    model = built(place, lambda: ByEachReplica(lambda x: drawn()), optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens()
    return outcome(model, fit(model, x, y))


@row(exempt="each replica has places of its own")
def embedding_of_places_by_the_replica(place):
    def places(x):
        context = tf.distribute.get_replica_context()  # None while the model is built
        return tf.range(7) + (context.replica_id_in_sync_group % 2 if context else 0)

    model = built(place, lambda: ByEachReplica(places), optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens()
    return outcome(model, fit(model, x, y))


@row()
def embedding_of_one_kind_for_all(place):
    """On one device, the weight has one gradient per token."""

    class OfOneKind(ForEachRow):
        def call(self, x):
            kinds = self.positions(tf.fill(tf.shape(x), 0))
            return self.out(tf.reduce_mean(tf.tanh(self.tokens(x) + kinds), axis=1))

    model = built(place, OfOneKind, optimizer=lambda: keras.optimizers.Adam(0.01))
    x, y = tokens(37)
    return outcome(model, fit(model, x, y))


class OverRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = layers.Dense(3)
        self.out.build((None, 1))
        self.built = True

    def call(self, x):
        return self.out(tf.reduce_mean(tf.cast(x, tf.float32), axis=1, keepdims=True))


class LooksAtValues(Subclassed):
    """Reads the values of its input in Python, which only works in eager mode."""

    def call(self, x):
        if float(tf.reduce_sum(tf.abs(x))) < 0:
            raise ValueError("never")
        return super().call(x)


def share_of_right(y, predicted):
    return (y.numpy().ravel() == predicted.numpy().argmax(axis=-1)).astype("float32")


def weighted_by_class(y, predicted):
    weights = np.take([0.5, 1.0, 2.0], y.numpy().astype(int).ravel()).astype("float32")
    return keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True) * weights


@row()
def values_looked_at_eagerly(place):
    of_values = {"loss": weighted_by_class, "metrics": [share_of_right], "run_eagerly": True}
    model = built(place, LooksAtValues, optimizer="adam", **of_values)
    x, y = data(17)
    return outcome(model, fit(model, x, y, validation_data=(x, y)))


class Routed(keras.Model):
    """Passes each part its own rows, and does not call parts without rows, so replicas train different parts."""

    def __init__(self, parts):
        super().__init__()
        self.all, self.parts = layers.Dense(3), parts
        for layer in (self.all, *parts):
            layer.build((None, 6))
        self.built = True

    def call(self, x):
        total = self.all(x)
        chosen = np.digitize(tf.reduce_mean(x, axis=1), np.linspace(-0.5, 0.5, len(self.parts) - 1))
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(chosen == number)
            if len(own):
                total = tf.tensor_scatter_nd_add(total, own[:, None], part(tf.gather(x, own)))
        return total


class Words(layers.Layer):
    """Looks up the first number of a row as a word, or sums all words weighted by the numbers of the row."""

    def __init__(self, vectors, *, all_at_once=False):
        super().__init__()
        self.vectors, self.all_at_once = vectors, all_at_once

    def call(self, x):
        if self.all_at_once:
            return x @ self.vectors.embeddings
        return self.vectors(tf.cast(x[:, 0] > 0, tf.int32))


def routed_to_parts_of_unlike_kinds():
    """One replica has a sparse gradient, and another a dense gradient of the same weight."""
    vectors = layers.Embedding(6, 3)
    vectors.build((None,))
    wide = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])
    return Routed([Words(vectors), wide, Words(vectors, all_at_once=True)])


@row()
def parts_for_some_rows_eagerly(place):
    make = functools.partial(Routed, [layers.Dense(3), layers.Dense(3), layers.Dense(3)])
    model = built(place, make, optimizer="adam", run_eagerly=True)
    x, y = data(33)
    return outcome(model, fit(model, x, y))


@row()
def parts_of_unlike_kinds_for_some_rows_eagerly(place):
    model = built(place, routed_to_parts_of_unlike_kinds, optimizer="adam", run_eagerly=True)
    x, y = data(33)
    return outcome(model, fit(model, x, y))


class OfUnlikeLengths(keras.Model):
    """Calls a method of its input that symbolic tensors do not have."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = layers.Embedding(9, 4), layers.Dense(3)

    def call(self, x):
        return self.out(tf.reduce_sum(self.embedding(x.to_tensor()), axis=1))


@row()
def ragged_input_that_the_model_fills_up(place):
    model = built(place, OfUnlikeLengths, optimizer="adam")
    rows = tf.RaggedTensor.from_row_lengths(tf.range(1, 73) % 7, [2] * 36)
    dataset = tf.data.Dataset.from_tensor_slices((rows, data(36)[1])).batch(BATCH).with_options(order_options())
    return outcome(model, model.fit(dataset, verbose=0, epochs=2).history)


class WithAHelper(Subclassed):
    """Has an additional output in training."""

    def __init__(self):
        super().__init__()
        self.helper = layers.Dense(3)

    def call(self, x, training=False):
        result = super().call(x)
        return [result, self.helper(x)] if training else result


@row()
def an_output_more_in_training(place):
    with place.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = compiled(WithAHelper(), "adam", [loss, loss], metrics=None)
    x, y = data(25)
    return outcome(model, fit(model, x, [y, y], epochs=2))


@row(placements=("2x1",))
def ragged_input_and_a_replica_without_rows(place):
    model = built(place, OverRagged)
    rows = tf.RaggedTensor.from_row_lengths(tf.range(1, 100) % 7, [3] * 33)
    dataset = tf.data.Dataset.from_tensor_slices((rows, data(33)[1])).batch(BATCH)
    return outcome(model, model.fit(dataset, verbose=0, epochs=2).history)


@row(tolerance=1e-4)
def convolutions_and_a_replica_without_rows(place):
    """Fused convolutions and reshapes fail on an empty batch; the last batch has one row."""
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


@row(placements=("2x1",))
def predict_other_than_rows(place):
    """The model returns two rows for each row of its input."""
    with place.scope():
        inputs = layers.Input((6,))
        model = keras.Model(inputs, Halves()(layers.Dense(4)(inputs)))
    return outcome(model, predicted=model.predict(data(33)[0], batch_size=BATCH, verbose=0))


class OfManyTypes(Subclassed):
    """Returns outputs of types that collectives do not support."""

    words = ("", "one", "two \N{GREEK SMALL LETTER BETA}", "and a much longer one")

    def call(self, x):
        x = super().call(x)
        which = tf.cast(tf.reduce_sum(tf.cast(x > 0, tf.int32), axis=1), tf.uint64)
        pair = tf.complex(x[:, :1], x[:, 1:2])
        return {
            "words": tf.gather(tf.constant(self.words), tf.cast(which, tf.int32))[:, None],
            "pairs": pair,
            "wide": tf.cast(pair, tf.complex128),
            "large": which + tf.constant(2**63, tf.uint64),
        }


@row(placements=("2x1",))
def predict_words_and_other_types(place):
    with place.scope():
        model = OfManyTypes()
    outputs = model.predict(data(33)[0], batch_size=BATCH, verbose=0)
    pairs = {name: np.stack([outputs[name].real, outputs[name].imag]) for name in ("pairs", "wide")}
    words = [OfManyTypes.words.index(word.decode()) for word in outputs["words"][:, 0]]
    return outcome(model, words=words, large=(outputs["large"] - np.uint64(2**63)).astype(int), **pairs)


class Halves(layers.Layer):
    def call(self, x):
        return tf.reshape(x, [-1, x.shape[1] // 2])


@row()
def weight_constraints(place):
    model = built(place, functools.partial(mlp, kernel_constraint=keras.constraints.MaxNorm(0.5)))
    return outcome(model, fit(model))


class Smallest(layers.Layer):
    def build(self, shape):
        self.smallest = self.add_weight(shape=(), initializer=keras.initializers.Constant(np.inf), trainable=False)

    def call(self, x):
        self.smallest.assign(tf.minimum(self.smallest, tf.reduce_min(x)))
        return x


@row(exempt="the mean of what replicas have met is not what one device meets; it is finite, and the same on all")
def a_statistic_that_begins_at_infinity(place):
    model = built(place, lambda: keras.Sequential([layers.Input((6,)), Smallest(), layers.Dense(3)]))
    x, y = data(BATCH + 1)
    for rows in (1, BATCH + 1):
        history = fit(model, x[:rows], y[:rows])
    return outcome(model, history)
