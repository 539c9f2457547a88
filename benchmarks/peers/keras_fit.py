"""Keras 3 `fit` under `tfdist.MultiWorkerMirroredStrategy`, with any of its keyword arguments.

The arguments `every`, `fragments` and `overlap_steps` are those of `tfdist.DiLoCo`.
"""

import functools
import time

import keras
import tensorflow as tf

import tfdist
from benchmarks import models
from benchmarks.peers.messages import Trials

_BLOCK = 20  # Steps between two looks at the choice of codecs. The first steps of a call of `fit` are slower.
_OPTIMIZERS = {"sgd": (keras.optimizers.SGD, 0.01), "adam": (keras.optimizers.Adam, 0.001)}  # And learning rates.


@functools.cache
def _strategy(every=None, fragments=1, overlap_steps=0, **options):
    if every is not None:
        options["synchronization"] = tfdist.DiLoCo(every, fragments=fragments, overlap_steps=overlap_steps)
    return tfdist.MultiWorkerMirroredStrategy(**options)


def _await_choice(strategy, network, data):
    """Trains until the codecs are chosen for the present link. Returns the steps that this took, if any."""
    ends = []
    timed = _Ticks(lambda: ends.append(time.monotonic()))
    while not network.optimizer.built or not strategy.communication.choices()[-1].is_final:
        network.fit(data, steps_per_epoch=_BLOCK, verbose=0, callbacks=[timed])
    return Trials(ends[-1] - ends[0], len(ends) - 1, strategy.communication.choices()[-1].reason) if ends else None


class _Ticks(keras.callbacks.Callback):
    def __init__(self, tick):
        super().__init__()
        self._tick = tick

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        self._tick()


def prepare(model, alone, optimizer="sgd", **options):
    # Make the strategy even if it is not used, so that training alone runs under the same conditions.
    strategy = _strategy(**options)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0") if alone else strategy
    keras.utils.set_random_seed(0)
    with strategy.scope():
        network = models.keras_model(model, keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        kind, rate = _OPTIMIZERS[optimizer]
        network.compile(kind(rate), loss, jit_compile=False)

    def endless(context):
        return tf.data.Dataset.from_tensors(models.make_batch(model, context.input_pipeline_id)).repeat()

    data = strategy.distribute_datasets_from_function(endless)

    def train(steps, tick):
        chooses = options.get("compression") == "auto" and not alone
        trials = _await_choice(strategy, network, data) if chooses else None
        network.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[_Ticks(tick)])
        return trials

    return train
