"""The part of a weight that a replica updates, in place of the whole variable, while its optimizer runs."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.assigned_tensor import AssignedTensor
from tfdist.strategies.sharding.ownership import Ownership
from tfdist.strategies.sharding.part_tensors import Division, part_of
from tfdist.strategies.sharding.sharded_weight import ShardedWeight


def tensorflow_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


class WeightPart(AssignedTensor):
    """Stands for a variable of a model in an optimizer's update, with the shape and the values of one part.

    An assignment changes this object, not the variable. The new parts of all replicas are put together afterwards.

    Args:
      variable: The variable, of Keras or TensorFlow.
      partition: How it is divided.
      shard: The number of the part.
      is_whole: Whether each replica updates the whole weight, though it has a part of its gradient and state only.

    Attributes:
      partition, is_whole: As given.
      whole: The distributed variable of TensorFlow.
      path: Its path, by which some optimizers choose an update.
      is_empty: Whether another shard owns the whole weight.
    """

    def __init__(self, variable: Any, partition: Division, shard: int, is_whole: bool = False):
        self.whole, self.partition, self.is_whole = tensorflow_variable(variable), partition, is_whole
        self.path, self._shard = getattr(variable, "path", self.whole.name), shard
        if isinstance(self.whole, ShardedWeight):
            value = self.whole.own_part.read_value()
        else:
            value = tf.convert_to_tensor(self.whole) if is_whole else part_of(partition, self.whole, shard)
        super().__init__(value)
        self.is_empty = isinstance(partition, Ownership) and partition.owner != shard

    def __getattr__(self, name: str) -> Any:
        # The names, the device and the identity are those of the variable.
        return getattr(object.__getattribute__(self, "whole"), name)


class MatrixPart(WeightPart):
    """The part of a divided weight, for an optimizer that computes the update of the whole weight.

    It has the shape of the whole weight, by which the optimizer chooses and scales the update, and the values of one
    part. An assignment takes a part, or a whole value, of which it takes the part.
    """

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole weight."""
        return tf.TensorShape(self.partition.shape)

    def assign(self, value: Any, **kwargs: Any) -> "MatrixPart":
        """Sets the value of the part."""
        del kwargs
        self._value = tf.ensure_shape(self._own(value), self._value.shape)
        return self

    def assign_add(self, value: Any, **kwargs: Any) -> "MatrixPart":
        """Adds to the value of the part."""
        return self.assign(self._value + self._own(value), **kwargs)

    def assign_sub(self, value: Any, **kwargs: Any) -> "MatrixPart":
        """Subtracts from the value of the part."""
        return self.assign(self._value - self._own(value), **kwargs)

    def _own(self, value: Any) -> tf.Tensor:
        value = tf.cast(value, self.dtype)
        return part_of(self.partition, value, self._shard) if value.shape == self.shape else value
