"""The part of a weight that a replica updates, in place of the whole variable, while its optimizer runs."""

import operator
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.ownership import Ownership
from tfdist.strategies.sharding.part_tensors import Division, part_of
from tfdist.strategies.sharding.sharded_weight import ShardedWeight


def tensorflow_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


class WeightPart:
    """Stands for a variable of a model in an optimizer's update, with the shape and the values of one part.

    An assignment changes this object, not the variable. The new parts of all replicas are put together afterwards.

    Args:
      variable: The variable, of Keras or TensorFlow.
      partition: How it is divided.
      shard: The number of the part.

    Attributes:
      partition: As given.
      whole: The distributed variable of TensorFlow.
      path: Its path, by which some optimizers choose an update.
      is_empty: Whether another shard owns the whole weight.
    """

    def __init__(self, variable: Any, partition: Division, shard: int):
        self.whole, self.partition = tensorflow_variable(variable), partition
        self.path = getattr(variable, "path", self.whole.name)
        is_own = isinstance(self.whole, ShardedWeight)
        self._value = self.whole.own_part.read_value() if is_own else part_of(partition, self.whole, shard)
        self.is_empty = isinstance(partition, Ownership) and partition.owner != shard

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the part."""
        return self._value.shape

    @property
    def dtype(self) -> tf.DType:
        """Type of the weight."""
        return self._value.dtype

    def read_value(self) -> tf.Tensor:
        """Returns the present value of the part."""
        return self._value

    value = read_value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype, name=name)

    def assign(self, value: Any, **kwargs: Any) -> "WeightPart":
        """Sets the value of the part."""
        del kwargs
        self._value = tf.ensure_shape(tf.cast(value, self.dtype), self.shape)
        return self

    def assign_add(self, value: Any, **kwargs: Any) -> "WeightPart":
        """Adds to the value of the part."""
        return self.assign(self._value + tf.cast(value, self.dtype), **kwargs)

    def assign_sub(self, value: Any, **kwargs: Any) -> "WeightPart":
        """Subtracts from the value of the part."""
        return self.assign(self._value - tf.cast(value, self.dtype), **kwargs)

    def scatter_add(self, slices: tf.IndexedSlices, **kwargs: Any) -> "WeightPart":
        """Adds rows to rows of the part."""
        return self.assign(tf.tensor_scatter_nd_add(self._value, slices.indices[:, None], slices.values), **kwargs)

    def scatter_sub(self, slices: tf.IndexedSlices, **kwargs: Any) -> "WeightPart":
        """Subtracts rows from rows of the part."""
        return self.assign(tf.tensor_scatter_nd_sub(self._value, slices.indices[:, None], slices.values), **kwargs)

    def scatter_update(self, slices: tf.IndexedSlices, **kwargs: Any) -> "WeightPart":
        """Replaces rows of the part."""
        return self.assign(tf.tensor_scatter_nd_update(self._value, slices.indices[:, None], slices.values), **kwargs)

    def __neg__(self) -> tf.Tensor:
        return -self._value

    def __abs__(self) -> tf.Tensor:
        return abs(self._value)

    def __getitem__(self, index: Any) -> tf.Tensor:
        return self._value[index]

    def __getattr__(self, name: str) -> Any:
        # The names, the device and the identity are those of the variable.
        return getattr(object.__getattribute__(self, "whole"), name)


def _with_operator(name: str) -> None:
    function = getattr(operator, name)
    setattr(WeightPart, f"__{name}__", lambda self, other: function(self.read_value(), other))
    setattr(WeightPart, f"__r{name}__", lambda self, other: function(other, self.read_value()))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _with_operator(_name)
