"""Codec that sends float16 values with one scale per block."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_codec import BlockCodec
from tfdist.strategies.compression.block_packing import absmax_bits, from_bits, pack, unpack
from tfdist.strategies.compression.codec import WordCodec

_MANTISSA_BITS = 23
# The bits of a float32 power of two are its exponent, biased by 127, above the mantissa bits. Scaling brings the
# largest magnitude of a block into [2^14, 2^15), half the range of float16.
_BIAS = 127
_TARGET = 14
# Bits of the smallest finite float32 that would round up to 2^128 in float16 precision, and bits of Inf.
_EDGE, _INF = 0x7F7FF000, 0x7F800000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float16(BlockCodec):
    """Sends float16 numbers with a power-of-two scale per block: tiny and huge gradients keep 11 bits of precision.

    Halves the traffic. Costs two passes over the gradient and no state. A value that is 2^28 times smaller than the
    largest of its block loses bits; one that is 2^40 times smaller becomes 0.

    Args:
      block_size: Number of elements that share one scale, a multiple of 8.
      min_elements, start_step: See `Codec`.
      error_feedback: Whether the error is added to the next gradient; see `Codec`. Off by default, since
        rounding changes a value by at most 0.05 %, up or down.

    Raises:
      ValueError: If `block_size` is not a positive multiple of 8, or another option is out of range.

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """

    name: ClassVar[str] = "float16"

    codes_per_word: ClassVar[int] = 2
    multiple: ClassVar[int] = 8
    # The product with a scale overflows to Inf for blocks that hold Inf, NaN, or numbers within a factor of 2 of Inf.
    largest: ClassVar[float] = float(tf.float16.max)

    block_size: int = 4096
    error_feedback: bool = False

    compress = WordCodec.compress  # Decodes words that XLA takes as they are; see `as_sent`.

    def _codes(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        largest = absmax_bits(blocks)
        exponents = tf.bitwise.right_shift(largest, _MANTISSA_BITS)
        # From the smallest exponent that gives a normal number as scale to the largest exponent of finite numbers.
        exponents = tf.clip_by_value(exponents, _TARGET + 1, 254)
        scales = tf.bitwise.left_shift(exponents - _TARGET, _MANTISSA_BITS)
        reciprocals = from_bits(tf.bitwise.left_shift(2 * _BIAS + _TARGET - exponents, _MANTISSA_BITS))
        # If the largest value is finite but would round up to 2^128, which is Inf, shrink its block a little.
        on_edge = tf.logical_and(largest >= _EDGE, largest < _INF)
        reciprocals = tf.where(on_edge, reciprocals * (1 - 2.0**-11), reciprocals)
        halves = tf.cast(blocks * reciprocals[:, :, tf.newaxis], tf.float16)
        return halves, from_bits(scales)

    def _pack_codes(self, codes: tf.Tensor) -> tf.Tensor:
        return pack(codes)

    def _unpack_codes(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        return unpack(words[:, : elements // 2], tf.float16)
