"""Small trainings whose workers exchange in two levels, which tests run in worker processes."""

import keras
import numpy as np
from keras import layers

import tfdist
from keras_features import start_anew
from strategy_checks import own_index, wait_until_sent

WIDTH, LAYERS, STEPS = 128, 4, 4
WEIGHT_BYTES = 4 * LAYERS * WIDTH * WIDTH
INT8 = tfdist.compression.Int8(min_elements=20, block_size=16)


def trained_with_and_without_groups(group_size):
    """Trains with strategies of several options. The first connects this worker.

    Returns:
      The number of this worker; for each strategy its results of `_trained`.
    """
    grouped = {"exchange_group_size": group_size}
    cases = {
        "grouped": grouped,
        "again": grouped,
        "grouped int8": grouped | {"compression": INT8},
        "grouped powersgd": grouped | {"compression": "powersgd(4)"},
        "one level": {},
        "one level int8": {"compression": INT8},
    }
    return own_index(), {name: _trained(options) for name, options in cases.items()}


def _trained(options):
    """Trains a model without biases, whose exchanges beside those of the gradients are small.

    Returns:
      The weights; the bytes that this worker sends to each connected peer in a step, by the bytes of the weights; and
      the sum that the strategy counts, `None` without compression.
    """
    strategy = tfdist.MultiWorkerMirroredStrategy(**options)
    start_anew()
    with strategy.scope():
        hidden = [layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([layers.Input((WIDTH,)), *hidden])
        model.compile("sgd", "mse", steps_per_execution=STEPS)
    x = np.random.default_rng(0).normal(size=(STEPS * 8, WIDTH)).astype("float32")
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)  # Traces the step.
    before = _sent(strategy)
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    sent = {peer: (count - before[peer]) / STEPS / WEIGHT_BYTES for peer, count in _sent(strategy).items()}
    counted = None
    if strategy.communication:
        traffic = strategy.communication.traffic()
        counted = traffic.sent_bytes / traffic.steps / WEIGHT_BYTES
    return [weight.numpy() for weight in model.trainable_weights], sent, counted


def _sent(strategy):
    wait_until_sent(strategy)
    return {peer: stream.sent for peer, stream in strategy.extended._peers._streams.items()}


def made_with(options):
    tfdist.MultiWorkerMirroredStrategy(**options)
