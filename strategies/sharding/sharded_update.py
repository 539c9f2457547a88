"""One update of an optimizer whose state is sharded: each replica updates its part of the weights."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.part_clipping import clipped
from tfdist.strategies.sharding.part_tensors import part_of
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.sharded_state import ShardedState
from tfdist.strategies.sharding.weight_part import WeightPart


def partitions_of(optimizer: Any, variables: Sequence[Any]) -> list[Partition | None]:
    """Returns how an optimizer's state for each of these variables is divided; `None` if it is not."""
    states = [each.value for each in optimizer.variables if isinstance(each.value, ShardedState)]
    known = {id(state.weight): state.partition for state in states}
    return [known.get(id(tensorflow_variable(variable))) for variable in variables]


def tensorflow_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


class ShardedUpdate:
    """Replaces weights by their parts while an optimizer runs on a replica, and puts the new parts together.

    Args:
      optimizer: The optimizer, with state for any variables that is sharded.
      variables: The variables to update, in the order of the gradients.
      step: The step of the replica.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], step: Any):
        self._optimizer, self._step = optimizer, step
        self.partitions = partitions_of(optimizer, variables)
        shard = self._extended.parts.shard_of(step.replica)
        self._parts = {
            id(whole): WeightPart(whole, partition, shard)
            for variable, partition in zip(variables, self.partitions, strict=True)
            if partition is not None and (whole := tensorflow_variable(variable)) is not None
        }

    @property
    def _extended(self) -> Any:
        return tf.distribute.get_strategy().extended

    def clipped(self, sums: list[Any]) -> list[Any]:
        """Clips summed gradients, of which some are parts, as the optimizer would clip whole gradients."""

        def sum_over_shards(values: tf.Tensor) -> tf.Tensor:
            return self._step.all_reduce(tf.distribute.ReduceOp.SUM, values)

        return clipped(self._optimizer, sums, [each is not None for each in self.partitions], sum_over_shards)

    def in_parts(self, variables: Sequence[Any]) -> list[Any]:
        """Returns `variables`, with the parts of this replica in place of those that are divided."""
        return [self._parts.get(id(tensorflow_variable(each)), each) for each in variables]

    def store(self) -> None:
        """Gathers the parts of all replicas and assigns them to the variables."""
        parts = list(self._parts.values())
        wholes = gathered([part.read_value() for part in parts], [part.partition for part in parts], self._step)
        for part, whole in zip(parts, wholes, strict=True):
            part.whole.assign(whole)


def gathered(parts: Sequence[tf.Tensor], partitions: Sequence[Partition], step: Any) -> list[tf.Tensor]:
    """Gathers tensors of which each replica has its part: part shapes -> shapes of the partitions."""
    return tf.distribute.get_strategy().extended.reducer.gather_parts(parts, partitions, step) if parts else []


def update_averages(optimizer: Any, averages: Sequence[Any], variables: Sequence[Any], step: Any) -> None:
    """Updates the moving averages of weights, each replica its parts, as Keras' optimizers do."""
    shard = tf.distribute.get_strategy().extended.parts.shard_of(step.replica)
    ops = keras.ops
    for variable, average in zip(variables, averages, strict=True):
        if average is None:
            continue
        state, weight = average.value, tensorflow_variable(variable)
        if isinstance(state, ShardedState):
            weight = part_of(state.partition, weight, shard)
        momentum = ops.multiply(ops.cast(ops.not_equal(optimizer.iterations, 0), weight.dtype), optimizer.ema_momentum)
        state.assign(
            ops.add(ops.multiply(momentum, state), ops.multiply(ops.subtract(1, momentum), weight)), read_value=False
        )


def assign_averages(averages: Sequence[Any], variables: Sequence[Any], step: Any) -> None:
    """Assigns the moving averages of weights to the weights; gathers those that are sharded."""
    pairs = [(each.value, weight) for each, weight in zip(averages, variables, strict=True) if each is not None]
    sharded = [state for state, _ in pairs if isinstance(state, ShardedState)]
    wholes = iter(gathered([tf.convert_to_tensor(each) for each in sharded], [e.partition for e in sharded], step))
    for state, weight in pairs:
        tensorflow_variable(weight).assign(next(wholes) if isinstance(state, ShardedState) else state)
