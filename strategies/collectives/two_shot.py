"""All-reduce of an encoded bucket, in two shots (chunks to their owners, sums to all ranks) or in one (all to all)."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import sum_in_order
from tfdist.strategies.compression import WordCodec

State = tuple[tf.Tensor, ...]

# Compiling takes a few tenths of a second per shape and device, which faster steps do not pay back for smaller buckets.
_COMPILED_ELEMENTS = 1 << 14


def in_two_shots(codec: WordCodec, ranks: int) -> bool:
    """Whether sums are exchanged too. Two ranks send whole buckets, which takes as many bytes and half the coding."""
    return codec.two_shot and ranks > 2


def state_shapes(codec: WordCodec, elements: int, ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the shapes of a bucket's float32 state tensors, for the first encoding and for the second."""
    if not in_two_shots(codec, ranks):
        return [(1, elements)] * codec.states, []
    chunk = elements // ranks
    return [(ranks, chunk)] * codec.states, [(1, chunk)] * codec.states


def sent_words(codec: WordCodec, elements: int, ranks: int) -> int:
    """Returns the number of int32 words that one rank sends for a bucket of `elements`."""
    if not in_two_shots(codec, ranks):
        return (ranks - 1) * codec.words(elements)
    return 2 * (ranks - 1) * codec.words(elements // ranks)


def all_reduce_encoded(
    codec: WordCodec, bucket: tf.Tensor, first: State, second: State, launcher, ranks: int, options
) -> tuple[tf.Tensor, State, State, tf.Tensor]:
    """Sums the buckets of all ranks.

    Each rank owns one chunk of the bucket. It receives this chunk from all ranks, encoded, sums in float32 in the order
    of ranks, encodes the sum and sends it to all. The owner decodes its own message too, so all ranks hold the same
    bits. Both encodings keep their error as a residual. Each rank sends 2 (ranks - 1) / ranks encoded buckets.

    With two ranks, or a (sparse) codec that is not `two_shot`, each rank sends its bucket to all other ranks instead.

    Args:
      codec: The codec of the rows.
      bucket: float [elements], elements a multiple of ranks * granule.
      first: The codec's state for the first encoding; see `state_shapes`.
      second: The codec's state for the second encoding.
      launcher: This rank's launcher in the group of ranks.
      ranks: Size of that group.
      options: Communication options.

    Returns:
      The sum, float32 [elements]; the new `first` and `second`; and whether the sum is finite, bool []. An Inf or NaN
      on any rank makes the sum non-finite on all ranks.

    References:
      Seide et al., 1-bit SGD, 2014, for residuals in both directions.
      Tang et al., DoubleSqueeze, 2019, https://arxiv.org/abs/1905.05957, for the two shots.
    """
    two_shots = in_two_shots(codec, ranks)
    rows = ranks if two_shots else 1
    compiled = bucket.shape[0] >= _COMPILED_ELEMENTS
    words, first = _encode(codec, compiled)(tf.reshape(bucket, [rows, -1]), first)
    chunk = bucket.shape[0] // rows
    if not two_shots:
        total, finite = _sum(codec, compiled)(launcher.rows_of_all(words, options), chunk)
        return tf.reshape(total, [-1]), first, second, finite
    received = launcher.rows_of_all(words, options, apart=True)
    words, second = _sum_and_encode(codec, compiled)(received, second, chunk)
    total, finite = _decode(codec, compiled)(launcher.rows_of_all(words, options), chunk)
    return tf.reshape(total, [-1]), first, second, finite


# When compiled, a large bucket takes one pass over memory instead of one per operation.


@functools.cache
def _encode(codec: WordCodec, compiled: bool):
    return _function(lambda values, state: codec.compress(tf.cast(values, tf.float32), state), compiled)


@functools.cache
def _sum_and_encode(codec: WordCodec, compiled: bool):
    return _function(lambda rows, state, elements: codec.compress(_sum_rows(codec, rows, elements), state), compiled)


@functools.cache
def _sum(codec: WordCodec, compiled: bool):
    return _function(lambda rows, elements: _checked(codec, _sum_rows(codec, rows, elements), rows, elements), compiled)


@functools.cache
def _decode(codec: WordCodec, compiled: bool):
    def decode(rows, elements):
        return _checked(codec, tf.concat([codec.decode(row, elements) for row in rows], axis=0), rows, elements)

    return _function(decode, compiled)


def _checked(codec, total, rows, elements):
    """Returns `total` and whether it is finite; reads its values, one more pass, only if no bound shows it."""

    def look():
        return tf.reduce_all(tf.math.is_finite(total))

    bounds = [codec.bound(row, elements) for row in rows]
    if None in bounds:
        return total, look()
    is_bounded = tf.reduce_all(tf.math.is_finite(tf.add_n(bounds)))
    return total, tf.cond(is_bounded, lambda: True, look)


def _function(function, compiled):
    return tf.function(function, jit_compile=True, autograph=False) if compiled else function


def _sum_rows(codec: WordCodec, rows: Sequence[tf.Tensor], elements: int) -> tf.Tensor:
    """Decodes and sums in the order of ranks: [1, words] each -> float32 [1, elements]."""
    return sum_in_order([codec.decode(row, elements) for row in rows])
