"""Runs in the workers of a test: a `fit` whose figures are read while it runs and after it."""

import os
import re
import signal
import threading
import time
import urllib.request
from unittest import mock

import keras
import numpy as np

import tfdist
from keras_features import strategy_of
from launched import eventually
from strategy_checks import wait_until_sent
from tfdist.telemetry.asked_trace import AskedTrace

ROWS, BATCH, EPOCHS = 128, 16, 3
SHARES = (0.25, 0.75)


class Scraper(keras.callbacks.Callback):
    """Reads the figures over HTTP, as Prometheus would, until they have the last step."""

    def __init__(self, telemetry):
        super().__init__()
        self._telemetry, self.text = telemetry, ""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == EPOCHS - 1:
            assert eventually(lambda: self._steps() == EPOCHS * ROWS // BATCH), self.text

    def _steps(self):
        with urllib.request.urlopen(f"http://{self._telemetry.endpoint}/metrics", timeout=60) as answer:
            self.text = answer.read().decode()
        found = re.search(r"^tfdist_steps_total\{.*\} (.+)$", self.text, re.MULTILINE)
        return float(found[1]) if found else None


def trained(folder):
    """Returns the figures that Prometheus has read, the seconds of the `fit`, and the counted bytes and memory."""
    strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512), keras.layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 64)).astype("float32"), rng.integers(0, 2, ROWS)
    sharding = tfdist.data.BalancedSharding((x, y), global_batch_size=BATCH, seed=0, policy=SHARES)
    data = strategy.distribute_datasets_from_function(sharding)
    telemetry = tfdist.callbacks.Telemetry(folder, prometheus_port=0, every_seconds=0.2)
    scraper = Scraper(telemetry)
    began = time.monotonic()
    model.fit(data, epochs=EPOCHS, verbose=0, validation_data=(x, y), callbacks=[telemetry, scraper])
    seconds = time.monotonic() - began
    return scraper.text, seconds, strategy.communication.traffic().sent_bytes, strategy.memory_report().kinds


STEPS, WIDTH = 8, 256


def bytes_of_a_step(placement, transport):
    """Returns the bytes that this worker sends and receives in a step, by the bytes of the weights."""
    strategy = strategy_of(placement, transport=transport)
    with strategy.scope():
        hidden = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(4)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(STEPS * 8, WIDTH)).astype("float32")
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)  # Traces the step.
    wait_until_sent(strategy)
    before = strategy.extended.sent_and_received_bytes()
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    wait_until_sent(strategy)
    after = strategy.extended.sent_and_received_bytes()
    whole = STEPS * 4 * 4 * WIDTH * WIDTH
    return [(now - then) / whole for then, now in zip(before, after, strict=True)]


class Signaler(keras.callbacks.Callback):
    """Sends this process SIGUSR2 in the first two epochs, after the trace before, and waits until each begins."""

    def __init__(self):
        super().__init__()
        self._has_begun = threading.Event()

    def noted(self):
        """Returns a context in which this object learns that a trace has begun."""
        wait = AskedTrace._wait_for

        def note(trace, steps):
            self._has_begun.set()
            wait(trace, steps)

        return mock.patch.object(AskedTrace, "_wait_for", note)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self.epoch < 2:
            assert eventually(lambda: "tfdist-trace" not in [thread.name for thread in threading.enumerate()])
            time.sleep(1.1)  # TensorFlow names a trace by the second, and would write over the one before.
            self._has_begun.clear()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert eventually(self._has_begun.is_set)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def traced_when_asked(folder):
    """Trains; worker 1 gets the signal twice. Returns a weight."""
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
    telemetry = tfdist.callbacks.Telemetry(folder, trace_when_asked=2)
    signaler = Signaler()
    callbacks = [telemetry] if tfdist.cluster.is_chief() else [telemetry, signaler]
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    with signaler.noted():
        model.fit(x, x[:, :1], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()[0].tolist()
