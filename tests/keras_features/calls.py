"""Ways to call a model."""

import keras
import numpy as np

from keras_features.metrics import one_output
from keras_features.table import BATCH, built, data, fit, outcome, row


@row()
def fit_numpy(place):
    model = built(place)
    return outcome(model, fit(model))


@row()
def fit_shuffled_two_epochs(place):
    model = built(place)
    x, y = data()
    keras.utils.set_random_seed(3)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
    # The order of rows within a batch follows the shard, so compare what does not depend on it: all of it.
    return outcome(model, history)


@row()
def evaluate_uneven(place):
    model = built(place, weighted_metrics=["mae"], loss="mse", make=lambda: one_output())
    x, y = data(37)
    loss = model.evaluate(x, y.astype("float32"), sample_weight=np.linspace(0, 1, 37), batch_size=BATCH, verbose=0)
    return outcome(model, loss=loss)


@row()
def predict_uneven(place):
    model = built(place)
    x, _ = data(37)
    return outcome(model, prediction=model.predict(x, batch_size=BATCH, verbose=0))


@row()
def on_batch(place):
    model = built(place)
    x, y = data()
    trained = [model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, 40, BATCH)]
    tested = model.test_on_batch(x[:BATCH], y[:BATCH])
    return outcome(model, trained=trained, tested=tested, predicted=model.predict_on_batch(x[:5]))


@row()
def run_eagerly(place):
    model = built(place, run_eagerly=True)
    x, y = data(36)
    return outcome(model, fit(model, x, y))


@row()
def steps_per_execution(place):
    model = built(place, steps_per_execution=4)
    history = fit(model)
    x, y = data(37)
    return outcome(
        model,
        history,
        evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0),
        predicted=model.predict(x, batch_size=BATCH, verbose=0),
    )
