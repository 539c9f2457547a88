"""All-reduce of `tf.IndexedSlices`, the gradients of embeddings."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.launcher import carrier_of
from tfdist.strategies.compression import WordCodec


def sum_duplicates(slices: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Adds up rows of equal index, so that the order in which they are later scattered cannot change the bits."""
    if not isinstance(slices, tf.IndexedSlices):
        return slices
    indices, segment = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, segment, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def all_reduce_sparse(
    slices: tf.IndexedSlices, launcher, group_size: int, options, codec: WordCodec | None = None, beside=None
) -> tf.IndexedSlices:
    """Joins the `slices` of all replicas; each may hold another number of rows, also none.

    Rows of equal index stay apart, as they are on one device: Keras' adaptive optimizers square each by itself. With a
    codec the rows of one replica are added up first, values travel encoded, row by row, and indices exact.
    Traffic a replica: (replicas - 1) times the rows of the longest.

    Args:
      slices: Of this replica.
      launcher: Of the group of replicas.
      group_size: Of that group.
      options: Communication options.
      codec: How values travel; uncompressed if None.
      beside: Of the same group, for what travels while the values do; by default `launcher` too.

    Returns:
      Slices in the order of replicas, the same on all.
    """
    if codec is not None:
        slices = sum_duplicates(slices)
    lengths = launcher.all_gather_rows(tf.shape(slices.indices), options)  # [replicas]
    longest = tf.reduce_max(lengths)

    def gather(rows: tf.Tensor, launcher) -> tf.Tensor:  # [own rows, ...] -> [all rows, ...]
        # The collective needs equal shapes, so shorter replicas pad; what is padded is masked away on arrival.
        padding = [[0, longest - tf.shape(rows)[0]]] + [[0, 0]] * (rows.shape.rank - 1)
        everyone = launcher.all_gather_rows(tf.pad(rows, padding), options)
        return tf.boolean_mask(everyone, tf.reshape(tf.sequence_mask(lengths, longest), [group_size * longest]))

    if codec is None:
        values = gather(slices.values, launcher)
    else:
        words, decode = _encoded(slices.values, codec)
        values = decode(gather(words, launcher))
    values = tf.ensure_shape(values, [None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, gather(slices.indices, beside or launcher), slices.dense_shape)


def sparse_row_bytes(slices: tf.IndexedSlices, codec: WordCodec | None = None) -> int:
    """Bytes that one row takes, with its index."""
    width = slices.values.shape[1:].num_elements()
    if codec is None:
        dtype = carrier_of(slices.values.dtype) or slices.values.dtype
        return width * dtype.size + slices.indices.dtype.size
    codec = _fit(codec, width)
    return codec.words(_padded(width, codec)) * 4 + slices.indices.dtype.size


def _encoded(values: tf.Tensor, codec: WordCodec) -> Any:
    """The words of each row, and what turns gathered words into values again."""
    shape = values.shape[1:]
    width = shape.num_elements()
    codec = _fit(codec, width)
    padded = _padded(width, codec)

    def decode(words):
        rows = codec.decode(tf.ensure_shape(words, [None, codec.words(padded)]), padded)[:, :width]
        return tf.cast(tf.reshape(rows, [-1, *shape]), values.dtype)

    rows = tf.pad(tf.reshape(tf.cast(values, tf.float32), [-1, width]), [[0, 0], [0, padded - width]])
    return codec.encode(rows), decode


def _fit(codec: WordCodec, width: int) -> WordCodec:
    """`codec` in blocks no longer than a row needs."""
    block = -(-width // 8) * 8
    if getattr(codec, "block_size", 0) <= block:
        return codec
    return dataclasses.replace(codec, block_size=block)  # type: ignore[call-arg]


def _padded(width: int, codec: WordCodec) -> int:
    return -(-width // codec.granule) * codec.granule
