"""Moving averages of weights (`use_ema`) with sharded state: each replica keeps and updates its part of them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.part_tensors import part_of
from tfdist.strategies.sharding.sharded_state import ShardedState
from tfdist.strategies.sharding.sharded_update import gathered
from tfdist.strategies.sharding.sharded_weight import ShardedWeight, is_sharded_weight
from tfdist.strategies.sharding.table_update import table_of
from tfdist.strategies.sharding.weight_part import tensorflow_variable


def are_sharded(averages: Sequence[Any]) -> bool:
    """Whether any of an optimizer's moving averages is sharded."""
    return any(each is not None and isinstance(each.value, ShardedState) for each in averages)


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
