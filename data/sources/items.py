"""Source of examples that are items of a Python object, such as a list."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import Source, digest, map_leaves
from tfdist.errors import SourceError


class ItemsSource(Source):
    """Items of an object with `__len__` and `__getitem__`, or `__getitems__(list of int)` if the object has it.

    Example 0 defines the structure of all examples: tuples and dicts of arrays, numbers and strings, each of one shape
    and type. Every later example is checked against it. Reading runs in Python, so in one thread at a time. Move work
    to `map_fn`, which runs in parallel, where possible.

    Args:
      items: The object.
      thread_safe: Whether several threads may call `items` at the same time. This helps if it waits for a disk or a
        network.

    Raises:
      TypeError: If a leaf of example 0 is no array, number or string.
      ValueError: If there are no examples.
      SourceError: If example 0 cannot be read.
    """

    def __init__(self, items: Any, *, thread_safe: bool = False):
        self._items = items
        self._lock = contextlib.nullcontext() if thread_safe else threading.Lock()
        self._length = len(items)
        if not self._length:
            raise ValueError(f"A source needs at least one example, but {type(items).__name__} has a length of 0.")
        self.element_spec = map_leaves(_spec, next(self._examples([0])), "example")

    def __len__(self) -> int:
        return self._length

    def read(self, indices: tf.Tensor) -> Any:  # noqa: D102
        specs = tf.nest.flatten(self.element_spec)
        columns = tf.numpy_function(self._read, [indices], [spec.dtype for spec in specs])
        for column, spec in zip(columns, specs, strict=True):
            column.set_shape([indices.shape[0], *spec.shape])
        return tf.nest.pack_sequence_as(self.element_spec, columns)

    def describe(self, index: int) -> str:  # noqa: D102
        return f"item {index} of {type(self._items).__name__}"

    def origin(self) -> str:  # noqa: D102
        return f"a {type(self._items).__name__}"

    def fingerprint(self) -> str:  # noqa: D102
        return digest("items", self._length, self.element_spec)

    def _read(self, indices: np.ndarray) -> list[np.ndarray]:
        """Returns the examples at `indices` as one array per leaf, in the order of `tf.nest.flatten`."""
        specs = tf.nest.flatten(self.element_spec)
        columns = [np.empty((len(indices), *spec.shape), spec.dtype.as_numpy_dtype) for spec in specs]
        numbers = indices.tolist()
        with self._lock:  # Until all are copied, since an object may return one buffer for all examples.
            for row, (index, example) in enumerate(zip(numbers, self._examples(numbers), strict=True)):
                try:
                    leaves = list(_leaves(self.element_spec, example, "example"))
                except (TypeError, ValueError) as error:
                    raise self.failure(
                        index, f"differs from example 0: {error} All examples need equal structure, shapes and types."
                    ) from None
                for column, leaf in zip(columns, leaves, strict=True):
                    column[row] = leaf[()]  # `[()]` turns a string array of rank 0 into a string.
        return columns

    def _examples(self, indices: list[int]) -> Iterator[Any]:
        if not indices:  # A replica without rows.
            return iter(())
        if len(self._items) != self._length:
            raise self.failure(
                indices[0],
                f"cannot be trusted: {type(self._items).__name__} had {self._length} examples when training "
                f"began and has {len(self._items)} now. Do not change it while it is read.",
            )
        if hasattr(self._items, "__getitems__"):
            return iter(self._get_together(indices))
        return map(self._get_one, indices)

    def _get_one(self, index: int) -> Any:
        try:
            return self._items[index]
        except Exception as error:
            raise self.failure(index, f"cannot be read: {type(error).__name__}: {error}.") from error

    def _get_together(self, indices: list[int]) -> list[Any]:
        try:
            examples = list(self._items.__getitems__(indices))
        except Exception as error:
            # Read the examples one by one to find the example that fails.
            raise next(self._failures(indices), None) or self.failure(
                indices[0], f"or one of {indices[1:]} cannot be read: {type(error).__name__}: {error}."
            ) from error
        if len(examples) != len(indices):
            raise self.failure(
                indices[0], f"and {len(indices) - 1} others were requested, but __getitems__ returned {len(examples)}."
            )
        return examples

    def _failures(self, indices: list[int]) -> Iterator[SourceError]:
        for index in indices:
            try:
                self._get_one(index)
            except SourceError as error:
                yield error


def _as_array(value: Any) -> np.ndarray:
    # By default NumPy drops zeros at the end of bytes.
    return np.array(value, object) if isinstance(value, bytes | str) else np.asarray(value)


def _spec(name: str, value: Any) -> tf.TensorSpec:
    try:
        array = _as_array(value)
        dtype = tf.as_dtype(array.dtype)
    except (TypeError, ValueError):  # For example a list of arrays of several shapes.
        dtype = None
    if dtype in (None, tf.variant, tf.resource) or (dtype == tf.string and not _are_strings(array)):
        raise TypeError(
            f"An example must consist of arrays, numbers and strings, in tuples and dicts, but {name} of example 0 is "
            f"a {type(value).__name__}, {str(value)[:60]}. A list counts as one array; put several values in a tuple."
        )
    return tf.TensorSpec(array.shape, dtype)


def _are_strings(array: np.ndarray) -> bool:
    return all(isinstance(value, bytes | str) for value in array.flat)


def _leaves(spec: Any, example: Any, name: str) -> Iterator[np.ndarray]:
    """Yields the arrays of `example` in the order of `tf.nest.flatten(spec)`. ValueError if they differ from `spec`."""
    if isinstance(spec, Mapping):
        if not isinstance(example, Mapping) or example.keys() != spec.keys():
            raise ValueError(f"{name} must be a dict with the keys {sorted(spec)}, but is {_shown(example)}.")
        for key in sorted(spec):
            yield from _leaves(spec[key], example[key], f"{name}[{key!r}]")
    elif isinstance(spec, tuple):
        if not isinstance(example, tuple) or len(example) != len(spec):
            raise ValueError(f"{name} must be a tuple of {len(spec)}, but is {_shown(example)}.")
        for i, part in enumerate(spec):
            yield from _leaves(part, example[i], f"{name}[{i}]")
    else:
        array = _as_array(example)
        of_type = tf.as_dtype(array.dtype) == spec.dtype and (spec.dtype != tf.string or _are_strings(array))
        if array.shape != tuple(spec.shape) or not of_type:
            kind = array.dtype if array.dtype != object else f"{_shown(example)} of objects"
            raise ValueError(
                f"{name} must be {spec.dtype.name} of shape {list(spec.shape)}, but is {kind} of shape "
                f"{list(array.shape)}."
            )
        yield array


def _shown(example: Any) -> str:
    if isinstance(example, Mapping):
        return f"a dict with the keys {sorted(map(str, example))}"
    if isinstance(example, tuple):
        return f"a tuple of {len(example)}"
    return f"a {type(example).__name__}"
