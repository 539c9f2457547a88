"""The outer update of DiLoCo: averages the changes of weights over all replicas, and applies them by an optimizer."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.local_steps.synchronization import DiLoCo
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.step import Step

IS_KEPT = "is_kept"


class OuterUpdate:
    """Weights of one inner optimizer as they were at the last synchronization, and their outer optimizer.

    Make it in a thread of its own, since it makes variables.

    Args:
      options: The options of DiLoCo.
      weights: The weights, Keras variables of the strategy.
      fragment: The number of the fragment to which they belong.
      strategy: The strategy.

    Attributes:
      weights, fragment: As given.
      optimizer: The outer optimizer.
      starts: The weights at the last synchronization, by replica of this worker and weight.
      is_kept: Whether `starts` are those of the present period, bool [], by replica of this worker.
    """

    def __init__(self, options: DiLoCo, weights: Sequence[Any], fragment: int, strategy: Any):
        self.weights, self.fragment = list(weights), fragment
        with strategy.scope():
            self.optimizer = options.new_outer_optimizer()
            self.optimizer.build(self.weights)
        self.starts: list[list[tf.Variable]] = []
        self.is_kept: list[tf.Variable] = []
        for replica, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                own = [each.value.values[replica] for each in self.weights]
                self.starts.append([tf.Variable(each.read_value(), trainable=False) for each in own])
            with tf.device(host_of(device)):  # A branch is chosen there.
                self.is_kept.append(tf.Variable(False, trainable=False))

    def state(self) -> dict[str, tf.Variable]:
        """Returns the variables of this worker's replicas, by names that are equal in each run."""
        named: dict[str, tf.Variable] = {}
        for replica, (starts, is_kept) in enumerate(zip(self.starts, self.is_kept, strict=True)):
            named |= {f"start/{i}@{replica}": start for i, start in enumerate(starts)}
            named |= {f"{IS_KEPT}@{replica}": is_kept}
            own = [each.value.values[replica] for each in self.optimizer.variables]
            named |= {f"optimizer/{i}@{replica}": each for i, each in enumerate(own)}
        return named

    def begin(self, replica: int) -> None:
        """Keeps the weights before their first update since the last synchronization.

        Weights may also change between steps, as when an `EarlyStopping` restores them, so a copy at the end of the
        last synchronization would not do.
        """

        def keep():
            for start, weight in zip(self.starts[replica], self._own(replica), strict=True):
                # A plain read, which no tape watches: Keras' optimizers exchange inside of a `tf.custom_gradient`.
                start.assign(tf.raw_ops.ReadVariableOp(resource=weight.handle, dtype=weight.dtype))
            self.is_kept[replica].assign(True)
            return tf.constant(True)

        tf.cond(self.is_kept[replica], lambda: tf.constant(True), keep)

    def begin_anew(self, replica: int, if_true: tf.Tensor) -> None:
        """Forgets the kept weights if `if_true`, bool [], so that the next step keeps them."""
        is_kept = self.is_kept[replica]
        is_kept.assign(is_kept & ~if_true)

    def apply(self, step: Step, share: tf.Tensor) -> None:
        """Averages the changes of the weights over all replicas, and lets the outer optimizer apply the average.

        `share` is the weight of this replica, float32 [].
        """
        replica = step.replica
        self.begin(replica)  # In case no optimizer has updated the weights in this period.
        starts = [start.read_value() for start in self.starts[replica]]
        changes = [
            tf.math.multiply_no_nan(start - own.read_value(), tf.cast(share, start.dtype))
            for start, own in zip(starts, self._own(replica), strict=True)
        ]
        request = ReductionRequest(tf.distribute.ReduceOp.SUM, changes, self.optimizer, self.weights)
        totals = tf.distribute.get_strategy().extended.reducer.reduce(request, step)
        for own, start in zip(self._own(replica), starts, strict=True):
            own.assign(start)
        before, step.applies_sums = step.applies_sums, True
        try:
            self.optimizer.apply(totals, self.weights)
        finally:
            step.applies_sums = before
        self.is_kept[replica].assign(False)

    def _own(self, replica: int) -> list[tf.Variable]:
        return [each.value.values[replica] for each in self.weights]
