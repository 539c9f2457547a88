"""Trains under the watchdog, with an epoch, a stop or a fault that differs between workers; see test_watchdog.py."""

import json
import sys
import tempfile
import threading
import time
import types

import keras
import numpy as np

import tfdist

options = types.SimpleNamespace(**json.loads(sys.argv[1]))
strategy = getattr(tfdist, options.strategy)()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            time.sleep(options.sleep)
            stops = options.stops is not None and strategy.extended._id_in_cluster == options.stops
            self.model.stop_training = stops
        tempfile.tempdir = "/nowhere"  # what watches needs no disk
        print("epoch", epoch, flush=True)


class Writes(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
    pass


x = np.ones((64, 8), "float32")
callbacks = [Slow(), Writes()] if options.writes else [Slow()]
if options.fault:
    for _ in range(120):  # among which is the one that matters
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    callbacks.append(tfdist.testing.Fault("hang", worker=options.workers - 1, step=30, attempt=3))
model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
print("finished", flush=True)
