"""Examples that are rows of arrays in memory."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import Source, digest, map_leaves


class ArraysSource(Source):
    """Rows of arrays with equal first dimensions: `x`, `(x, y)`, `{"image": x, "label": y}`, nested at will.

    Reading is a gather, in parallel and without Python. Costs one copy of each NumPy array, on the CPU, of which no
    graph holds another one; tensors on the CPU are taken as they are. The fingerprint looks at shapes and types alone,
    not at the values.

    Args:
      arrays: NumPy arrays, tensors or what NumPy makes arrays of, in tuples and dicts.

    Raises:
      TypeError: If a leaf is no array of numbers or strings.
      ValueError: If there are no rows, or not equally many in all arrays.
    """

    def __init__(self, arrays: Any):
        self._tensors = map_leaves(_as_tensor, arrays, "arrays")
        self._length = _common_length(arrays, self._tensors)
        self.element_spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), self._tensors)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: tf.Tensor) -> Any:  # noqa: D102
        return tf.nest.map_structure(lambda x: tf.gather(x, indices), self._tensors)

    def describe(self, index: int) -> str:  # noqa: D102
        return f"row {index} of arrays in memory"

    def fingerprint(self) -> str:  # noqa: D102
        return digest("arrays", self._length, self.element_spec)


def _as_tensor(name: str, array: Any) -> tf.Tensor:
    if isinstance(array, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            f"Rows are read from dense arrays, but {name} is a {type(array).__name__}. Give {name}.to_tensor(), or an "
            "object with __len__ and __getitem__ that gives one example at a time."
        )
    try:
        with tf.device("CPU:0"):
            if tf.is_tensor(array):
                return tf.identity(array)
            return tf.convert_to_tensor(np.asarray(array))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Rows are read from arrays of numbers or strings, but {name} is a {type(array).__name__} that TensorFlow "
            f"makes no tensor of: {error}"
        ) from error


def _common_length(arrays: Any, tensors: Any) -> int:
    lengths: dict[str, int] = {}

    def note(name: str, tensor: tf.Tensor) -> None:
        if not tensor.shape.rank:
            raise ValueError(f"Each array holds one example a row, but {name} is a single value, {tensor.numpy()!r}.")
        lengths[name] = tensor.shape[0]

    map_leaves(note, tensors, "arrays")
    if not lengths:
        raise ValueError(f"A source needs at least one array, got {arrays!r}.")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"Arrays need equally many rows, one for each example, but {counts}.")
    (length,) = set(lengths.values())
    if not length:
        raise ValueError(f"A source needs at least one example, but {' and '.join(lengths)} have no rows.")
    return length
