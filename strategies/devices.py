"""The devices of this process that a strategy uses unless told otherwise."""

import os

import tensorflow as tf

from tfdist.cluster import DEVICES_PER_WORKER


def local_devices() -> list[str]:
    """All GPUs, else all logical CPUs, as `["CPU:0", ...]`."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [f"{kind}:{i}" for i in range(len(tf.config.list_logical_devices(kind)))]


def make_virtual_devices() -> None:
    """Makes as many logical CPUs as `TFDIST_DEVICES_PER_WORKER` asks for, before TensorFlow starts.

    Raises:
      ValueError: If the variable is not a positive whole number.
    """
    asked = os.environ.get(DEVICES_PER_WORKER)
    if not asked:
        return
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"{DEVICES_PER_WORKER} must be a whole number from 1, not {asked!r}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None and int(asked) > 1:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(asked))
