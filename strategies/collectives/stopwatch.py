"""Times a replica's exchange of compressed gradients: how long collectives take, and the coding between them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.host_device import host_of, unfolded
from tfdist.strategies.collectives.transport import Transport

_OF_SAME_BITS = {tf.int32: tf.float32, tf.int64: tf.float64}


class Stopwatch:
    """Measures, while the graph runs, how long one replica codes and exchanges the gradients of one codec in a step.

    Each timestamp delays the operations after it.

    Args:
      device: Device of the replica.
      untouched: A variable on a CPU that no operation reads or writes; see `CollectiveLauncher`.
      is_on: Whether to measure. If not, all times are 0, and the graph has no timestamps.
    """

    def __init__(self, device: str, untouched: tf.Variable, is_on: bool):
        self._device, self._apart, self._is_on = device, untouched, is_on
        self._begun: list[tf.Tensor] = []
        self._whole: list[tf.Tensor] = []
        self._exchanging: list[tf.Tensor] = []

    def timed(self, transport: Transport) -> Transport:
        """Wraps a transport so that its collectives count as exchange time. They must not run at the same time."""
        return _TimedTransport(transport, self)

    def exchanged(self, collective: Callable[[tf.Tensor], Any], tensor: tf.Tensor) -> Any:
        """Runs a collective on a tensor and adds its duration to the exchange time."""
        if not self._is_on:
            return collective(tensor)
        begun, tensor = self._noted(tensor)
        ended, result = self._noted(collective(tensor))
        self._exchanging.append(_difference(ended, begun))
        return result

    def begin(self, tensors: Any) -> Any:
        """Starts timing when a nest of tensors is computed. Returns the nest, to be used by the operations to time."""
        if self._is_on:
            now, tensors = self._noted(tensors)
            self._begun.append(now)
        return tensors

    def end(self, tensors: Any) -> Any:
        """Stops timing, since the last `begin`, when a nest of tensors is computed. Returns the nest."""
        if self._is_on:
            now, tensors = self._noted(tensors)
            self._whole.append(_difference(now, self._begun.pop()))
        return tensors

    def _noted(self, tensors: Any) -> tuple[tf.Tensor, Any]:
        """Returns the time at which `tensors` are computed, in seconds since the epoch, and `tensors` after it."""
        leaves = tf.nest.flatten(tensors, expand_composites=True)
        with tf.device(self._apart.device), tf.control_dependencies(computed_by(self._device, leaves)):
            now = timestamp(self._apart.handle)
        with tf.control_dependencies([now]):
            leaves = tf.identity_n(leaves)  # `tf.identity` would copy integers from a GPU to the host and back.
        return now, tf.nest.pack_sequence_as(tensors, leaves, expand_composites=True)

    def seconds(self) -> tf.Tensor:
        """Returns the seconds spent on coding (with sums and residuals) and on the exchange, float64 [2]."""
        with tf.device("CPU:0"):
            if not self._is_on:
                return tf.zeros([2], tf.float64)
            exchanging = tf.add_n(self._exchanging)
            return tf.stack([tf.add_n(self._whole) - exchanging, exchanging])


class _TimedTransport:
    def __init__(self, transport: Transport, watch: Stopwatch):
        self._transport, self._watch, self.ranks = transport, watch, transport.ranks

    def all_gather(self, rows, options):
        return self._watch.exchanged(lambda own: self._transport.all_gather(own, options), rows)

    def all_to_all(self, rows, options):
        return self._watch.exchanged(lambda own: self._transport.all_to_all(own, options), rows)

    def sum_sent_whole(self, tensor, options):
        return self._watch.exchanged(lambda own: self._transport.sum_sent_whole(own, options), tensor)

    def sum_parts(self, tensor, options):
        return self._watch.exchanged(lambda own: self._transport.sum_parts(own, options), tensor)

    def all_reduce(self, tensor, options):
        return self._watch.exchanged(lambda own: self._transport.all_reduce(own, options), tensor)


def _difference(later: tf.Tensor, earlier: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return later - earlier


@tf.function
def timestamp(apart: tf.Tensor) -> tf.Tensor:
    """Returns the seconds since the epoch, float64 []. `apart` is the handle of a variable; see `Stopwatch`."""
    # TensorFlow runs stateful operations without a resource one after another, but those that only read a resource in
    # any order. Therefore this function takes a resource, although it does not use it.
    del apart
    return present_time()


def computed_by(device: str, tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns tensors to wait for until `device` has computed all of `tensors`.

    On a CPU these are `tensors`. On a GPU an operation counts as done when its kernel is launched. A GPU runs kernels
    in the order of their launch. So there a copy to the host of one number, launched after all `tensors`, tells when
    they are computed. Costs one small kernel and one copy. The copy may also wait for kernels that are launched soon
    after, since TensorFlow's copies wait for all that the GPU has been given.
    """
    if "GPU" not in device:
        return tensors
    number = last_number(device, tensors)
    if number is None:
        return tensors
    with tf.device(host_of(device)):
        return [unfolded(number)]


def last_number(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns a number on `device` that it computes after all of `tensors`, float64 []; `None` if none is a number."""
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
    numbers = floats or [tensor for tensor in tensors if tensor.dtype.is_integer]
    if not numbers:
        return None
    with tf.device(device), tf.control_dependencies(tensors):
        # TensorFlow would copy integers to the host before it takes the first one. As floats they stay on the GPU.
        number = tf.bitcast(numbers[-1], _OF_SAME_BITS.get(numbers[-1].dtype, numbers[-1].dtype))
        return tf.reduce_sum(tf.cast(tf.reshape(number, [-1])[:1], tf.float64))


def present_time() -> tf.Tensor:
    """Seconds since the epoch at which the graph runs this operation, float64 []."""
    if tf_internals.is_op_determinism_enabled():  # It forbids `tf.timestamp`.
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
    return tf.timestamp()
