"""All-reduce of `tf.IndexedSlices`, the gradients of embeddings."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import carrier_of
from tfdist.strategies.collectives.transport import Transport
from tfdist.strategies.compression import WordCodec


def sum_duplicates(slices: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Sums rows of equal index in a sparse gradient, so that the order of a later scatter does not matter."""
    if not isinstance(slices, tf.IndexedSlices):
        return slices
    indices, segment = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, segment, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def all_reduce_sparse(
    slices: tf.IndexedSlices,
    transport: Transport,
    options: Any,
    codec: WordCodec | None = None,
    beside: Transport | None = None,
) -> tf.IndexedSlices:
    """Concatenates sparse gradients, the `slices` of all replicas, which may hold different numbers of rows or none.

    Without a codec, rows of equal index stay separate, as on one device, since Keras' adaptive optimizers square each
    row by itself. With a codec, each replica first sums its rows of equal index; then the values travel encoded row by
    row, and the indices exactly. Each replica sends (replicas - 1) times the size of the longest slices.

    The indices travel over the transport `beside`, if given, at the same time as the values. Returns slices in the
    order of replicas, equal on all replicas.
    """
    if codec is not None:
        slices = sum_duplicates(slices)
    lengths = transport.all_gather(tf.shape(slices.indices), options)  # [replicas]
    longest = tf.reduce_max(lengths)

    def gather(rows: tf.Tensor, transport: Transport) -> tf.Tensor:  # [own rows, ...] -> [all rows, ...]
        # The collective needs equal shapes, so all replicas pad to the longest; the mask drops the padding.
        padding = [[0, longest - tf.shape(rows)[0]]] + [[0, 0]] * (rows.shape.rank - 1)
        everyone = transport.all_gather(tf.pad(rows, padding), options)
        return tf.boolean_mask(everyone, tf.reshape(tf.sequence_mask(lengths, longest), [-1]))

    if codec is None:
        values = gather(slices.values, transport)
    else:
        words, decode = _encoded(slices.values, codec)
        values = decode(gather(words, transport))
    values = tf.ensure_shape(values, [None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, gather(slices.indices, beside or transport), slices.dense_shape)


def sparse_row_bytes(slices: tf.IndexedSlices, codec: WordCodec | None = None) -> int:
    """Bytes that one row of a sparse gradient takes to send with its index, encoded by `codec` if given."""
    width = slices.values.shape[1:].num_elements()
    if codec is None:
        dtype = carrier_of(slices.values.dtype) or slices.values.dtype
        return width * dtype.size + slices.indices.dtype.size
    codec = _fit(codec, width)
    return codec.words(_padded(width, codec)) * 4 + slices.indices.dtype.size


def _encoded(values: tf.Tensor, codec: WordCodec) -> Any:
    """Encodes the rows of a sparse gradient. Returns int32 words, and a function that decodes gathered words."""
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
    """`codec` with blocks no longer than a sparse gradient's row, rounded up to a multiple of 8, to save padding."""
    block = -(-width // 8) * 8
    if getattr(codec, "block_size", 0) <= block:
        return codec
    return dataclasses.replace(codec, block_size=block)  # type: ignore[call-arg]


def _padded(width: int, codec: WordCodec) -> int:
    return -(-width // codec.granule) * codec.granule
