"""The CPU that stands beside a device of a worker, and how it learns about operations of that device."""

from collections.abc import Sequence

import tensorflow as tf


def host_of(device: str) -> str:
    """Returns the name of the CPU of the worker that has `device`."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()


def launched(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a tensor on the host that exists once `device` has launched the kernels of `tensors`, int32 [].

    A GPU may compute the kernels later. A control dependency of the host on `tensors` would wait for that, since
    TensorFlow makes it a copy from the GPU, and such a copy waits for all kernels that the GPU has been given. A number
    of type int32 stays in the memory of the host.
    """
    token = tf.constant(0)
    with tf.device(device), tf.control_dependencies(tensors):
        token = unfolded(token)
    with tf.device(host_of(device)):
        return unfolded(token)


def unfolded(scalar: tf.Tensor) -> tf.Tensor:
    """Returns a scalar by an operation that TensorFlow's optimizer keeps, together with control dependencies on it.

    The optimizer removes an identity that control dependencies use, and then may also remove these dependencies.
    """
    return tf.raw_ops.PlaceholderWithDefault(input=scalar, shape=[])
