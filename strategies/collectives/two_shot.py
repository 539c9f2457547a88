"""All-reduce of a bucket that travels encoded: chunks to their owners, sums back to all; or all of it to the other."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.collectives.launcher import sum_in_order
from tfdist.strategies.compression import WordCodec

State = tuple[tf.Tensor, ...]

# Compiling takes a few tenths of a second for each shape and device, which smaller buckets would never earn back.
_COMPILED_ELEMENTS = 1 << 14


def in_two_shots(codec: WordCodec, ranks: int) -> bool:
    """Whether sums travel too. Between two ranks all buckets to the other are no more bytes, in half the passes."""
    return codec.two_shot and ranks > 2


def state_shapes(codec: WordCodec, elements: int, ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Shapes of the float32 tensors that a bucket keeps from step to step: of the first encoding, and of the second."""
    if not in_two_shots(codec, ranks):
        return [(1, elements)] * codec.states, []
    chunk = elements // ranks
    return [(ranks, chunk)] * codec.states, [(1, chunk)] * codec.states


def sent_words(codec: WordCodec, elements: int, ranks: int) -> int:
    """int32 words that one rank sends."""
    if not in_two_shots(codec, ranks):
        return (ranks - 1) * codec.words(elements)
    return 2 * (ranks - 1) * codec.words(elements // ranks)


def all_reduce_encoded(
    codec: WordCodec, bucket: tf.Tensor, first: State, second: State, launcher, ranks: int, options
) -> tuple[tf.Tensor, State, State, tf.Tensor]:
    """Sums the buckets of all ranks.

    A rank owns one chunk. It gets that chunk from all, encoded; sums in float32, in the order of ranks; and sends the
    sum to all, encoded again. The owner too decodes what it has sent, so all hold the same bits. What an encoding loses
    stays behind as residual, on both stages. Traffic a rank: 2 (ranks - 1) / ranks of the encoded bucket. Between two
    ranks, and by a codec that is not `two_shot` (sparse), everything goes to everyone once, without a second stage:
    (ranks - 1) encoded buckets.

    Args:
      codec: How rows are encoded.
      bucket: float [elements], elements a multiple of ranks * granule.
      first: What `codec.compress` keeps of the first encoding; see `state_shapes`.
      second: The same of the second.
      launcher: Of the group of ranks.
      ranks: Size of that group.
      options: Communication options.

    Returns:
      The sum, float32 [elements]; both states as they are after this step; whether the sum is finite, bool []. An Inf
      or NaN on any rank makes the sum non-finite on all.

    References:
      1-bit SGD's residuals on both ways: Seide et al., 2014. The two-shot form: Tang et al., DoubleSqueeze, 2019,
      https://arxiv.org/abs/1905.05957
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


# Compiled, large buckets take one pass over memory instead of one for each operation.


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
    """`total`, and whether it is finite; it is only looked at, one more pass, if a bound cannot tell."""

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
    """[1, words] each -> float32 [1, elements], added up in the order of ranks."""
    return sum_in_order([codec.decode(row, elements) for row in rows])
