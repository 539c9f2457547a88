"""Keras 3 `fit` under `tfdist.MultiWorkerMirroredStrategy`, with a codec or without."""

import functools

import keras
import tensorflow as tf

import tfdist
from benchmarks import models


@functools.cache
def _strategy(codec):
    return tfdist.MultiWorkerMirroredStrategy(**({"compression": codec} if codec else {}))


class _Ticks(keras.callbacks.Callback):
    def __init__(self, tick):
        super().__init__()
        self._tick = tick

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        self._tick()


def prepare(model, alone, codec=None):
    # Make the strategy even if it is not used, so that training alone runs under the same conditions.
    strategy = _strategy(codec)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0") if alone else strategy
    keras.utils.set_random_seed(0)
    with strategy.scope():
        network = models.keras_model(model, keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)

    def endless(context):
        return tf.data.Dataset.from_tensors(models.make_batch(model, context.input_pipeline_id)).repeat()

    data = strategy.distribute_datasets_from_function(endless)

    def train(steps, tick):
        network.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[_Ticks(tick)])

    return train
