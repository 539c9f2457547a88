"""Rows for the ways to call a model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from keras_features.metrics import one_output
from keras_features.table import BATCH, built, data, fit, outcome, row


@row(placements=("1x2", "2x1"))
def fit_numpy(place):
    model = built(place)
    return outcome(model, fit(model))


@row()
def fit_shuffled_two_epochs(place):
    model = built(place)
    x, y = data()
    keras.utils.set_random_seed(3)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
    # The order of rows within a batch depends on the shards, so compare a value that does not depend on it.
    return outcome(model, history)


@row()
def evaluate_uneven(place):
    model = built(place, weighted_metrics=["mae"], loss="mse", make=lambda: one_output())
    x, y = data(37)
    loss = model.evaluate(x, y.astype("float32"), sample_weight=np.linspace(0, 1, 37), batch_size=BATCH, verbose=0)
    return outcome(model, loss=loss)


@row()
def predict_uneven(place):
    model = built(place)
    x, _ = data(37)
    return outcome(model, prediction=model.predict(x, batch_size=BATCH, verbose=0))


class AsLongAsTheLongest(keras.Model):
    """Repeats the second number of a row as often as its first number tells, padded to the longest row of the batch."""

    def call(self, x):
        places = tf.range(tf.reduce_max(tf.cast(x[:, 0], tf.int32)))
        line = tf.where(places < tf.cast(x[:, :1], tf.int32), x[:, 1:2], 0.0)
        return {
            "pairs": tf.stack([line, 2 * line], axis=2),
            "square": line[:, :, None] * line[:, None, :],
            "words": tf.where(line > 0, tf.strings.as_string(tf.cast(line, tf.int32)), ""),
            "static": [x[:, 1], x],
        }


class TokensDoubled(keras.Model):
    """Returns one output per token, so that input and output have the same length."""

    def call(self, x):
        return 2 * x


def without_padding(output):
    """Returns the numbers and words without padding, in order; a model pads to the longest row of its input."""
    flat = output.flat_values.numpy() if isinstance(output, tf.RaggedTensor) else output
    numbers = np.array([float(value or 0) for value in np.ravel(flat).tolist()])
    return numbers[numbers != 0]


def shape_of(output):
    return output.shape if isinstance(output, np.ndarray) else (*output.bounding_shape().numpy(), -1)


@row(placements=("1x2",))
def predict_outputs_as_long_as_the_longest_of_a_batch(place):
    """Equal lengths give an array, different lengths a ragged tensor; the last batch leaves a replica without rows."""
    values, x = {}, np.stack([np.arange(17) % 7 + 1, np.arange(1, 18)], axis=1).astype("float32")
    alike = np.concatenate([np.full((17, 1), 5.0, "float32"), x[:, 1:]], axis=1)
    for eagerly in (False, True):
        with place.scope():
            model = AsLongAsTheLongest()
            model.compile(run_eagerly=eagerly)
        outputs = {
            "unlike": model.predict(x, batch_size=BATCH, verbose=0),
            "alike": model.predict(alike, batch_size=BATCH, verbose=0),
            "one_row": model.predict(x[6:7], verbose=0),
            "on_batch": model.predict_on_batch(alike[:5]),
        }
        for case, output in outputs.items():
            for i, leaf in enumerate(keras.tree.flatten(output)):
                assert isinstance(leaf, np.ndarray) or case == "unlike"
                values[f"{case}_{eagerly}_{i}"] = without_padding(leaf)
                values[f"{case}_{eagerly}_{i}_shape"] = shape_of(leaf)
    return outcome(model, **values)


@row()
def predict_tokens_of_padded_texts(place):
    """The graph is traced on batches of one length, then of another; a replica may have no rows."""
    values = {}
    for sizes in ((4, 4, 6, 6, 3), (5,), (2, 6, 6), (3, 3, 3)):
        with place.scope():
            model = TokensDoubled()
        texts = tf.data.Dataset.from_generator(
            lambda sizes=sizes: (np.full(size, size, "float32") for size in sizes),
            output_signature=tf.TensorSpec([None], tf.float32),
        )
        output = model.predict(texts.padded_batch(2), verbose=0)
        values[f"{sizes}"], values[f"{sizes} shape"] = without_padding(output), shape_of(output)
    return outcome(model, **values)


@row(placements=("2x1",))
def on_batch(place):
    """Each worker passes its own rows. A single worker divides them among its devices."""
    spec = tfdist.cluster.ClusterSpec.from_env() if place.strategy else None
    worker, workers = (spec.worker_id, spec.num_workers) if spec else (0, 1)

    def own(*arrays, first=0, rows=BATCH):
        here = slice(first + rows * worker // workers, first + rows * (worker + 1) // workers)
        return [array[here] for array in arrays]

    x, y = data()
    model = built(place)
    values = {"trained": [model.train_on_batch(*own(x, y, first=first)) for first in range(0, 40, BATCH)]}
    values["tested"] = model.test_on_batch(*own(x, y))
    values["predicted"] = model.predict_on_batch(x[:5])
    loss = keras.losses.MeanSquaredError(reduction="sum")
    optimizer = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    summed = built(place, optimizer=optimizer, loss=loss, metrics=None)
    values["summed"] = []
    for rows in (6, 2, 5):
        summed.reset_metrics()  # Keras does so itself from 3.15 on.
        values["summed"].append(summed.train_on_batch(*own(x, x[:, :3], rows=rows)))
    return outcome(model, **values, weights_of_sums=summed.get_weights()[0])


@row(placements=("2x1",))
def batches_of_which_replicas_know_unlike_shapes(place):
    """A replica with batches of changing sizes traces for any size, so the shapes of its gradients are unknown."""
    strategy = place.strategy or tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4, 6)).astype("float32"), rng.integers(0, 3, (24, 4))
    batches = [(0, 8), (8, 15), (15, 24)]
    model = built(place, lambda: keras.Sequential([layers.Input((4, 6)), layers.Dense(5, "tanh"), layers.Dense(3)]))
    with place.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def part(array, start, stop, index, parts):
        edges = [*range(start, start + 2 * parts, 2), stop]  # all but the last part have 2 rows
        return array[edges[index] : edges[index + 1]]

    def step(x, y, rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x)[:, :, 0] * tf.cast(y, tf.float32)) / tf.cast(rows, tf.float32)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def train(x, y, rows):
        strategy.run(step, (x, y, rows))

    def distributed(array, start, stop):
        def value(context):
            return tf.constant(part(array, start, stop, context.replica_id_in_sync_group, replicas))

        return strategy.experimental_distribute_values_from_function(value)

    spec = tfdist.cluster.ClusterSpec.from_env() if place.strategy else None
    worker, workers = (spec.worker_id, spec.num_workers) if spec else (0, 1)
    for start, stop in batches:
        model.train_on_batch(*(part(array, start, stop, worker, workers) for array in (x, y)))
        train(distributed(x, start, stop), distributed(y, start, stop), stop - start)
    return outcome(model)


@row(placements=("1x2",))
def run_eagerly(place):
    head = [layers.Input((6,)), layers.Reshape((3, 2)), layers.GlobalMaxPooling1D()]  # fails on a batch without rows
    model = built(place, lambda: keras.Sequential([*head, layers.Dense(3)]), run_eagerly=True)
    x, y = data(33)
    return outcome(model, fit(model, x, y))


@row(placements=("1x2",))
def steps_per_execution(place):
    model = built(place, steps_per_execution=3)
    history = fit(model)
    x, y = data(37)
    return outcome(
        model,
        history,
        evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0),
        predicted=model.predict(x, batch_size=BATCH, verbose=0),
    )
