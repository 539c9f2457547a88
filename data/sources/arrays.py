"""Source of examples that are rows of arrays, in memory or on disk."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import Source, digest, map_leaves


class ArraysSource(Source):
    """Examples that are rows of arrays: `x`, `(x, y)`, `{"image": x, "label": y}`, with any nesting.

    Reads rows with a gather operation, in parallel and without Python. Costs one copy of each NumPy array, on the CPU;
    graphs hold no other copy. Tensors on the CPU are not copied. The fingerprint depends on shapes and types, not on
    values.

    An `np.memmap` or an h5py dataset stays on disk. It costs no memory, but a call into Python for each batch.

    Args:
      arrays: NumPy arrays, tensors or objects that NumPy converts to arrays, in tuples and dicts.

    Raises:
      TypeError: If a leaf is no array of numbers or strings.
      ValueError: If there are no rows, or the numbers of rows differ between arrays.
    """

    def __init__(self, arrays: Any):
        self._columns = map_leaves(self._column, arrays, "arrays")
        self._length = _common_length(arrays, self._columns)
        self.element_spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), self._columns)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: tf.Tensor) -> Any:  # noqa: D102
        return tf.nest.map_structure(
            lambda x: x.read(indices) if isinstance(x, _OnDisk) else tf.gather(x, indices), self._columns
        )

    def describe(self, index: int) -> str:  # noqa: D102
        return f"row {index} of the arrays"

    def origin(self) -> str:  # noqa: D102
        return f"arrays of {self.element_spec}"

    def fingerprint(self) -> str:  # noqa: D102
        return digest("arrays", self._length, self.element_spec)

    def _column(self, name: str, array: Any) -> "tf.Tensor | _OnDisk":
        return _OnDisk(name, array, self.failure) if _is_on_disk(array) else _as_tensor(name, array)


class _OnDisk:
    """An array in a file on disk, from which a source reads rows without loading the whole.

    The array is an `np.memmap` or an h5py dataset. `failure` makes an error from the index of a row and the problem.
    """

    def __init__(self, name: str, array: Any, failure: Callable[[int, str], Exception]):
        self._name, self._array, self._failure = name, array, failure
        self.shape, self.dtype = tf.TensorShape(array.shape), _as_tensor(name, array[:1]).dtype

    def read(self, indices: tf.Tensor) -> tf.Tensor:
        rows = tf.numpy_function(self._read, [indices], self.dtype)
        rows.set_shape([indices.shape[0], *self.shape[1:]])
        return rows

    def _read(self, indices: np.ndarray) -> np.ndarray:
        try:
            if isinstance(self._array, np.ndarray):
                return np.asarray(self._array[indices], self.dtype.as_numpy_dtype)
            ascending, places = np.unique(indices, return_inverse=True)  # h5py needs ascending, unique indices.
            return np.asarray(self._array[ascending], self.dtype.as_numpy_dtype)[places]
        except Exception as error:
            problem = f"cannot be read from {self._name}: {type(error).__name__}: {error}."
            raise self._failure(indices[0], f"or one of {len(indices) - 1} with it {problem}") from error


def _is_on_disk(array: Any) -> bool:
    """Whether an array is a file on disk, which a conversion to a tensor would read into memory as a whole."""
    if isinstance(array, np.memmap):
        return bool(array.ndim) and array.filename is not None  # An array computed from a memmap has no file.
    h5py = sys.modules.get("h5py")  # If h5py is not loaded, the array cannot be one of its datasets.
    return h5py is not None and isinstance(array, h5py.Dataset) and bool(array.ndim)


def _as_tensor(name: str, array: Any) -> tf.Tensor:
    dense = "to_tensor" if isinstance(array, tf.RaggedTensor | tf.SparseTensor) else "toarray"
    if hasattr(array, dense):  # `toarray` is SciPy's method.
        raise TypeError(
            f"Rows must be in dense arrays, but {name} is a {type(array).__name__}. Give {name}.{dense}(), or an "
            "object with __len__ and __getitem__ that gives one example at a time."
        )
    if array is None:
        raise TypeError(f"Rows must be in arrays of numbers or strings, but {name} is None. Leave it out.")
    if np.ma.is_masked(array):
        raise TypeError(
            f"Rows must be complete, but some elements of {name} are masked, and tensors have no masks. Give "
            f"{name}.filled(...), or the mask as another array beside it."
        )
    try:
        with tf.device("CPU:0"):
            if tf.is_tensor(array):
                return tf.identity(array)
            return tf.convert_to_tensor(np.asarray(array))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Rows must be in arrays of numbers or strings, but {name} is a {type(array).__name__} that TensorFlow "
            f"cannot convert to a tensor: {error}"
        ) from error


def _common_length(arrays: Any, columns: Any) -> int:
    lengths: dict[str, int] = {}

    def note(name: str, column: Any) -> None:
        if not column.shape.rank:
            raise ValueError(f"Arrays must hold one example per row, but {name} is a single value, {column.numpy()!r}.")
        lengths[name] = column.shape[0]

    map_leaves(note, columns, "arrays")
    if not lengths:
        raise ValueError(f"A source needs at least one array, got {arrays!r}.")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"Arrays need equally many rows, one for each example, but {counts}.")
    (length,) = set(lengths.values())
    if not length:
        raise ValueError(f"A source needs at least one example, but {' and '.join(lengths)} have no rows.")
    return length
