"""The CPU that stands beside a device of a worker."""

import tensorflow as tf


def host_of(device: str) -> str:
    """Returns the name of the CPU of the worker that has `device`."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
