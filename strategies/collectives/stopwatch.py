"""How long a replica's exchange takes, told apart: collectives, and what stands between them."""

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.collectives.launcher import Launcher


class Stopwatch:
    """Adds up times of one step, as the graph runs it; each of the parts of an exchange has its own.

    Costs time: what follows waits for each timestamp. GPUs are told ahead of time what to do; of them these are the
    times at which they are told.

    Args:
      launcher: Of the replica whose times are taken.
      is_on: Whether they are taken at all; all times are 0 otherwise, and nothing is added to the graph.
    """

    def __init__(self, launcher: Launcher, is_on: bool):
        self._apart, self._is_on = launcher.untouched, is_on
        self._begun: list[tf.Tensor] = []
        self._whole: list[tf.Tensor] = []
        self._exchanging: list[tf.Tensor] = []

    def of_collectives(self, launcher: Launcher) -> "_TimedLauncher":
        """A launcher whose collectives count as exchanging, from launch to arrival; they must not run side by side."""
        return _TimedLauncher(launcher, self)

    def exchanged(self, collective: Callable[[tf.Tensor], Any], tensor: tf.Tensor) -> Any:
        """What a collective makes of a tensor; that counts as exchanging."""
        begun, tensor = self._noted(tensor)
        ended, result = self._noted(collective(tensor))
        self._exchanging.append(_difference(ended, begun))
        return result

    def begin(self, tensors: Any) -> Any:
        """Takes note that a nest of tensors is there, from which something is made until `end`; returns it for that."""
        now, tensors = self._noted(tensors)
        self._begun.append(now)
        return tensors

    def end(self, tensors: Any) -> Any:
        """Takes note that what was made since the last `begin` is there; returns it."""
        now, tensors = self._noted(tensors)
        self._whole.append(_difference(now, self._begun.pop()))
        return tensors

    def _noted(self, tensors: Any) -> tuple[tf.Tensor, Any]:
        """When `tensors` are there, in seconds since the epoch; and `tensors`, for what is to come after that."""
        if not self._is_on:
            return tf.constant(0.0, tf.float64), tensors
        leaves = tf.nest.flatten(tensors, expand_composites=True)
        with tf.device(self._apart.device), tf.control_dependencies(leaves):
            now = _timestamp(self._apart.handle)
        with tf.control_dependencies([now]):
            leaves = tf.identity_n(leaves)  # `tf.identity` would take whole numbers from a GPU to the host and back.
        return now, tf.nest.pack_sequence_as(tensors, leaves, expand_composites=True)

    def seconds(self) -> tf.Tensor:
        """Spent on coding (encoding, decoding, sums, residuals), and on exchanging, float64 [2]."""
        with tf.device("CPU:0"):
            exchanging = tf.add_n(self._exchanging)
            return tf.stack([tf.add_n(self._whole) - exchanging, exchanging])


class _TimedLauncher:
    def __init__(self, launcher: Launcher, watch: Stopwatch):
        self._launcher, self._watch = launcher, watch

    def all_reduce(self, tensor, options):
        return self._watch.exchanged(lambda own: self._launcher.all_reduce(own, options=options), tensor)

    def all_gather_rows(self, tensor, options):
        return self._watch.exchanged(lambda own: self._launcher.all_gather_rows(own, options), tensor)

    def all_to_all(self, rows, options):
        return self._watch.exchanged(lambda own: self._launcher.all_to_all(own, options), rows)

    def rows_of_all(self, rows, options, *, apart=False):
        return self._watch.exchanged(lambda own: self._launcher.rows_of_all(own, options, apart=apart), rows)


def _difference(later: tf.Tensor, earlier: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return later - earlier


@tf.function
def _timestamp(apart):
    # TensorFlow runs stateful operations that have no resource one after another; those that only read one, in any
    # order, and so it takes a function that has no use for it.
    del apart
    return present_time()


def present_time() -> tf.Tensor:
    """Seconds since the epoch when the graph comes to it, float64 []."""
    if _tf.is_op_determinism_enabled():  # Refuses timestamps, for what a program may do with them.
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
    return tf.timestamp()
