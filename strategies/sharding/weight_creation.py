"""Makes weights in parts: recognizes them when a layer creates them, and creates a part on each replica."""

import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals, keras_stack
from tfdist.strategies.sharding.part_tensors import own_part_of
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.sharded_state import options_of_parts
from tfdist.strategies.sharding.sharded_weight import ShardedWeight

# Smaller weights, such as biases, stay whole on each replica. Together they take little memory, and an exchange for
# each of them would take more time than its bytes.
FEWEST_ELEMENTS = 4096


def partition_of_weight(kwargs: Mapping[str, Any], shards: int) -> Partition | None:
    """Returns how to divide a variable about to be made, if it is a large weight of a layer; else `None`."""
    made, late = keras_stack.variable_being_made(), keras_stack.variable_made_late()
    maker = None if late is not None else next(iter(keras_internals.open_scopes()), None)
    is_of_layer = late is not None or isinstance(maker, keras.layers.Layer)
    is_plain = kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE) and kwargs.get("colocate_with") is None
    if made is None or not is_of_layer or not is_plain or kwargs.get("trainable") is False:
        return None
    if not tf.as_dtype(made.dtype).is_floating or isinstance(maker, keras.layers.RNN):
        return None
    shape = _shape_of(made, kwargs)
    if shape is None or math.prod(shape) < max(FEWEST_ELEMENTS, shards) or _is_overwritten(made, maker, shape):
        return None
    return Partition.of(shape, shards)


def make_sharded_weight(next_creator: Any, kwargs: Mapping[str, Any], partition: Partition, extended: Any) -> Any:
    """Makes a weight, a part on each replica of this worker.

    The whole initial value exists for a moment, on all workers: the chief makes it, as for whole weights.
    """
    own, made = options_of_parts(kwargs), keras_stack.variable_being_made()
    with tf.init_scope():
        whole = extended.initial_value_of(kwargs)

        def make(replica: int, device: str) -> tf.Variable:
            name = f"{kwargs.get('name')}/replica_{replica}/" if replica else kwargs.get("name")
            part = own_part_of(partition, whole, extended.parts.shard_of(replica))
            with tf.device(device):
                return next_creator(**{**own, "initial_value": part, "name": name})

        values = [make(*each) for each in enumerate(extended.worker_devices)]
    return ShardedWeight.of_parts(values, extended._container_strategy(), partition, "" if made is None else made.path)


def _is_overwritten(made: keras.Variable, maker: Any, shape: tuple[int, ...]) -> bool:
    """Whether each step overwrites a weight: a float8 layer keeps the largest numbers of past steps, for its scales.

    Keras sets `overwrite_with_gradient` after it has made the variable. If it makes the value at once, the shape tells.
    """
    history = getattr(getattr(maker, "dtype_policy", None), "amax_history_length", None)
    return getattr(made, "overwrite_with_gradient", False) or shape == (history,)


def _shape_of(made: keras.Variable, kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    shape = getattr(kwargs.get("initial_value"), "shape", None) if made.shape.rank is None else made.shape
    return None if shape is None else tuple(shape)
