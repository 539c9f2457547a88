"""Measures the steps of a replica in the graph, and sets the choice of its codecs, the same on all replicas.

The numbers of a step travel with the uncompressed gradients of the next one. So an exchange of their own is not needed,
and all replicas get the same numbers at the same step. From them each replica computes the same choice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.codec_trials import Alternatives, Choice, CodecTrials, Numbers, TrialOrder
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.stopwatch import computed_by, timestamp

Tell = Callable[[str, TrialOrder], None]
_NUMBERS = 2  # Those of `Numbers`, for each step and replica.
_STEPS = -1  # Place of the steps until the next call, in the numbers of an order.


class ChoiceControl:
    """The choice of codecs of one replica.

    Costs two timestamps in each step, and a call of Python in steps of trials and in each fourth step otherwise.

    Args:
      alternatives: The ways to exchange gradients.
      device: Device of the replica.
      rank: Number of the replica among all.
      ranks: Number of all replicas.
      tell: Function that is called with the names of the chosen codecs and the order, once a choice becomes final.

    Attributes:
      chosen: The choice, and 1 if it is final, else 0: int32. Saved in checkpoints.
      decider: Runs the policy.
    """

    def __init__(
        self,
        alternatives: Alternatives,
        device: str,
        rank: int,
        ranks: int,
        tell: Tell | None,
    ):
        self._device, self._host = device, host_of(device)
        self._rank, self._ranks = rank, ranks
        groups = len(alternatives.of_groups)
        with tf.device(self._host):
            self.chosen = tf.Variable(tf.zeros([groups + 1], tf.int32), trainable=False, name="chosen")
            self._left = tf.Variable(0, trainable=False, name="steps_left")
            # End of the last exchange in seconds since the epoch, and the numbers of this step.
            self._noted = tf.Variable(tf.zeros([1 + _NUMBERS], tf.float64), trainable=False, name="noted")
            self._least = tf.Variable(tf.fill([ranks, _NUMBERS], np.float32(np.inf)), trainable=False, name="least")
        self.decider = Decider(alternatives, tell)
        self._decide = _deciding(self.decider)

    def choice(self) -> tf.Tensor:
        """Returns the choice for this step, int32 [groups + 1]."""
        with tf.device(self._host):
            return self.chosen.read_value()

    def own_numbers(self) -> tf.Tensor:
        """Returns the numbers of the last step, to be summed over all replicas, float32 [ranks * 2]."""
        with tf.device(self._host):
            numbers = tf.cast(self._noted.read_value()[1:], tf.float32)
            of_all = tf.one_hot(self._rank, self._ranks)[:, tf.newaxis] * numbers
            return tf.reshape(of_all, [-1])

    def end_step(self, gradients: Sequence[Any], totals: Sequence[Any], numbers: tf.Tensor, apart: tf.Tensor) -> None:
        """Notes the times of a step, and decides on the next step.

        Args:
          gradients: The gradients of this replica.
          totals: Their sums.
          numbers: The sum of `own_numbers` over all replicas.
          apart: Handle of a variable that no operation reads or writes.
        """
        with tf.device(self._host):
            with tf.control_dependencies(computed_by(self._device, _flat(gradients))):
                computed = timestamp(apart)
            with tf.control_dependencies(computed_by(self._device, _flat(totals))):
                now = timestamp(apart)
            before = self._noted.read_value()[0]
            self._noted.assign(tf.stack([now, tf.where(before > 0, now - before, 0), now - computed]))
            handles = [each.handle for each in (self.chosen, self._left, self._least)]
            self._decide(*handles, tf.reshape(numbers, [self._ranks, _NUMBERS]))


class Decider:
    """Runs the policy with the numbers of all replicas. Called by the graph.

    Args:
      alternatives: The ways to exchange gradients.
      tell: See `ChoiceControl`.

    Attributes:
      reason: Why the newest final choice was made; empty before.
    """

    def __init__(self, alternatives: Alternatives, tell: Tell | None):
        self.reason = ""
        self._alternatives, self._tell = alternatives, tell
        self._trials = CodecTrials(alternatives)
        self._given: Choice | None = None

    def __call__(self, numbers: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Returns the choice for the next step, whether it is final, and the steps until the next call, int32.

        Args:
          numbers: The numbers of each replica, float32 [ranks, 2].
          chosen: The present choice, and whether it is final.
        """
        present = tuple(map(int, chosen))
        if present != self._given and (any(present) or self._given is not None):  # Restored from a checkpoint.
            self._trials = CodecTrials(self._alternatives, present[:-1] if present[-1] else None)
            order = self._trials.order
        else:
            order = self._trials.take(Numbers(float(numbers[0, 0]), float(numbers[:, 1].min())))
        if order.reason:
            self.reason = order.reason
            if self._tell is not None:
                self._tell(self._alternatives.describe(order.choice), order)
        self._given = (*order.choice, int(order.is_final))
        return np.array([*self._given, order.steps], np.int32)


def _deciding(decider: Decider) -> Callable[..., Any]:
    """Returns a function that calls `decider` in the graph, if no steps are left until then.

    Resources are among its inputs. TensorFlow runs stateful operations without a resource one after another, also those
    of two replicas in one graph. The replicas would then wait for each other for ever.
    """

    @tf.function(autograph=False)
    def decide(chosen, left, least, numbers):
        steps = tf.raw_ops.ReadVariableOp(resource=left, dtype=tf.int32) - 1
        lowest = tf.minimum(tf.raw_ops.ReadVariableOp(resource=least, dtype=tf.float32), numbers)

        def ask():
            present = tf.raw_ops.ReadVariableOp(resource=chosen, dtype=tf.int32)
            order = tf.numpy_function(decider, [lowest, present], tf.int32)
            tf.raw_ops.AssignVariableOp(resource=chosen, value=order[:_STEPS])
            tf.raw_ops.AssignVariableOp(resource=left, value=order[_STEPS])
            tf.raw_ops.AssignVariableOp(resource=least, value=tf.fill(tf.shape(lowest), np.float32(np.inf)))
            return tf.constant(True)

        def wait():
            tf.raw_ops.AssignVariableOp(resource=left, value=steps)
            tf.raw_ops.AssignVariableOp(resource=least, value=lowest)
            return tf.constant(False)

        tf.cond(steps <= 0, ask, wait)

    return decide


def _flat(nest: Sequence[Any]) -> list[tf.Tensor]:
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in nest]
