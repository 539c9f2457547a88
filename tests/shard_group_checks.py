"""Small trainings on groups of replicas that each have a whole model, which tests run in worker processes."""

import time

import keras
import numpy as np
from keras import layers

import sharding_checks
import tfdist
from keras_features import start_anew
from keras_features import strategy_of as strategy
from strategy_checks import own_index, wait_until_sent
from tfdist import compression

WIDTH, LAYERS, STEPS = 128, 4, 4


def bytes_of_a_step(placement, sharding, group_size):
    """Trains a model of 64 Ki weights without biases, whose exchanges beside them are small.

    Returns the bytes that this worker sends over its own connections to each peer in a step, by the bytes of the
    weights.
    """
    place = strategy(placement, model_sharding=sharding, shard_group_size=group_size)
    start_anew()
    with place.scope():
        hidden = [layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([layers.Input((WIDTH,)), *hidden])
        model.compile("adam", "mse", steps_per_execution=STEPS)
    x = np.random.default_rng(0).normal(size=(STEPS * 8, WIDTH)).astype("float32")
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)  # Traces the step.
    before = sent(place)
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    whole = STEPS * LAYERS * 4 * WIDTH * WIDTH
    return own_index(), {peer: (count - before[peer]) / whole for peer, count in sent(place).items()}


def sent(place):
    wait_until_sent(place)
    streams = place.extended._peers._streams
    return {peer: stream.sent for peer, stream in streams.items()}


def trained_by_a_second_strategy(options):
    """Trains with a strategy, then with a second one, which each worker makes and uses at another moment."""
    results = []
    for seconds in (0, 1.5):
        time.sleep(seconds * own_index())
        place = tfdist.MultiWorkerMirroredStrategy(**options)
        time.sleep(seconds * (3 - own_index()))
        model = sharding_checks.build("adam", place)
        results.append(sharding_checks.results(model, sharding_checks.train(model)))
    return results


INT8 = compression.Int8(min_elements=20, block_size=16)
