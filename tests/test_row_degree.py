"""The graph of a step tells how gradients grow with the rows of a batch, for steps as users write them."""

import math

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tfdist.strategies.loss_weight import reduction_told_by
from tfdist.strategies.row_degree import RowDegrees

MEANS, SUMS, MIXED = {}, {}, {}
BATCH = 8
SCALE = tf.Variable(1024.0, trainable=False)


def of(table):
    """Adds a recipe to a table: a function that returns a loss from a model, inputs and targets."""

    def add(recipe):
        table[recipe.__name__] = recipe
        return recipe

    return add


def squares(model, x, y):
    return ops.sum((model(x) - y) ** 2, axis=-1)


@of(MEANS)
def plain_mean(model, x, y):
    return ops.mean((model(x) - y) ** 2)


@of(MEANS)
def mean_of_a_part_times_a_number(model, x, y):
    return 0.5 * tf.reduce_mean(squares(model, x, y)[1:])


@of(MEANS)
def keras_loss(model, x, y):
    return keras.losses.MeanSquaredError()(y, model(x))


@of(MEANS)
def keras_loss_by_weights(model, x, y):
    return keras.losses.MeanSquaredError()(y, model(x), sample_weight=ops.exp(y))


@of(MEANS)
def keras_loss_not_reduced(model, x, y):
    return tf.reduce_mean(keras.losses.MeanSquaredError(reduction=None)(y, model(x)))


@of(MEANS)
def average_loss_of_own_rows(model, x, y):
    return tf.nn.compute_average_loss(squares(model, x, y))


@of(MEANS)
def sum_by_the_number_of_rows(model, x, y):
    return tf.reduce_sum(squares(model, x, y)) / tf.cast(tf.shape(x)[0], tf.float32)


@of(MEANS)
def sum_by_the_number_of_rows_by_keras(model, x, y):
    return ops.sum(squares(model, x, y)) / ops.cast(ops.shape(y)[0], "float32")


@of(MEANS)
def sum_by_weights(model, x, y):
    weights = tf.nn.sigmoid(y[:, 0])
    return tf.reduce_sum(weights * squares(model, x, y)) / (tf.reduce_sum(weights) + 1e-6)


@of(MEANS)
def with_a_penalty(model, x, y):
    return plain_mean(model, x, y) + 0.01 * tf.add_n([tf.nn.l2_loss(each) for each in model.trainable_weights])


@of(MEANS)
def variational(model, x, y):
    center, log_variance = tf.split(model(x), 2, axis=1)
    code = center + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(center))
    rebuilt = tf.reduce_sum(keras.losses.binary_crossentropy(tf.sigmoid(y[:, :2]), tf.sigmoid(code))[:, None], axis=1)
    divergence = -0.5 * (1 + log_variance - center**2 - tf.exp(log_variance))
    return tf.reduce_mean(rebuilt) + tf.reduce_mean(tf.reduce_sum(divergence, axis=1))


@of(MEANS)
def real_and_made_in_one_batch(model, x, y):
    outputs = model(tf.concat([x, x + 1.0], axis=0))
    labels = tf.concat([tf.ones([tf.shape(x)[0], 1]), tf.zeros([tf.shape(x)[0], 1])], axis=0)
    labels += 0.05 * tf.random.uniform(tf.shape(labels))
    return keras.losses.BinaryCrossentropy(from_logits=True)(labels, outputs[:, :1])


@of(MEANS)
def gradient_penalty(model, x, y):
    mixed = x + tf.random.normal([tf.shape(x)[0], 1])
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        outputs = model(mixed, training=True)
    norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(outputs, [mixed])[0]), axis=[1]))
    return tf.reduce_mean((norm - 1.0) ** 2) + tf.reduce_mean(model(x)) - tf.reduce_mean(outputs)


@of(MEANS)
def contrastive(model, x, y):
    one, other = (tf.nn.l2_normalize(model(each), axis=1) for each in (x, x + y[:, :1]))
    logits = tf.matmul(one, other, transpose_b=True) / 0.1
    labels = tf.range(tf.shape(x)[0])
    both = [
        keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
        for each in (logits, tf.transpose(logits))
    ]
    return tf.reduce_mean(both[0] + both[1]) / 2


@of(MEANS)
def distilled(model, x, y):
    soft = tf.nn.softmax(y / 3.0, axis=1)
    loss = keras.losses.KLDivergence()(soft, tf.nn.softmax(model(x) / 3.0, axis=1)) * 9.0
    return 0.1 * tf.reduce_mean(squares(model, x, y)) + 0.9 * loss


@of(MEANS)
def scaled(model, x, y):
    return plain_mean(model, x, y) * SCALE


@of(MEANS)
def in_a_function(model, x, y):
    return tf.function(lambda: tf.reduce_mean(squares(model, x, y)))()


@of(MEANS)
def in_a_branch(model, x, y):
    losses = squares(model, x, y)
    return tf.cond(tf.reduce_sum(y) > 0, lambda: tf.reduce_mean(losses), lambda: 2.0 * tf.reduce_mean(losses))


@of(MEANS)
def masked(model, x, y):
    mask = tf.cast(y > 0, tf.float32)
    return tf.math.divide_no_nan(tf.reduce_sum(mask * (model(x) - y) ** 2), tf.reduce_sum(mask))


@of(MEANS)
def overlap(model, x, y):
    return keras.losses.Dice()(tf.sigmoid(y), tf.sigmoid(model(x)))


