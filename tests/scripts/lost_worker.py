"""Trains by local steps on three workers; worker 2 kills itself between synchronizations, and joins again."""

import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

import tfdist

EVERY, BATCH, STEPS, EPOCHS = 4, 12, 10, 4
here = pathlib.Path(sys.argv[1])
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
life = len(list(here.glob(f"life-{worker}-*")))
others_are_done = here / "epoch-2-is-done"  # On all workers but the lost one.
(here / f"life-{worker}-{life}").write_text(str(os.getpid()))

deadline = time.monotonic() + 100
while life and not others_are_done.exists() and time.monotonic() < deadline:
    time.sleep(0.05)  # Otherwise it might be back within epoch 2 on a busy machine.
strategy = tfdist.MultiWorkerMirroredStrategy(
    synchronization=tfdist.DiLoCo(every=EVERY, tolerate_lost_workers=True),
    fault_tolerance=tfdist.FaultTolerance(start_timeout_seconds=120),
)
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(STEPS * BATCH, 6)).astype("float32"), rng.integers(0, 3, STEPS * BATCH)
sharding = tfdist.data.BalancedSharding((x, y), global_batch_size=BATCH, seed=0)
train = strategy.distribute_datasets_from_function(sharding)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Events(keras.callbacks.Callback):
    """Counts the steps; kills worker 2 in its first life; worker 0 awaits its return before epoch 3 begins."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if worker == 2 and life == 0 and self.steps == STEPS + 6:  # Two steps after a synchronization.
            time.sleep(0.5)  # Longer than the time between two signs of progress.
            strategy.elastic.tell_progress()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        if worker == 0 and epoch == 2:
            others_are_done.touch()
        deadline = time.monotonic() + 100
        while worker == 0 and epoch == 2 and not strategy.elastic.joining() and time.monotonic() < deadline:
            time.sleep(0.05)


events = Events()
history = model.fit(train, epochs=EPOCHS, verbose=0, callbacks=[events]).history
report = strategy.row_report()
result = {
    "steps": events.steps,
    "losses": history["loss"],
    "evaluated": model.evaluate(x, y, batch_size=40, verbose=0),
    "weights": [weight.tolist() for weight in model.get_weights()],
    "position": list(sharding.position),
    "report": vars(report),
}
(here / f"result-{worker}.json").write_text(json.dumps(result))
