"""A tensor that takes assignments, in place of a variable, while an optimizer runs."""

import operator
from typing import Any

import tensorflow as tf


class AssignedTensor:
    """Has a tensor as its value, and the methods of a variable that optimizers call.

    Args:
      value: The value.
    """

    def __init__(self, value: tf.Tensor):
        self._value = value

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the value."""
        return self._value.shape

    @property
    def dtype(self) -> tf.DType:
        """Type of the value."""
        return self._value.dtype

    def read_value(self) -> tf.Tensor:
        """Returns the present value."""
        return self._value

    def value(self) -> tf.Tensor:
        """Returns the present value."""
        return self.read_value()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def assign(self, value: Any, **kwargs: Any) -> "AssignedTensor":
        """Sets the value."""
        del kwargs
        self._value = tf.ensure_shape(tf.cast(value, self.dtype), self.shape)
        return self

    def assign_add(self, value: Any, **kwargs: Any) -> "AssignedTensor":
        """Adds to the value."""
        return self.assign(self.read_value() + tf.cast(value, self.dtype), **kwargs)

    def assign_sub(self, value: Any, **kwargs: Any) -> "AssignedTensor":
        """Subtracts from the value."""
        return self.assign(self.read_value() - tf.cast(value, self.dtype), **kwargs)

    def scatter_add(self, slices: tf.IndexedSlices, **kwargs: Any) -> "AssignedTensor":
        """Adds rows to rows of the value."""
        return self.assign(
            tf.tensor_scatter_nd_add(self.read_value(), slices.indices[:, None], slices.values), **kwargs
        )

    def scatter_sub(self, slices: tf.IndexedSlices, **kwargs: Any) -> "AssignedTensor":
        """Subtracts rows from rows of the value."""
        return self.assign(
            tf.tensor_scatter_nd_sub(self.read_value(), slices.indices[:, None], slices.values), **kwargs
        )

    def scatter_update(self, slices: tf.IndexedSlices, **kwargs: Any) -> "AssignedTensor":
        """Replaces rows of the value."""
        return self.assign(
            tf.tensor_scatter_nd_update(self.read_value(), slices.indices[:, None], slices.values), **kwargs
        )

    def __neg__(self) -> tf.Tensor:
        return -self.read_value()

    def __abs__(self) -> tf.Tensor:
        return abs(self.read_value())

    def __getitem__(self, index: Any) -> tf.Tensor:
        return self.read_value()[index]


def _with_operator(name: str) -> None:
    function = getattr(operator, name)
    setattr(AssignedTensor, f"__{name}__", lambda self, other: function(self.read_value(), other))
    setattr(AssignedTensor, f"__r{name}__", lambda self, other: function(other, self.read_value()))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _with_operator(_name)
