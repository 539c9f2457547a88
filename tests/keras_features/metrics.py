"""Rows for metrics, and for logs that are not metrics."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_features.models import Subclassed
from keras_features.table import BATCH, compiled, data, fit, mlp, outcome, row


def one_output(activation=None):
    return keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dense(1, activation=activation)])


@row()
def metrics_with_state(place):
    with place.scope():
        model = one_output("sigmoid")
        model.compile(
            "sgd",
            "binary_crossentropy",
            metrics=[keras.metrics.AUC(), keras.metrics.BinaryIoU(), keras.metrics.Precision()],
        )
    x, y = data(37)
    history = fit(model, x, (y > 0).astype("float32"), validation_data=(x, (y > 0).astype("float32")))
    return outcome(model, history)


@row()
def metrics_of_vectors(place):
    with place.scope():
        model = compiled(mlp(), metrics=[keras.metrics.F1Score(average=None)], loss="categorical_crossentropy")
    x, y = data(40)
    seen = []
    model.fit(
        x,
        keras.utils.to_categorical(y, 3),
        batch_size=BATCH,
        verbose=0,
        shuffle=False,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))],
    )
    shapes = [np.shape(log["f1_score"]) for log in seen]
    return outcome(model, shapes=shapes, f1=model.evaluate(x, keras.utils.to_categorical(y, 3), verbose=0)[1])


class MoreLogs(Subclassed):
    """Returns more logs than it has metrics, so that Keras reports them unchanged; lists a metric twice."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    @property
    def metrics(self):
        return [*super().metrics, self.mean]

    def train_step(self, data):
        self.mean.reset_state()
        self.mean.update_state(data[0])
        mean = self.mean.result()
        self.mean.reset_state()
        of_rows = tf.math.log(tf.reduce_sum(tf.abs(data[0]), axis=1))  # -Inf for a stand-in row of zeros
        logs = {"mean_of_step": mean, "extra": tf.constant(1.0), "mean_of_rows": tf.reduce_mean(of_rows)}
        return {**super().train_step(data), **logs}

    def test_step(self, data):
        logs = super().test_step(data)
        of_rows = tf.math.log(tf.reduce_sum(tf.abs(data[0]), axis=1))
        return {"error": 1.0 - logs["accuracy"], "area": logs["auc"], "mean_of_rows": tf.reduce_mean(of_rows)}


@row(placements=("2x1",))
def logs_other_than_metrics(place):
    with place.scope():
        metrics = ["accuracy", keras.metrics.AUC(name="auc")]
        model = compiled(MoreLogs(), loss="categorical_crossentropy", metrics=metrics)
    x, y = data(37)
    y = keras.utils.to_categorical(y, 3)
    history = fit(model, x, y, validation_data=(x[:25], y[:25]))
    history.pop("val_error")  # The step computes it from a metric's result, so `val_error` is a mean over replicas.
    return outcome(model, history)
