"""How long a replica's exchange takes, told apart: collectives, and what stands between them."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.launcher import Launcher


class Stopwatch:
    """Adds up times of one step, as the graph runs it; each of the parts of an exchange has its own.

    Costs two timestamps a collective and two more. GPUs are told ahead of time what to do; of them these are the times
    at which they are told.
    """

    def __init__(self):
        self._begun: list[tf.Tensor] = []
        self._ended: list[tf.Tensor] = []
        self._exchanging: list[tf.Tensor] = []

    def of_collectives(self, launcher: Launcher) -> "_TimedLauncher":
        """A launcher whose collectives count as exchanging, from their launch to their arrival."""
        return _TimedLauncher(launcher, self._exchanging)

    def begin(self, tensors: Any) -> Any:
        """Takes note that a nest of tensors is there, from which something is made until `end`; returns it for that."""
        return _noted(tensors, self._begun)

    def end(self, tensors: Any) -> Any:
        """Takes note that what was made is there; returns it."""
        return _noted(tensors, self._ended)

    def seconds(self) -> tf.Tensor:
        """Spent on coding (encoding, decoding, sums, residuals), and on exchanging, float64 [2]."""
        exchanging = tf.add_n(self._exchanging)
        return tf.stack([tf.add_n(self._ended) - tf.add_n(self._begun) - exchanging, exchanging])


class _TimedLauncher:
    def __init__(self, launcher: Launcher, spent: list[tf.Tensor]):
        self._launcher, self._spent = launcher, spent

    def all_reduce(self, tensor, options):
        return self._timed(lambda own: self._launcher.all_reduce(own, options=options), tensor)

    def all_gather_rows(self, tensor, options):
        return self._timed(lambda own: self._launcher.all_gather_rows(own, options), tensor)

    def all_to_all(self, rows, options):
        return self._timed(lambda own: self._launcher.all_to_all(own, options), rows)

    def _timed(self, collective, tensor):
        begun: list[tf.Tensor] = []
        ended: list[tf.Tensor] = []
        result = _noted(collective(_noted(tensor, begun)), ended)
        self._spent.append(ended[0] - begun[0])
        return result


def _noted(tensors: Any, times: list[tf.Tensor]) -> Any:
    """`tensors`, for what is to come after the time at which they are there, which goes to `times`."""
    leaves = tf.nest.flatten(tensors, expand_composites=True)
    now = _now(leaves)
    times.append(now)
    with tf.control_dependencies([now]):
        leaves = [tf.identity(leaf) for leaf in leaves]
    return tf.nest.pack_sequence_as(tensors, leaves, expand_composites=True)


def _now(after: list[tf.Tensor]) -> tf.Tensor:
    """The time at which the tensors in `after` are there, seconds since the epoch, float64 []."""
    with tf.device("CPU:0"):
        # Not below, where it would take the dependencies to itself, and the function none.
        apart = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="unordered")
        with tf.control_dependencies(after):
            return _timestamp(apart)


@tf.function
def _timestamp(apart):
    # TensorFlow runs stateful operations that share no resource one after another: this has one of its own, which
    # nobody opens.
    del apart
    return tf.timestamp()
