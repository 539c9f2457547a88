"""Makes the state of optimizers in parts: recognizes it when Keras creates it, and creates a part on each replica."""

import weakref
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals
from tfdist.strategies.sharding.elementwise import is_elementwise
from tfdist.strategies.sharding.part_reducer import PartReducer
from tfdist.strategies.sharding.part_tensors import part_of
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.sharded_state import ShardedState

_MODES = (None, "optimizer")
# Keras' name for gradients that no replica has exchanged yet, so each replica has others.
_ACCUMULATOR = "gradient_accumulator"
# The weights with sharded state, by their `id`.
_weights: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_warned: set[str] = set()


def check_model_sharding(model_sharding: Any) -> None:
    """Raises a ValueError if `model_sharding`, an argument of a strategy, has no meaning."""
    if model_sharding not in _MODES:
        raise ValueError(f"`model_sharding` must be one of {', '.join(map(repr, _MODES))}, got {model_sharding!r}.")


def is_state_to_shard(strategy: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a variable that is about to be made is an optimizer's state for one weight, which can be sharded.

    Keras places such a state with its weight, by the public `colocate_vars_with` of a strategy, so the arguments of the
    creation name the weight. Values that an optimizer keeps for itself, such as counters, are placed with no weight.
    """
    weight, maker = kwargs.get("colocate_with"), next(iter(keras_internals.open_scopes()), None)
    if not isinstance(weight, tf.Variable) or getattr(weight, "distribute_strategy", None) is not strategy:
        return False
    if not isinstance(maker, keras.optimizers.Optimizer) or not weight.dtype.is_floating:
        return False
    if str(kwargs.get("name")).endswith(_ACCUMULATOR):
        return False
    if not is_elementwise(maker):
        _warn_of_whole_state(type(maker).__name__)
        return False
    return True


def make_sharded_state(next_creator: Any, kwargs: Mapping[str, Any], parts: PartReducer) -> ShardedState:
    """Makes the state of an optimizer for one weight, a part on each replica of this worker.

    The whole initial value exists for a moment on each device.
    """
    weight, initial = kwargs["colocate_with"], kwargs["initial_value"]
    partition = Partition.of(tuple(weight.shape), parts.shards)
    own = {key: value for key, value in kwargs.items() if key not in ("colocate_with", "caching_device")}

    def make(replica: int, device: str) -> tf.Variable:
        def initial_part() -> tf.Tensor:
            value = initial() if callable(initial) else initial
            return part_of(partition, value, parts.shard_of(replica))

        name = f"{kwargs.get('name')}/replica_{replica}/" if replica else kwargs.get("name")
        with tf.device(device):
            return next_creator(**{**own, "initial_value": initial_part, "name": name})

    values = [make(*each) for each in enumerate(weight.distribute_strategy.extended.worker_devices)]
    _weights[id(weight)] = weight
    return ShardedState.make(values, weight, partition, tf.VariableAggregation.NONE)


def check_is_updated_in_parts(variable: Any) -> None:
    """Refuses that an optimizer without a view updates a whole weight whose state is sharded."""
    maker = next(iter(keras_internals.open_scopes()), None)
    if tf.distribute.get_replica_context() is None or not isinstance(maker, keras.optimizers.Optimizer):
        return
    if _weights.get(id(variable)) is variable:
        raise ValueError(
            f"With model_sharding='optimizer' each replica updates its part of {variable.name!r}, but `apply` of "
            f"{maker.name!r} updates all of it. Call `apply` on `strategy.distributed_optimizer(optimizer)` instead."
        )


def _warn_of_whole_state(kind: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logging.warning(
            "model_sharding='optimizer' does nothing for %s, whose update is not known to work element by element. Use "
            "Adam, AdamW, SGD or another such optimizer; or set `updates_elementwise = True` in its class if each "
            "element of a weight is updated by itself.",
            kind,
        )
