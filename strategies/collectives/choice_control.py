"""Measures the steps of a replica in the graph, and sets the choice of its codecs, the same on all replicas.

The replicas exchange their numbers in the steps in which the policy wants to know them. So all replicas get the same
numbers at the same step, and each of them computes the same choice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.codec_trials import Alternatives, Choice, CodecTrials, Numbers, TrialOrder
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.stopwatch import computed_by, timestamp

Tell = Callable[[str, TrialOrder], None]
Sum = Callable[[tf.Tensor], tf.Tensor]
_NUMBERS = 2  # Those of `Numbers`, for each replica.
_STEPS = -1  # Place of the steps until the next call, in the numbers of an order.


class ChoiceControl:
    """The choice of codecs of one replica.

    Costs two timestamps in each step. In steps of trials, and in each fourth step otherwise, it also costs a call of
    Python and an exchange of some numbers.

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
            # The end of the last exchange in seconds since the epoch.
            self._ended = tf.Variable(0.0, trainable=False, name="exchange_ended", dtype=tf.float64)
            self._least = tf.Variable(tf.zeros([_NUMBERS]), trainable=False, name="least_numbers")
        self.decider = Decider(alternatives, tell)
        self._decide = _deciding(self.decider)

    def choice(self) -> tf.Tensor:
        """Returns the choice for this step, int32 [groups + 1]."""
        with tf.device(self._host):
            return self.chosen.read_value()

    def is_asked(self) -> tf.Tensor:
        """Returns whether the policy wants to know the numbers in this step, bool []; equal on all replicas."""
        with tf.device(self._host):
            return self._left.read_value() <= 1

    def numbers_of_all(self, is_asked: tf.Tensor, total: Sum) -> tf.Tensor:
        """Returns the least numbers of the steps since they were asked for, float32 [ranks, 2]; zeros if not asked.

        Args:
          is_asked: See `is_asked`.
          total: Sums a tensor over all replicas, in the order of ranks.
        """

        def exchanged():
            of_own = tf.one_hot(self._rank, self._ranks)[:, tf.newaxis] * self._least.read_value()
            return tf.reshape(total(tf.reshape(of_own, [-1])), [self._ranks, _NUMBERS])

        with tf.device(self._host):
            return tf.cond(is_asked, exchanged, lambda: tf.zeros([self._ranks, _NUMBERS]))

    def end_step(
        self, gradients: Sequence[Any], totals: Sequence[Any], is_asked: tf.Tensor, numbers: tf.Tensor, apart: tf.Tensor
    ) -> None:
        """Notes the times of a step, and decides on the next step.

        Args:
          gradients: The gradients of this replica.
          totals: Their sums.
          is_asked: See `is_asked`.
          numbers: The numbers of all replicas; see `numbers_of_all`.
          apart: Handle of a variable that no operation reads or writes.
        """
        with tf.device(self._host):
            with tf.control_dependencies(computed_by(self._device, _flat(gradients))):
                computed = timestamp(apart)
            with tf.control_dependencies(computed_by(self._device, _flat(totals))):
                now = timestamp(apart)
            before = self._ended.read_value()
            self._ended.assign(now)
            own = tf.cast(tf.stack([tf.where(before > 0, now - before, 0), now - computed]), tf.float32)
            # `numbers` has the least numbers of the steps before. A step without sums does not count: it may have failed
            # on some replicas only.
            with tf.control_dependencies([now, numbers]):
                self._least.assign(tf.where(is_asked, own, tf.minimum(self._least.read_value(), own)))
                self._decide(self.chosen.handle, self._left.handle, is_asked, numbers)


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
    """Returns a function that calls `decider` in the graph if its numbers are asked for, and else counts the step.

    Resources are among its inputs. TensorFlow runs stateful operations without a resource one after another, also those
    of two replicas in one graph. The replicas would then wait for each other for ever.
    """

    @tf.function(autograph=False)
    def decide(chosen, left, is_asked, numbers):
        def ask():
            present = tf.raw_ops.ReadVariableOp(resource=chosen, dtype=tf.int32)
            order = tf.numpy_function(decider, [numbers, present], tf.int32)
            tf.raw_ops.AssignVariableOp(resource=chosen, value=order[:_STEPS])
            tf.raw_ops.AssignVariableOp(resource=left, value=order[_STEPS])
            return tf.constant(True)

        def wait():
            tf.raw_ops.AssignSubVariableOp(resource=left, value=1)
            return tf.constant(False)

        tf.cond(is_asked, ask, wait)

    return decide


def _flat(nest: Sequence[Any]) -> list[tf.Tensor]:
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in nest]
