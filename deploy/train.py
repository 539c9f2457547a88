"""Trains a small classifier on random data, with backups. The files in this folder start this script.

Replace the data and the model by your own. OUTPUT_DIR names a folder that all workers share. METRICS_PORT is a port at
which Prometheus may read the figures of each worker; without it, no port is open for that.
"""

import os

import keras
import numpy as np

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
output = os.environ.get("OUTPUT_DIR", "output")
os.makedirs(output, exist_ok=True)

port = os.environ.get("METRICS_PORT")

rng = np.random.default_rng(0)  # with a seed: all workers must read the same data
x = rng.normal(size=(4096, 64)).astype("float32")
y = (x[:, :8].sum(axis=1) > 0).astype("int32")

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

train = strategy.distribute_datasets_from_function(tfdist.data.BalancedSharding((x, y), global_batch_size=256, seed=0))
model.fit(
    train,
    epochs=int(os.environ.get("EPOCHS", "10")),
    verbose=2,
    callbacks=[
        tfdist.callbacks.BackupAndRestore(os.path.join(output, "backup"), save_freq=60.0),
        tfdist.callbacks.CSVLogger(os.path.join(output, "log.csv")),
        *([tfdist.callbacks.Telemetry(prometheus_port=int(port), prometheus_address="0.0.0.0")] if port else []),
    ],
)
if tfdist.cluster.is_chief():
    model.save(os.path.join(output, "model.keras"))
