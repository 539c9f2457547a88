"""Counts the rows of a batch."""

from typing import Any

import keras
import tensorflow as tf


def has_any(rows: int | tf.Tensor | None) -> bool | tf.Tensor:
    """Whether a replica's batch has rows, by their number: True or bool []; True if the number is unknown."""
    return True if rows is None or (isinstance(rows, int) and rows > 0) else tf.convert_to_tensor(rows) > 0


def any_rows(values: list[Any]) -> int | tf.Tensor | None:
    """Returns 1 if one of a step's arguments is a batch with rows, else 0; `None` if no argument is a batch."""
    kinds = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
    counts = [count_rows(value) for value in values if isinstance(value, kinds)]
    counts = [count for count in counts if count is not None]
    if any(isinstance(count, int) and count for count in counts):
        return 1
    return tf.minimum(tf.reduce_max(tf.stack(counts)), 1) if counts else None


def count_rows(data: Any) -> int | tf.Tensor | None:
    """Counts the rows of a batch as Keras does: the first dimension of the first input; `None` if it has none."""
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:  # Only a custom step can unpack this batch.
        x = data
    first = next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)
    if first is None:
        return None
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    first = tf.convert_to_tensor(first)
    if first.shape.rank == 0:
        return None
    return first.shape[0] if first.shape.rank and first.shape[0] is not None else tf.shape(first)[0]
