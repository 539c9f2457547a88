"""The devices of this process that a strategy uses by default."""

import os

import tensorflow as tf

from tfdist.cluster import DEVICES_PER_WORKER_VARIABLE


def local_devices() -> list[str]:
    """Returns the names of all GPUs, or of all logical CPUs if there is no GPU, as `["CPU:0", ...]`."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [f"{kind}:{i}" for i in range(len(tf.config.list_logical_devices(kind)))]


def make_virtual_devices() -> None:
    """Creates the number of logical CPUs that `TFDIST_DEVICES_PER_WORKER` states. Call it before TensorFlow starts.

    Raises:
      ValueError: If the variable is not a positive integer.
    """
    asked = os.environ.get(DEVICES_PER_WORKER_VARIABLE)
    if not asked:
        return
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"{DEVICES_PER_WORKER_VARIABLE} must be an integer of at least 1, got {asked!r}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None and int(asked) > 1:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(asked))
