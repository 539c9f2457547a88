"""Codec that sends four bits per value."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_codec import Quantised
from tfdist.strategies.compression.block_packing import pack, rows_of, split_blocks, unpack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(Quantised):
    """Sends four-bit integers with one scale per block of a gradient (absmax quantization).

    Sends 7.7 times fewer bytes than float32. Costs as much as `Int8`. Rounds coarsely: every sixth of normally
    distributed values becomes 0, so keep error feedback on.

    Args:
      block_size: Number of elements that share one scale, a multiple of 8. Larger blocks send fewer scales and quantize
        small values more coarsely.
      min_elements, start_step, error_feedback: See `Codec`.

    Raises:
      ValueError: If `block_size` is not a positive multiple of 8, or another option is out of range.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, https://arxiv.org/abs/2110.02861
    """

    name: ClassVar[str] = "int4"
    codes_per_word: ClassVar[int] = 8
    multiple: ClassVar[int] = 8
    largest: ClassVar[float] = 7

    def _pack_codes(self, codes: tf.Tensor) -> tf.Tensor:
        halves = tf.reshape(codes, [rows_of(codes), codes.shape[1], 2, self.block_size // 2])
        pairs = tf.reduce_sum(halves * [[1.0], [16.0]], axis=2)  # two codes per byte
        return pack(tf.cast(pairs, tf.int8))

    def _unpack_codes(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        pairs = split_blocks(unpack(words, tf.int8)[:, : elements // 2], self.block_size // 2)
        pairs = tf.cast(pairs, tf.float32)
        # A pair is first + 16 * second with |first| <= 7, so rounding pair / 16 gives `second`.
        second = tf.round(pairs * (1 / 16))
        codes = tf.stack([pairs - 16 * second, second], axis=2)
        return tf.reshape(codes, [rows_of(words), elements])
