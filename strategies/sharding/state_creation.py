"""Makes variables in parts, such as the state of optimizers: recognizes them when Keras creates them."""

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals, keras_stack
from tfdist.strategies.sharding.elementwise import is_factored, takes_parts
from tfdist.strategies.sharding.ownership import Ownership, owners
from tfdist.strategies.sharding.part_tensors import Division, own_part_of
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.sharded_state import ACCUMULATOR, AVERAGE, ShardedState, options_of_parts
from tfdist.strategies.sharding.sharded_table import ShardedTable
from tfdist.strategies.sharding.sharded_update import check_updates_parts
from tfdist.strategies.sharding.sharded_weight import ShardedWeight
from tfdist.strategies.sharding.table_initializer import TableInitializer, initial_state
from tfdist.strategies.sharding.table_update import check_can_update_tables
from tfdist.strategies.sharding.weight_creation import make_sharded_weight, partition_of_weight
from tfdist.strategies.sharding.weight_part import tensorflow_variable
from tfdist.strategies.step import current_step

_MODES = (None, "optimizer", "parameters")
# The weights with sharded state, by their `id`.
_weights: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_warned: set[str] = set()


def check_model_sharding(model_sharding: Any) -> None:
    """Raises a ValueError if `model_sharding`, an argument of a strategy, has no meaning."""
    if model_sharding not in _MODES:
        raise ValueError(f"`model_sharding` must be one of {', '.join(map(repr, _MODES))}, got {model_sharding!r}.")


def make_in_parts(next_creator: Any, kwargs: Mapping[str, Any], extended: Any) -> ShardedState | None:
    """Makes a variable of which each replica has a part, if it is to be divided; else returns `None`.

    These are tables of `ShardedEmbedding` and their optimizer state; with `model_sharding` the optimizer state of all
    weights, and large weights.
    """
    initializer, weight = keras_stack.initializer_in_use(), kwargs.get("colocate_with")
    variable = keras_stack.variable_being_made()
    if variable is not None and isinstance(initializer, TableInitializer):
        return ShardedTable.make_table(next_creator, kwargs, variable, initializer)
    if extended.model_sharding is not None or isinstance(weight, ShardedTable):
        strategy = tf.distribute.get_strategy()
        division = division_of_state(strategy, kwargs, extended.parts.shards)
        if division is not None:
            return make_sharded_state(strategy, next_creator, kwargs, division, extended.parts_of(division).shard_of)
    if extended.model_sharding == "parameters":
        partition = partition_of_weight(kwargs, extended.parts.shards)
        if partition is not None:
            return make_sharded_weight(next_creator, kwargs, partition, extended)
    return None


def division_of_state(strategy: Any, kwargs: Mapping[str, Any], shards: int) -> Division | None:
    """Returns how to divide a variable about to be made, if it is an optimizer's state for one weight; else `None`.

    Keras places such a state with its weight, by the public `colocate_vars_with` of a strategy, so the arguments of the
    creation name the weight. Values that an optimizer keeps for itself, such as counters, are placed with no weight.
    """
    weight, maker = kwargs.get("colocate_with"), next(iter(keras_internals.open_scopes()), None)
    if weight is None:
        return _division_of_means(maker, kwargs, shards)
    if not isinstance(weight, tf.Variable) or getattr(weight, "distribute_strategy", None) is not strategy:
        return None
    if isinstance(weight, ShardedTable) and isinstance(maker, keras.optimizers.Optimizer):
        check_can_update_tables(maker, weight)
        return weight.partition
    name, shape = str(kwargs.get("name")), tuple(weight.shape)
    if not isinstance(maker, keras.optimizers.Optimizer) or not weight.dtype.is_floating:
        return None
    if isinstance(weight, ShardedWeight):
        check_updates_parts(maker, [weight])
        return weight.partition
    if name.endswith(ACCUMULATOR):
        return None
    if takes_parts(maker) or is_factored(maker) or name.endswith(f"_{AVERAGE}"):
        return Partition.of(shape, shards)
    trained = [tensorflow_variable(each) for each in keras_internals.trained_variables(maker)]
    place = next((i for i, each in enumerate(trained) if each is weight), None)
    if place is None:
        _warn_of_whole_state(type(maker).__name__)
        return None
    return Ownership(shape, shards, owners([math.prod(each.shape) for each in trained], shards)[place])


def _division_of_means(maker: Any, kwargs: Mapping[str, Any], shards: int) -> Division | None:
    """Returns how to divide Adafactor's means of rows or columns, which Keras does not place with a weight."""
    if not isinstance(maker, keras.optimizers.Optimizer) or not is_factored(maker):
        return None
    initial = kwargs["initial_value"]
    value = tf.convert_to_tensor(initial() if callable(initial) else initial)
    return Partition.of(value.shape, shards) if value.shape.rank and value.dtype.is_floating else None


def make_sharded_state(
    strategy: Any,
    next_creator: Any,
    kwargs: Mapping[str, Any],
    partition: Division,
    shard_of: Callable[[int], int],
) -> ShardedState:
    """Makes the state of an optimizer for one weight, a part on each replica of this worker.

    The whole initial value exists for a moment on each device, except for tables.
    """
    weight, initial = kwargs.get("colocate_with"), kwargs["initial_value"]
    initializer = keras_stack.initializer_in_use()
    own = options_of_parts(kwargs)

    def make(replica: int, device: str) -> tf.Variable:
        def initial_part() -> tf.Tensor:
            if isinstance(weight, ShardedTable) and initializer is not None:
                return initial_state(initializer, partition.part_shape_of(shard_of(replica)), weight.dtype.name)
            value = initial() if callable(initial) else initial
            return own_part_of(partition, value, shard_of(replica))

        name = f"{kwargs.get('name')}/replica_{replica}/" if replica else kwargs.get("name")
        with tf.device(device):
            return next_creator(**{**own, "initial_value": initial_part, "name": name})

    values = [make(*each) for each in enumerate(strategy.extended.worker_devices)]
    if weight is not None:
        _weights[id(weight)] = weight
    return ShardedState.make(strategy, values, weight, partition)


def check_is_updated_in_parts(variable: Any) -> None:
    """Refuses that an optimizer without a view updates a whole weight whose state is sharded."""
    makers = [each for each in keras_internals.open_scopes()[:1] if isinstance(each, keras.optimizers.Optimizer)]
    step = current_step()
    if tf.distribute.get_replica_context() is None or not makers or (step and step.whole_states):
        return
    weight = variable if isinstance(variable, ShardedWeight) else _weights.get(id(variable))
    if weight is None or weight is not variable:
        return
    states = [each.value for each in makers[0].variables if isinstance(each.value, ShardedState)]
    # Another optimizer may have its state for the same weight.
    if isinstance(weight, ShardedWeight) or any(state.weight is weight for state in states):
        raise ValueError(
            f"With model_sharding each replica updates its part of {weight.name!r}, but `apply` of "
            f"{makers[0].name!r} updates all of it. Call `apply` on `strategy.distributed_optimizer(optimizer)` "
            "instead."
        )


def _warn_of_whole_state(kind: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logging.warning(
            "The state of %s is not divided: it is made before `build` of its parent class, when its weights are not "
            "known. Call `super().build(variables)` first.",
            kind,
        )
