"""Tensors of received bytes: empty ones to receive into, and their conversion to the tensors that peers have sent."""

import functools
from typing import Any

import tensorflow as tf

_WORD_BYTES = 4  # Received bytes are rows of this length if they fill them, as most types need.
_MOST_ROWS = (1 << 31) - 1  # Largest dimension of a tensor that TensorFlow makes without filling it.


def empty(size: int) -> Any:
    """Returns a tensor of `size` bytes of any value, for received bytes."""
    shape = _shape_of_bytes(size)
    if max(shape) > _MOST_ROWS:  # Only of types of one or two bytes.
        return tf.fill(tf.constant(shape, tf.int64), tf.zeros([], tf.uint8))
    return tf.raw_ops.Empty(shape=_shape(size), dtype=tf.uint8)


@functools.lru_cache(maxsize=1024)
def _shape(size):
    return tf.constant(_shape_of_bytes(size), tf.int32)


def shape_of_elements(elements: int | None, element_bytes: int) -> list[int | None] | list[int] | None:
    """Returns the shape of the received bytes of some elements; of unknown ones if `elements` is `None`."""
    if elements is None:
        return None if element_bytes % _WORD_BYTES else [None, _WORD_BYTES]
    return _shape_of_bytes(elements * element_bytes)


def _shape_of_bytes(size: int) -> list[int]:
    return [size] if size % _WORD_BYTES else [size // _WORD_BYTES, _WORD_BYTES]


def like(received: tf.Tensor, own: tf.Tensor, times: int = 1) -> tf.Tensor:
    """Converts received bytes to a tensor like `own`, of `times` as many rows, without a copy."""
    dtype, shape = own.dtype, own.shape
    if dtype.size != _WORD_BYTES:
        received = tf.reshape(received, [-1, dtype.size] if dtype.size > 1 else [-1])
    values = tf.bitcast(received, dtype)
    if shape.is_fully_defined():
        whole = shape if times == 1 else [times * shape[0], *shape[1:]]
        return values if values.shape == whole else tf.reshape(values, whole)
    sizes = tf.shape(own) if times == 1 else tf.shape(own) * tf.constant([times, *[1] * (shape.rank - 1)])
    rows = None if shape[0] is None else times * shape[0]
    return tf.ensure_shape(tf.reshape(values, sizes), [rows, *shape[1:]])
