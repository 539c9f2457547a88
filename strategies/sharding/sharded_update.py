"""One update of an optimizer whose state is sharded: each replica updates its part of the weights."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.strategies.sharding.elementwise import is_elementwise
from tfdist.strategies.sharding.ownership import Ownership
from tfdist.strategies.sharding.part_clipping import clipped
from tfdist.strategies.sharding.part_tensors import Division, part_of
from tfdist.strategies.sharding.sharded_state import ShardedState, is_accumulator
from tfdist.strategies.sharding.sharded_weight import ShardedWeight, is_sharded_weight
from tfdist.strategies.sharding.table_update import table_of
from tfdist.strategies.sharding.weight_part import WeightPart, tensorflow_variable


def partitions_of(optimizer: Any, variables: Sequence[Any]) -> list[Division | None]:
    """Returns how an optimizer's state for each of these variables is divided; `None` if it is not."""
    states = [each.value for each in optimizer.variables if isinstance(each.value, ShardedState)]
    is_known = is_elementwise(optimizer)
    known = {id(e.weight): e.partition for e in states if is_known or isinstance(e.partition, Ownership)}
    weights = [tensorflow_variable(each) for each in variables]
    known |= {id(weight): weight.partition for weight in weights if isinstance(weight, ShardedWeight)}
    return [None if table_of(weight) else known.get(id(weight)) for weight in weights]


