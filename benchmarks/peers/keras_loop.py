"""A custom loop with Keras 3, as in TensorFlow's guide, under TensorFlow's strategy or tfdist's.

Only the strategy differs, so differences in time and traffic are due to its collectives.
"""

import functools

import keras
import tensorflow as tf

import tfdist
from benchmarks import models

_LIBRARIES = {"tensorflow": tf.distribute, "tfdist": tfdist}


@functools.cache
def _strategy(library):
    return _LIBRARIES[library].MultiWorkerMirroredStrategy()


def prepare(model, alone, library):
    strategy = _strategy(library)
    strategy = tf.distribute.get_strategy() if alone else strategy
    keras.utils.set_random_seed(0)
    with strategy.scope():
        network = models.keras_model(model, keras)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(network.trainable_weights)

    def replica_step(features, labels):
        with tf.GradientTape() as tape:
            logits = network(features, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        optimizer.apply(tape.gradient(loss, network.trainable_weights), network.trainable_weights)
        return loss

    @tf.function
    def step(features, labels):
        losses = strategy.run(replica_step, args=(features, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def part(context, position):
        return tf.constant(models.make_batch(model, context.replica_id_in_sync_group)[position])

    values = strategy.experimental_distribute_values_from_function
    features, labels = (values(functools.partial(part, position=position)) for position in (0, 1))

    def train(steps, tick):
        for _ in range(steps):
            float(step(features, labels))
            tick()

    return train
