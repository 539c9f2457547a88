"""Divides tensors into parts, equal or whole, and joins parts."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist.strategies.sharding.ownership import Ownership
from tfdist.strategies.sharding.partition import Partition

Division: TypeAlias = Partition | Ownership


def part_of(partition: Division, tensor: Any, shard: int) -> tf.Tensor:
    """Returns a shard's part of a tensor, padded with zeros: partition.shape -> partition.part_shape_of(shard)."""
    if isinstance(partition, Ownership):
        whole = tf.convert_to_tensor(tensor)
        return whole if shard == partition.owner else tf.zeros([0], whole.dtype)
    rows = tf.reshape(tensor, [partition.rows, *partition.part_shape[1:]])
    if partition.in_turn:
        rows = rows[shard :: partition.shards]
        return _padded(rows, partition.part_shape[0] - rows.shape[0])
    start, stop = partition.range_of(shard)
    return _padded(rows[start:stop], partition.part_shape[0] - (stop - start))


def own_part_of(partition: Division, tensor: Any, shard: int) -> tf.Tensor:
    """Returns a copy of a part, to be kept. A mere slice would keep the memory of the whole tensor."""
    return tf.raw_ops.DeepCopy(x=part_of(partition, tensor, shard))


def part_of_slices(partition: Division, slices: tf.IndexedSlices, shard: int) -> tf.IndexedSlices | tf.Tensor:
    """Returns the rows of a sparse gradient that lie in a shard's part, in the same order, as a gradient of the part.

    Rows of equal index stay apart, because adaptive optimizers square each of them.
    """
    values, indices = slices.values, slices.indices
    if isinstance(partition, Ownership):
        return slices if shard == partition.owner else tf.zeros([0], values.dtype)
    if not partition.by_rows:  # Each element becomes a row.
        size = partition.rows // partition.shape[0]
        indices = tf.reshape(indices[:, None] * size + tf.range(size, dtype=indices.dtype), [-1])
        values = tf.reshape(values, [-1])
    start, stop = partition.range_of(shard)
    is_own = tf.logical_and(indices >= start, indices < stop)
    values, indices = tf.boolean_mask(values, is_own), tf.boolean_mask(indices, is_own) - start
    return tf.IndexedSlices(values, indices, tf.constant(partition.part_shape, indices.dtype))


def rows_of(partition: Partition, tensor: Any) -> tf.Tensor:
    """Lays the parts of a tensor out as rows: partition.shape -> [shards, part_elements]."""
    if not partition.padding and not partition.in_turn:
        return tf.reshape(tensor, [partition.shards, partition.part_elements])
    rows = _padded(tf.reshape(tensor, [partition.rows, *partition.part_shape[1:]]), partition.padding)
    if partition.in_turn:
        rows = tf.transpose(tf.reshape(rows, [partition.part_shape[0], partition.shards, -1]), [1, 0, 2])
    return tf.reshape(rows, [partition.shards, partition.part_elements])


def whole_of(partition: Partition, rows: tf.Tensor) -> tf.Tensor:
    """Joins the parts of all shards, the inverse of `rows_of`: [shards, part_elements] -> partition.shape."""
    size = partition.part_shape[0]
    if not partition.padding and not partition.in_turn:
        return tf.reshape(rows, partition.shape)
    if partition.in_turn:
        rows = tf.transpose(tf.reshape(rows, [partition.shards, size, -1]), [1, 0, 2])
    rows = tf.reshape(rows, [size * partition.shards, *partition.part_shape[1:]])
    return tf.reshape(rows if not partition.padding else rows[: partition.rows], partition.shape)


def whole_of_arrays(shape: tuple[int, ...], parts: Sequence[np.ndarray], in_turn: bool = False) -> np.ndarray:
    """Joins the saved parts of a tensor of `shape`, in the order of the shards that saved them; see `Partition`."""
    if in_turn:
        return np.stack(parts, axis=1).reshape([-1, *shape[1:]])[: shape[0]]
    owned = [part for part in parts if part.size]
    if len(owned) == 1 and owned[0].shape == shape:
        return owned[0]
    partition = Partition.of(shape, len(parts))
    return np.concatenate(parts)[: partition.rows].reshape(shape)


def _padded(rows: tf.Tensor, padding: int) -> tf.Tensor:
    return tf.pad(rows, [[0, padding], *[[0, 0]] * (rows.shape.rank - 1)]) if padding else rows
