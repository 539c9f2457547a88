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

    Rows that follow from how long the texts of a batch are become the whole table, and stay that: other replicas may
    have others.
    """
    leaves = tf.nest.flatten(value)
    kinds = [_kind(leaf) for leaf in leaves]

    def as_rows(sums: Any) -> Any:
        totals = [
            tf.IndexedSlices(total, leaf.indices, leaf.dense_shape) if kind == "rows" else total
            for total, leaf, kind in zip(tf.nest.flatten(sums), leaves, kinds, strict=True)
        ]
        return tf.nest.pack_sequence_as(sums, totals)

    return tf.nest.pack_sequence_as(value, [_dense(*each) for each in zip(leaves, kinds, strict=True)]), as_rows


def _kind(leaf):
    """As what a leaf of a nest is added up: by its "rows", as a "table", or as it is (`None`)."""
    if not isinstance(leaf, tf.IndexedSlices) or not leaf.values.shape[1:].is_fully_defined():
        return None
    if leaf.indices.shape.is_fully_defined() and not may_differ(leaf.indices):
        return "rows"
    return None if may_differ(leaf.indices, by_shape=False) else "table"


def _dense(leaf, kind):
    if kind == "rows":
        return tf.ensure_shape(leaf.values, [*leaf.indices.shape, *leaf.values.shape[1:]])
    if kind == "table":
        return tf.math.unsorted_segment_sum(leaf.values, leaf.indices, leaf.dense_shape[0])
    return leaf
