"""Optimizer state of which each replica keeps its own part, such as a part of Adam's momenta."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.sharding.part_tensors import Division, own_part_of
from tfdist.strategies.step import current_step

_VALUE_IN_CHECKPOINTS = "VARIABLE_VALUE"  # The name of a variable's value in files of `tf.train.Checkpoint`.
ACCUMULATOR, AVERAGE = "gradient_accumulator", "average"  # The ends of Keras' names for them.


def _stand_in_of(state: "ShardedState") -> Any:
    """Returns what takes the place of a replica's part in the update that runs now; `None` if nothing does."""
    step = current_step()
    if step is None:
        return None
    if step.whole_states is not None:
        return step.whole_states.of(state)
    return None if step.table_rows is None else step.table_rows.of(state)


def is_accumulator(variable: Any) -> bool:
    """Whether a variable of an optimizer holds gradients that no replica has exchanged yet, so each has others."""
    return ACCUMULATOR in str(variable.name)


def is_average(state: "ShardedState") -> bool:
    """Whether sharded state is the moving average of a weight.

    Adafactor's means of rows and columns have the name of their weight, which may end alike, but name no weight.
    """
    return state.weight is not None and str(state.name).split(":")[0].endswith(f"_{AVERAGE}")


def options_of_parts(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a variable about to be made that its parts share. Keras 3.16 also gives its shape."""
    whole = ("colocate_with", "caching_device", "shape")
    return {key: value for key, value in kwargs.items() if key not in whole}


class ShardedState(tf_internals.MirroredVariable):
    """State of an optimizer for one weight, divided among all replicas.

    On a replica it is a variable with the shape of a part: the optimizer reads and assigns the part of this replica.
    Elsewhere, as when a model is saved or loaded, it has the shape of the weight: a read gathers the parts of all
    replicas, which needs all workers, and an assignment gives each replica its part of the value.

    Attributes:
      weight: The variable of the model for which the optimizer keeps the state; `None` if Keras does not say.
      partition: How the state is divided.
    """

    weight: Any
    partition: Division

    @classmethod
    def make(cls, strategy: Any, values: Sequence[tf.Variable], weight: Any, partition: Division) -> "ShardedState":
        """Makes the state for `weight` of the parts `values` of this worker's replicas."""
        state = cls(strategy, values, tf.VariableAggregation.NONE)
        state.weight, state.partition = weight, partition
        return state

    def _get(self):
        # Outside of any strategy's scope TensorFlow has a replica context too.
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
            stand_in = _stand_in_of(self)
            return super()._get() if stand_in is None else stand_in.read_value()
        return self.distribute_strategy.extended.gathered(self)

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        stand_in = _stand_in_of(self)
        if stand_in is not None:
            return update_fn(stand_in, value, **kwargs)
        own, whole = self._get_on_device_or_primary(), self.partition.shape
        if own.shape != whole and getattr(value, "shape", None) == whole:  # As Keras resets accumulators to zeros.
            replica = tf_internals.get_current_replica_id_as_int()
            value = own_part_of(self.partition, value, self._shard_of(replica))
        return update_fn(own, value, **kwargs)

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        for replica, own in enumerate(self.values):
            with tf.device(own.device):
                update_fn(own, own_part_of(self.partition, value, self._shard_of(replica)), **kwargs)
        return self

    def _shard_of(self, replica: int) -> int:
        return self.distribute_strategy.extended.parts_of(self.partition).shard_of(replica)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE_IN_CHECKPOINTS: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors[_VALUE_IN_CHECKPOINTS])

    def value(self) -> tf.Tensor:
        """Returns the part of this replica in a step, else the whole value."""
        return self.read_value()

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __getattr__(self, name: str) -> Any:
        # TensorFlow would look the attribute up in the value, which would be gathered from all workers for that.
        if "_values" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.values[0], name)
