"""Trains on two workers that share a GPU. Worker 1 kills itself once, in the middle of the second epoch."""

import json
import os
import pathlib
import signal
import sys

import keras
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gpu_checks as checks

import tfdist


class KillOnce(keras.callbacks.Callback):
    """Kills this worker after a step, unless an earlier start has done so."""

    def __init__(self, mark):
        super().__init__()
        self._mark = mark

    def on_train_batch_end(self, batch, logs=None):
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        worker = tfdist.cluster.ClusterSpec.from_env().worker_id
        if step == checks.STEPS + 2 and worker == 1 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder):
    tf.config.experimental.enable_tensor_float_32_execution(False)
    model = checks.build("workers")
    backup = tfdist.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
    callbacks = [backup, KillOnce(folder / "killed")]
    history = model.fit(*checks.rows(), batch_size=checks.BATCH, epochs=4, verbose=0, callbacks=callbacks)
    if tfdist.cluster.ClusterSpec.from_env().is_chief:
        (folder / "losses.json").write_text(json.dumps(history.history["loss"]))


main(pathlib.Path(sys.argv[1]))
