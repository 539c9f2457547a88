"""Calls `fit` three times, while worker 1 once does something else; see test_watchdog.py."""

import json
import sys
import time
import types

import keras
import numpy as np
import tensorflow as tf

import tfdist

options = types.SimpleNamespace(**json.loads(sys.argv[1]))
strategy = tfdist.MultiWorkerMirroredStrategy(
    fault_tolerance=tfdist.FaultTolerance(start_timeout_seconds=60, shutdown_timeout_seconds=5)
)
acts = strategy.extended._id_in_cluster == 1
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=options.steps)
x = np.ones((96, 8), "float32")
y = x[:, :1]


def hang():
    print("acts", flush=True)
    time.sleep(600)


def read(number):
    if acts and (options.act, int(number)) in (("hangs in its first input", 0), ("hangs in its input", 60)):
        hang()
    return np.int64(number)


def rows(context=None):
    def checked(i, x, y):
        i = tf.numpy_function(read, [i], tf.int64)
        with tf.control_dependencies([i]):
            return tf.identity(x), y

    numbered = tf.data.Dataset.enumerate(tf.data.Dataset.from_tensor_slices((x, y)))
    return numbered.map(lambda i, xy: checked(i, *xy)).batch(8 if context is None else 4)


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        read(index * 8)
        return x[:8], y[:8]


def generated():
    for index in range(12):
        read(index * 8 // 10 * 10)
        yield x[:8], y[:8]


class Acts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if acts and batch == 3 and options.act == "stops":
            print("acts", flush=True)
            self.model.stop_training = True
        if acts and batch == 3 and options.act == "hangs in a callback":
            hang()
        if acts and batch == 3 and options.act == "predicts in a callback":
            self.model.predict(x, verbose=0)

    def on_epoch_end(self, epoch, logs=None):
        if acts and options.act == "hangs at the end of an epoch":
            hang()


def data():
    made = {"arrays": lambda: x, "tf.data": rows, "PyDataset": Rows, "generator": generated}
    made["function"] = lambda: strategy.distribute_datasets_from_function(rows)
    return made[options.kind]()


for call in range(3):
    if acts and call == 1 and options.act in ("predict", "evaluate", "train_on_batch"):
        given = [x] if options.act == "predict" else [x, y]
        getattr(model, options.act)(*given, **({} if "batch" in options.act else {"verbose": 0}))
    if acts and call == 1 and options.act == "leaves":
        sys.exit()
    arrays = {"batch_size": 8, "y": y} if options.kind == "arrays" else {}
    writers = [tfdist.callbacks.ModelCheckpoint("/tmp/none-{epoch}.keras", save_freq=10**9)] * options.writes
    model.fit(data(), epochs=2, verbose=options.verbose, callbacks=[Acts(), *writers], **arrays)
    time.sleep(1)
