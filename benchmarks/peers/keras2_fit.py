"""Keras 2 (`tf_keras`) `fit` under TensorFlow's own MultiWorkerMirroredStrategy, which works without tfdist."""

import functools

import tensorflow as tf
import tf_keras

from benchmarks import models


@functools.cache
def _strategy():
    return tf.distribute.MultiWorkerMirroredStrategy()


class _Ticks(tf_keras.callbacks.Callback):
    def __init__(self, tick):
        super().__init__()
        self._tick = tick

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        self._tick()


def prepare(model, alone):
    strategy = _strategy()
    strategy = tf.distribute.get_strategy() if alone else strategy
    tf_keras.utils.set_random_seed(0)
    with strategy.scope():
        network = models.keras_model(model, tf_keras)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(tf_keras.optimizers.SGD(0.01), loss, jit_compile=False)

    def endless(context):
        return tf.data.Dataset.from_tensors(models.make_batch(model, context.input_pipeline_id)).repeat()

    data = strategy.distribute_datasets_from_function(endless)

    def train(steps, tick):
        network.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[_Ticks(tick)])

    return train
