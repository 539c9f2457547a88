"""Trains arrays by local steps on two workers, with equal time. Worker 1 is slower than worker 0 on any machine."""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

EVERY, BATCH, STEPS, EPOCHS = 4, 8, 12, 2
here = pathlib.Path(sys.argv[1])
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Round(keras.callbacks.Callback):
    """The place of this worker. Worker 0 tells how long it has trained when the last step of a round begins."""

    epoch, batch, began = 0, 0, 0.0

    @property
    def file(self):
        return here / f"round-{self.epoch}-{self.batch // EVERY}"

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.batch = batch
        if batch % EVERY == 0:
            self.began = time.monotonic()
        if worker == 0 and batch % EVERY == EVERY - 1:
            half = here / "half-written"
            half.write_text(str(time.monotonic() - self.began))
            half.rename(self.file)


class SlowModel(keras.Sequential):
    """Counts its steps. On worker 1, the first step of a round ends later than all those of worker 0 but the last."""

    steps, waited_for = 0, None

    def train_step(self, data):
        waited = tf.numpy_function(self.wait, [], tf.float32)
        with tf.control_dependencies([waited]):
            return super().train_step(data)

    def wait(self):
        self.steps += 1
        if worker == 1 and self.waited_for != place.file:
            self.waited_for, deadline = place.file, time.monotonic() + 100
            while not place.file.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(float(place.file.read_text()))  # So it takes twice as long.
        return np.float32(0)


place = Round()
strategy = tfdist.MultiWorkerMirroredStrategy(
    synchronization=tfdist.LocalSGD(every=EVERY, tolerate_lost_workers=True, equal_time=True)
)
keras.utils.set_random_seed(5)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(STEPS * BATCH, 6)).astype("float32"), rng.integers(0, 3, STEPS * BATCH)
with strategy.scope():
    model = SlowModel([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[place]).history
result = {
    "steps": model.steps,
    "losses": history["loss"],
    "weights": [weight.tolist() for weight in model.get_weights()],
    "report": vars(strategy.row_report()),
}
(here / f"result-{worker}.json").write_text(json.dumps(result))
