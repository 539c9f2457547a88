"""Runs in the workers of a test: a `fit` whose figures are read while it runs and after it."""

import os
import pathlib
import signal
import time
import urllib.request

import keras
import numpy as np

import tfdist
from keras_features import strategy_of

ROWS, BATCH, EPOCHS = 128, 16, 3
SHARES = (0.25, 0.75)


class Scraper(keras.callbacks.Callback):
    """Reads the figures over HTTP after the last batch, as Prometheus would."""

    def __init__(self, telemetry):
        super().__init__()
        self._telemetry, self.text = telemetry, ""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == EPOCHS - 1:
            time.sleep(1.0)
            with urllib.request.urlopen(f"http://{self._telemetry.endpoint}/metrics", timeout=10) as answer:
                self.text = answer.read().decode()


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
    before = strategy.extended.sent_and_received_bytes()
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    after = strategy.extended.sent_and_received_bytes()
    whole = STEPS * 4 * 4 * WIDTH * WIDTH
    return [(now - then) / whole for then, now in zip(before, after, strict=True)]


class Signaler(keras.callbacks.Callback):
    """Sends this process SIGUSR2 in the first two epochs, and waits until the trace before is written."""

    def __init__(self, folder):
        super().__init__()
        self._folder = pathlib.Path(folder)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self.epoch < 2:
            deadline = time.monotonic() + 60
            while self._traces() < self.epoch and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(1.0)

    def _traces(self):
        return len(list(self._folder.rglob("*.xplane.pb")))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def traced_when_asked(folder):
    """Trains; worker 1 gets the signal twice. Returns a weight."""
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
    telemetry = tfdist.callbacks.Telemetry(folder, trace_when_asked=2)
    signaler = [] if tfdist.cluster.is_chief() else [Signaler(folder)]
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[telemetry, *signaler])
    return model.get_weights()[0].tolist()
