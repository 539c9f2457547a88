"""Rows for callbacks and saving."""

import os

import keras
import numpy as np
import tensorflow as tf

import tfdist
from keras_features.models import normalized
from keras_features.table import built, data, fit, outcome, row


@row(placements=("2x1",))
def callbacks_that_decide(place):
    model = built(place)
    x, y = data(40)
    seen = []
    history = fit(
        model,
        x,
        y,
        epochs=8,
        validation_data=(x[:13], y[:13]),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])),
        ],
    )
    return outcome(model, history, seen=seen)


@row(placements=("2x1",))
def callbacks_that_write(place):
    model = built(place)
    x, y = data(40)
    best, weights = os.path.join(place.folder, "best.keras"), os.path.join(place.folder, "e{epoch}.weights.h5")
    log, board = os.path.join(place.folder, "log.csv"), os.path.join(place.folder, "board")
    callbacks = tfdist.callbacks if place.strategy else keras.callbacks
    history = fit(
        model,
        x,
        y,
        epochs=2,
        validation_data=(x, y),
        callbacks=[
            callbacks.ModelCheckpoint(best, save_best_only=True),
            callbacks.ModelCheckpoint(weights, save_weights_only=True),
            callbacks.CSVLogger(log),
            callbacks.TensorBoard(board, histogram_freq=1),
        ],
    )
    if place.is_chief:
        files = sorted(os.listdir(place.folder))
        if files != ["best.keras", "board", "e1.weights.h5", "e2.weights.h5", "log.csv"]:
            raise AssertionError(f"files {files}")
        boards = os.listdir(os.path.join(board, "train"))
        if len(boards) != 1:
            raise AssertionError(f"event files {boards}")
        loaded = keras.models.load_model(best)
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
        with open(log) as lines:
            if len(list(lines)) != 3:
                raise AssertionError("log.csv has not one line an epoch")
    return outcome(model, history)


@row(placements=("2x1",), exempt="BatchNormalization; what is saved must be the same whichever worker saves")
def save_and_load(place):
    model = built(place, normalized, optimizer="adam")
    fit(model)
    own = os.path.join(place.folder, f"worker{os.environ.get('TF_CONFIG', '')[-20:].count('1')}-{os.getpid()}")
    x, _ = data(9)
    before = model.predict(x, verbose=0)
    model.save(own + ".keras")
    model.save_weights(own + ".weights.h5")
    model.export(own + "-export", verbose=False)
    with place.scope():
        loaded = keras.models.load_model(own + ".keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), before)
    plain = keras.models.load_model(own + ".keras")
    np.testing.assert_allclose(plain.predict(x, verbose=0), before, rtol=1e-5, atol=1e-6)
    exported = tf.saved_model.load(own + "-export")
    np.testing.assert_allclose(exported.serve(x), before, rtol=1e-5, atol=1e-6)
    loaded.load_weights(own + ".weights.h5")
    history = fit(loaded)
    return outcome(loaded, history, before=before, variables=np.concatenate([np.ravel(w) for w in plain.get_weights()]))