def updates_parts(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether an optimizer updates a part only of any of these variables on each replica."""
    return any(map(table_of, variables)) or any(partitions_of(optimizer, variables))


class ShardedUpdate:
    """Replaces weights by their parts while an optimizer runs on a replica, and puts the new parts together.

    Args:
      optimizer: The optimizer, with state for any variables that is sharded.
      variables: The variables to update, in the order of the gradients.
      step: The step of the replica.

    Attributes:
      partitions: How each variable is divided; `None` if it is not.
      assigned: Optimizer state that every replica has, and that the update has assigned.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], step: Any):
        self._optimizer, self._step = optimizer, step
        self.assigned: list[Any] = []
        self.partitions = partitions_of(optimizer, variables)
        check_updates_parts(optimizer, variables)
        self._shard = shard = tf.distribute.get_strategy().extended.parts.shard_of(step.replica)
        self._parts = {
            id(tensorflow_variable(variable)): WeightPart(variable, partition, shard)
            for variable, partition in zip(variables, self.partitions, strict=True)
            if partition is not None
        }
        tables = [table for table in map(table_of, variables) if table is not None]
        self._tables = {id(table): table.values[step.replica] for table in tables}
        self._divided = [
            partition is not None or table_of(variable) is not None
            for variable, partition in zip(variables, self.partitions, strict=True)
        ]

    def clipped(self, sums: list[Any]) -> list[Any]:
        """Clips summed gradients, of which some are parts, as the optimizer would clip whole gradients."""

        def sum_over_shards(values: tf.Tensor) -> tf.Tensor:
            return self._step.all_reduce(tf.distribute.ReduceOp.SUM, values)

        return clipped(self._optimizer, sums, self._divided, sum_over_shards)

    def in_parts(self, variables: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Returns what this replica updates of `variables`: their indices, and parts for those that are divided."""
        known = {**self._parts, **self._tables}
        parts = [known.get(id(tensorflow_variable(each)), each) for each in variables]
        places = [i for i, part in enumerate(parts) if not (isinstance(part, WeightPart) and part.is_empty)]
        return places, [parts[i] for i in places]

    def store(self) -> None:
        """Gathers the parts of all replicas and assigns them to the variables.

        State of an owned weight that is not sharded itself travels along, since only the owner has updated it.

        Raises:
          ValueError: If an update of whole weights has assigned state of which the weight is not known.
        """
        parts = [part for part in self._parts.values() if not is_sharded_weight(part.whole)]
        for part in self._parts.values():
            if is_sharded_weight(part.whole):
                part.whole.note_assigned()
                part.whole.own_part.assign(part.read_value(), read_value=False)
        beside = self._states_beside(parts)
        if any(isinstance(part.partition, Ownership) for part in parts):
            self._check_assigned([state for state, _ in beside])
        own = [part.read_value() for part in parts]
        own += [part_of(owned, state, self._shard) for state, owned in beside]
        divisions = [part.partition for part in parts] + [owned for _, owned in beside]
        targets = [part.whole for part in parts] + [state for state, _ in beside]
        for target, whole in zip(targets, gathered(own, divisions, self._step), strict=True):
            target.assign(whole)

    def _check_assigned(self, known: Sequence[Any]) -> None:
        unknown = [state.name for state in self.assigned if not any(state is each for each in known)]
        if unknown:
            raise ValueError(
                f"With model_sharding='optimizer' one replica updates each weight of {self._optimizer.name!r}, "
                f"which assigns {', '.join(map(repr, unknown))}, but it is not known for which weight. Make it by "
                "`add_variable_from_reference`, or keep it in a list in the order of the weights."
            )

    def _states_beside(self, parts: Sequence[WeightPart]) -> list[tuple[Any, Ownership]]:
        """Returns the states of owned weights that every replica has, such as Adafactor's rows, with their owners."""
        found = []
        for part in parts:
            if isinstance(part.partition, Ownership):
                for state in keras_internals.states_of_weight(self._optimizer, part.whole):
                    if not isinstance(state.value, ShardedState) and not is_accumulator(state):
                        owned = dataclasses.replace(part.partition, shape=tuple(state.shape))
                        found.append((state.value, owned))
        return found


def check_updates_parts(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses an optimizer that needs whole weights, if any of these variables is divided."""
    weight = next((each for each in variables if is_sharded_weight(each)), None)
    if weight is not None and not is_elementwise(optimizer):
        raise ValueError(
            f"With model_sharding='parameters' each replica has a part of {tensorflow_variable(weight).name!r}, but "
            f"optimizer {optimizer.name!r} updates whole weights. Use an optimizer that updates each element by "
            "itself, such as AdamW, or model_sharding='optimizer'. If this one does, set `updates_elementwise = True` "
            "in its class."
        )


def gathered(parts: Sequence[tf.Tensor], partitions: Sequence[Division], step: Any) -> list[tf.Tensor]:
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
        if isinstance(weight, ShardedWeight):
            weight = weight.own_part
        elif table_of(variable):
            weight = weight.values[step.replica]
        elif isinstance(state, ShardedState):
            weight = part_of(state.partition, weight, shard)
        momentum = ops.multiply(ops.cast(ops.not_equal(optimizer.iterations, 0), weight.dtype), optimizer.ema_momentum)
        state.assign(
            ops.add(ops.multiply(momentum, state), ops.multiply(ops.subtract(1, momentum), weight)), read_value=False
        )


def assign_averages(averages: Sequence[Any], variables: Sequence[Any], step: Any) -> None:
    """Assigns the moving averages of weights to the weights; gathers those that are sharded."""
    pairs = [(each.value, weight) for each, weight in zip(averages, variables, strict=True) if each is not None]
    for state, weight in pairs:
        if is_sharded_weight(weight):
            tensorflow_variable(weight).note_assigned()
            tensorflow_variable(weight).own_part.assign(state)
    pairs = [(state, weight) for state, weight in pairs if not is_sharded_weight(weight)]
    for state, table in ((state, table_of(weight)) for state, weight in pairs):
        if table is not None:
            table.values[step.replica].assign(state)
    pairs = [(state, weight) for state, weight in pairs if table_of(weight) is None]
    sharded = [state for state, _ in pairs if isinstance(state, ShardedState)]
    wholes = iter(gathered([tf.convert_to_tensor(each) for each in sharded], [e.partition for e in sharded], step))
    for state, weight in pairs:
        tensorflow_variable(weight).assign(next(wholes) if isinstance(state, ShardedState) else state)