@of(MEANS)
def hardest_row(model, x, y):
    return tf.reduce_max(squares(model, x, y)) + plain_mean(model, x, y)


@of(MEANS)
def root_of_a_mean(model, x, y):
    return tf.sqrt(tf.reduce_mean(squares(model, x, y)))


@of(SUMS)
def sum_by_the_global_batch(model, x, y):
    return tf.reduce_sum(squares(model, x, y)) / BATCH


@of(SUMS)
def sum_times_a_part_by_keras(model, x, y):
    return ops.sum(squares(model, x, y)) * (1.0 / BATCH)


@of(SUMS)
def average_loss_of_the_global_batch(model, x, y):
    return tf.nn.compute_average_loss(squares(model, x, y), global_batch_size=BATCH)


@of(SUMS)
def keras_sum(model, x, y):
    return keras.losses.MeanSquaredError(reduction="sum")(y, model(x)) / BATCH


@of(SUMS)
def sum_in_a_function(model, x, y):
    return tf.function(lambda: tf.reduce_sum(squares(model, x, y)) / BATCH)()


@of(SUMS)
def not_reduced(model, x, y):
    return squares(model, x, y) / BATCH


@of(SUMS)
def scaled_sum(model, x, y):
    return tf.reduce_sum(squares(model, x, y)) / BATCH * SCALE


@of(MIXED)
def sum_with_a_penalty(model, x, y):
    return sum_by_the_global_batch(model, x, y) + 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_weights])


@of(MIXED)
def sum_and_mean(model, x, y):
    return sum_by_the_global_batch(model, x, y) + plain_mean(model, x, y)


def dense():
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(4)])


def normalized():
    inner = [layers.BatchNormalization(), layers.Dense(5, activation="gelu"), layers.Dropout(0.3)]
    return keras.Sequential([layers.Input((6,)), layers.Dense(8), *inner, layers.LayerNormalization(), layers.Dense(4)])


def images():
    convolutions = [layers.Conv2D(3, 2, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPool2D()]
    others = [layers.Conv2DTranspose(3, 2, strides=2), layers.LeakyReLU(), layers.DepthwiseConv2D(2)]
    return keras.Sequential([
        layers.Input((6,)), layers.Dense(32), layers.Reshape((4, 4, 2)), *convolutions, *others,
        layers.GlobalAveragePooling2D(), layers.Dense(4),
    ])  # fmt: skip


def sequence():
    inputs = layers.Input((6,))
    x = layers.Reshape((6, 1))(inputs)
    x = layers.LSTM(4, return_sequences=True)(layers.Dense(4)(x))
    x = layers.MultiHeadAttention(2, 3)(x, x) + x
    return keras.Model(inputs, layers.GRU(4)(x))


def embedded():
    inputs = layers.Input((6,))
    tokens = ops.cast(ops.floor(ops.abs(inputs)), "int32") % 7
    x = layers.Embedding(7, 4)(tokens) + layers.Embedding(6, 4)(ops.arange(6))
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))


def halves():
    with_policy = {"dtype": "mixed_float16"}
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, **with_policy), layers.Dense(4, dtype="float32")])


MODELS = [normalized, images, sequence, embedded, halves]


def degrees_of(make, recipe):
    keras.utils.set_random_seed(1)
    model = make()
    found = []

    @tf.autograph.experimental.do_not_convert  # A strategy analyses a step outside of AutoGraph, too.
    def analyze(gradients):
        found[:] = RowDegrees(set(), set()).of_gradients([each for each in gradients if each is not None])

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = recipe(model, x, y)
        analyze(tape.gradient(loss, model.trainable_weights))

    step.get_concrete_function(tf.TensorSpec([None, 6]), tf.TensorSpec([None, 4]))
    return set(found)


def of_recipes(make, table):
    return {name: degrees_of(make, recipe) for name, recipe in table.items()}


def test_gradients_of_means_do_not_grow_with_the_rows():
    assert of_recipes(dense, MEANS) == {name: {0.0} for name in MEANS}


def test_gradients_of_sums_grow_with_the_rows():
    assert of_recipes(dense, SUMS) == {name: {1.0} for name in SUMS}


@pytest.mark.parametrize("make", [pytest.param(normalized, marks=pytest.mark.exhaustive), *MODELS[1:]])
def test_layers_between_do_not_change_the_degree(make):
    if make is sequence:  # The analysis understands the graph of a loop only in part.
        assert reduction_told_by(degrees_of(make, plain_mean)) == "mean"
        assert reduction_told_by(degrees_of(make, sum_by_the_global_batch)) != "mean"
        return
    assert degrees_of(make, plain_mean) == degrees_of(make, keras_loss) == {0.0}
    assert degrees_of(make, sum_by_the_global_batch) == {1.0}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_gradients_of_sums_and_means_are_recognized(name):
    assert any(math.isnan(degree) for degree in degrees_of(dense, MIXED[name]))


@pytest.mark.parametrize(
    ("degrees", "told"),
    [
        ([0.0, 0.0], "mean"),
        ([0.0, None], "mean"),
        ([0.0, math.nan, -1.0], "mean"),
        ([1.0, 1.0], "sum"),
        ([1.0, None], "sum"),
        ([1.0, 0.0], "mixed"),
        ([1.0, math.nan], "mixed"),
        ([math.nan], "mixed"),
        ([None, 0.5], None),
    ],
)
def test_certain_degrees_describe_the_loss(degrees, told):
    assert reduction_told_by(degrees) == told
