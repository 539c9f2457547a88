"""The outer update of DiLoCo: averages the changes of weights over all replicas, and applies them by an optimizer."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.readable_numbers import counted, size
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.local_steps.averaging import times_share
from tfdist.strategies.local_steps.synchronization import DiLoCo
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.step import Step

IS_KEPT = "is_kept"
# The part of the replica's own weights when a fragment arrives, as in Streaming DiLoCo, 2025,
# https://arxiv.org/abs/2501.18512. The rest are the weights of the outer optimizer.
_OWN_PART = 0.5


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
      starts: The weights at the last synchronization, by replica of this worker and weight: those of the outer
        optimizer, which are equal on all replicas.
      travelling: The changes that travel while steps go on, and their averages afterwards, likewise. Empty without
        `overlap_steps`.
      is_kept: Whether `starts` are those of the present period, bool [], by replica of this worker.
    """

    def __init__(self, options: DiLoCo, weights: Sequence[Any], fragment: int, strategy: Any):
        self.weights, self.fragment = list(weights), fragment
        self._fragments = options.fragments
        with strategy.scope():
            self.optimizer = options.new_outer_optimizer()
            self.optimizer.build(self.weights)
        self.starts: list[list[tf.Variable]] = []
        self.travelling: list[list[tf.Variable]] = []
        self.is_kept: list[tf.Variable] = []
        for replica, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                own = [each.value.values[replica] for each in self.weights]
                self.starts.append([tf.Variable(each.read_value(), trainable=False) for each in own])
                if options.overlap_steps:
                    self.travelling.append([tf.Variable(tf.zeros_like(each), trainable=False) for each in own])
            with tf.device(host_of(device)):  # A branch is chosen there.
                self.is_kept.append(tf.Variable(False, trainable=False))

    def state(self) -> dict[str, tf.Variable]:
        """Returns the variables of this worker's replicas, by names that are equal in each run."""
        named: dict[str, tf.Variable] = {}
        for replica, (starts, is_kept) in enumerate(zip(self.starts, self.is_kept, strict=True)):
            named |= {f"start/{i}@{replica}": start for i, start in enumerate(starts)}
            travelling = self.travelling[replica] if self.travelling else []
            named |= {f"travelling/{i}@{replica}": change for i, change in enumerate(travelling)}
            named |= {f"{IS_KEPT}@{replica}": is_kept}
            own = [each.value.values[replica] for each in self.optimizer.variables]
            named |= {f"optimizer/{i}@{replica}": each for i, each in enumerate(own)}
        return named

    def copied_bytes(self) -> int:
        """Returns the bytes of the copies of weights that each replica keeps."""
        copies = [*self.starts[0], *(self.travelling[0] if self.travelling else [])]
        return sum(each.shape.num_elements() * each.dtype.size for each in copies)

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
        changes = self._changes(step.replica)
        self._apply_outer(step, self._averaged(step, changes, share))
        self.is_kept[step.replica].assign(False)

    def depart(self, replica: int) -> list[tf.Variable]:
        """Keeps the present changes of the weights, for `exchange`. Returns the variables that have them."""
        changes = self._changes(replica)
        return [kept.assign(each) for kept, each in zip(self.travelling[replica], changes, strict=True)]

    def exchange(self, step: Step, share: tf.Tensor) -> None:
        """Puts averages over all replicas in the place of the kept changes; see `apply`."""
        kept = self.travelling[step.replica]
        totals = self._averaged(step, [each.read_value() for each in kept], share)
        for each, total in zip(kept, totals, strict=True):
            each.assign(total)

    def averages(self, replica: int) -> list[tf.Tensor]:
        """Returns the averages that `exchange` has put in the place of the changes."""
        return [each.read_value() for each in self.travelling[replica]]

    def apply_late(self, step: Step, averages: Sequence[tf.Tensor]) -> None:
        """Lets the outer optimizer apply averages of changes, and merges the result with the weights of this replica.

        The next changes are differences from the weights of the outer optimizer, which are equal on all replicas.
        """
        replica = step.replica
        present = [own.read_value() for own in self._own(replica)]
        self._apply_outer(step, averages)
        for own, start, value in zip(self._own(replica), self.starts[replica], present, strict=True):
            outer = own.read_value()
            start.assign(outer)
            own.assign(merged(value, outer))

    def _changes(self, replica: int) -> list[tf.Tensor]:
        """Returns the changes of the weights since the last synchronization: start minus end."""
        self.begin(replica)  # In case no optimizer has updated the weights in this period.
        starts, ends = self.starts[replica], self._own(replica)
        return [start.read_value() - own.read_value() for start, own in zip(starts, ends, strict=True)]

    def _averaged(self, step: Step, changes: list[tf.Tensor], share: tf.Tensor) -> list[tf.Tensor]:
        weighted = [times_share(change, share) for change in changes]
        request = ReductionRequest(
            tf.distribute.ReduceOp.SUM, weighted, self.optimizer, self.weights, fragment=self._described()
        )
        return tf.distribute.get_strategy().extended.reducer_beside.reduce(request, step)

    def _described(self) -> str:
        """Describes the fragment for warnings, as "fragment 2 of 4 (3 weights, 12 kB)"; "" if it is the only one."""
        if self._fragments == 1:
            return ""
        weights = counted(len(self.weights), "weight")
        of_all = size(sum(each.shape.num_elements() * each.dtype.size for each in self._own(0)))
        return f"fragment {self.fragment + 1} of {self._fragments} ({weights}, {of_all})"

    def _apply_outer(self, step: Step, averages: Sequence[tf.Tensor]) -> None:
        """Sets the weights to those of the last synchronization, and lets the outer optimizer update them."""
        for own, start in zip(self._own(step.replica), self.starts[step.replica], strict=True):
            own.assign(start.read_value())
        before, step.applies_sums = step.applies_sums, True
        try:
            self.optimizer.apply(list(averages), self.weights)
        finally:
            step.applies_sums = before

    def _own(self, replica: int) -> list[tf.Variable]:
        return [each.value.values[replica] for each in self.weights]


def merged(own: tf.Tensor, outer: tf.Tensor) -> tf.Tensor:
    """Merges a replica's own value with the value for all replicas that has arrived."""
    return outer + tf.cast(_OWN_PART, own.dtype) * (own - outer)
