"""Sparse gradients of rows that no batch chooses, such as those of positions in a text.

One device has one gradient for each such row, summed over the whole batch. Joined as other rows are, there would be one
of each replica, and Keras' adaptive optimizers square each by itself.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies.dependence import may_differ


def as_dense(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A nest of gradients in which such rows are tensors that replicas can add up, and what makes rows of the sums.

    Rows whose number depends on the batch, as in texts of any length, become the whole table, and stay that.
    """
    leaves = tf.nest.flatten(value)
    fixed = [leaf if _is_fixed(leaf) else None for leaf in leaves]
    dense = [leaf if rows is None else _dense(rows) for leaf, rows in zip(leaves, fixed, strict=True)]

    def as_rows(sums: Any) -> Any:
        pairs = zip(tf.nest.flatten(sums), fixed, strict=True)
        return tf.nest.pack_sequence_as(sums, [_rows_of(total, rows) for total, rows in pairs])

    return tf.nest.pack_sequence_as(value, dense), as_rows


def _is_fixed(leaf):
    if not isinstance(leaf, tf.IndexedSlices) or not leaf.values.shape[1:].is_fully_defined():
        return False
    return not may_differ(leaf.indices, by_shape=False)


def _has_known_length(rows):
    return rows.indices.shape.is_fully_defined()


def _dense(rows):
    if _has_known_length(rows):
        return tf.ensure_shape(rows.values, [*rows.indices.shape, *rows.values.shape[1:]])
    return tf.math.unsorted_segment_sum(rows.values, rows.indices, rows.dense_shape[0])


def _rows_of(total, rows):
    if rows is None or not _has_known_length(rows):
        return total
    return tf.IndexedSlices(total, rows.indices, rows.dense_shape)
