"""Measures the steps of a replica in the graph, and sets the choice of its codecs, the same on all replicas.

The numbers of the last steps travel with the uncompressed gradients of the next one. So an exchange of their own is not
needed, and all replicas get the same numbers at the same step. Rank 0 tells with them whether the policy takes them.
Then each replica computes the same choice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.codec_trials import WINDOW, Alternatives, Choice, CodecTrials, Numbers, TrialOrder
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.stopwatch import computed_by, timestamp

Tell = Callable[[str, TrialOrder], None]
_NUMBERS = 2  # Those of `Numbers`, for each replica.


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
            # The end of the last exchange, in seconds since the epoch.
            self._ended = tf.Variable(0.0, trainable=False, name="end_of_exchange", dtype=tf.float64)
            # The least numbers of the steps since the policy took some. They begin with 0, since infinite ones would
            # become NaN in the sum.
            self._least = tf.Variable(tf.zeros([_NUMBERS]), trainable=False, name="least_numbers")
            # Not the count of the optimizer, which may apply several lists of gradients in a step.
            self._steps = tf.Variable(0, trainable=False, name="steps", dtype=tf.int64)
        self.decider = Decider(alternatives, tell)
        self._decide = _deciding(self.decider)

    def choice(self) -> tf.Tensor:
        """Returns the choice for this step, int32 [groups + 1]."""
        with tf.device(self._host):
            return self.chosen.read_value()

    def own_numbers(self, choice: tf.Tensor) -> tf.Tensor:
        """Returns the numbers of the last steps, to be summed over all replicas, float32 [ranks * 2 + 1].

        The last one tells whether the policy takes the numbers. Only rank 0 sets it, since the numbers of steps may
        differ between replicas after a step that failed. `choice` is that of this step.
        """
        with tf.device(self._host):
            of_all = tf.one_hot(self._rank, self._ranks)[:, tf.newaxis] * self._least.read_value()
            takes = tf.constant(False)
            if self._rank == 0:
                takes = tf.logical_or(tf.equal(choice[-1], 0), tf.equal(self._steps.read_value() % WINDOW, 0))
            return tf.concat([tf.reshape(of_all, [-1]), tf.cast(takes, tf.float32)[tf.newaxis]], axis=0)

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
            before = self._ended.read_value()
            own = tf.cast(tf.stack([tf.where(before > 0, now - before, 0), now - computed]), tf.float32)
            takes, of_all = numbers[-1] > 0, tf.reshape(numbers[:-1], [self._ranks, _NUMBERS])
            # A step that fails before all sums are there changes nothing.
            with tf.control_dependencies([now, of_all]):
                self._ended.assign(now)
                if self._rank == 0:
                    self._steps.assign_add(1, read_value=False)
                self._least.assign(tf.where(takes, own, tf.minimum(self._least.read_value(), own)))
                self._decide(self.chosen.handle, takes, of_all)


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
        """Returns the choice for the next step, and whether it is final, int32.

        Args:
          numbers: The numbers of each replica, float32 [ranks, 2].
          chosen: The present choice, and whether it is final.
        """
        present = tuple(map(int, chosen))
        if present != self._given and (any(present) or self._given is not None):  # Restored from a checkpoint.
            self._trials = CodecTrials(self._alternatives, present[:-1] if present[-1] else None)
            self.reason = ""
            order = self._trials.order
        else:
            order = self._trials.take(Numbers(float(numbers[0, 0]), float(numbers[:, 1].min())))
        if order.reason:
            self.reason = order.reason
            if self._tell is not None:
                self._tell(self._alternatives.describe(order.choice), order)
        self._given = (*order.choice, int(order.is_final))
        return np.array(self._given, np.int32)


def _deciding(decider: Decider) -> Callable[..., Any]:
    """Returns a function that calls `decider` in the graph if the policy takes the numbers.

    A resource is among its inputs. TensorFlow runs stateful operations without a resource one after another, also those
    of two replicas in one graph. The replicas would then wait for each other for ever.
    """

    @tf.function(autograph=False)
    def decide(chosen, takes, numbers):
        def ask():
            present = tf.raw_ops.ReadVariableOp(resource=chosen, dtype=tf.int32)
            order = tf.numpy_function(decider, [numbers, present], tf.int32)
            tf.raw_ops.AssignVariableOp(resource=chosen, value=order)
            return tf.constant(True)

        tf.cond(takes, ask, lambda: tf.constant(False))

    return decide


def _flat(nest: Sequence[Any]) -> list[tf.Tensor]:
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in nest]
