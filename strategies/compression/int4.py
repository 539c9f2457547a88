"""Four bits a value."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.blocks import from_bits, pack, rows_of, split_blocks, to_bits, unpack
from tfdist.strategies.compression.quantised import Quantised

__all__ = ["Int4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(Quantised):
    """Blockwise absmax quantisation to four bits.

    Cuts traffic 7.7x. Costs as much as `Int8`. Rounds hard: of normally distributed values every sixth becomes 0, which
    only error feedback makes good.

    Args:
      block_size: Elements that share a scale, a multiple of 8. Larger sends fewer scales, and rounds small values
        harder.
      min_elements: See `Codec`.
      start_step: See `Codec`.
      error_feedback: See `Codec`.

    Raises:
      ValueError: If `block_size` is not a positive multiple of 8, or another option is out of range.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, https://arxiv.org/abs/2110.02861
    """

    name: ClassVar[str] = "int4"
    largest: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("block_size", at_least=8, multiple_of=8)

    def words(self, elements: int) -> int:
        """Words that a row of `elements` takes: an eighth, and a scale for each block."""
        return elements // 8 + elements // self.block_size

    def _pack(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        rows, count = rows_of(codes), codes.shape[1]
        halves = tf.reshape(codes, [rows, count, 2, self.block_size // 2])
        pairs = tf.reduce_sum(halves * [[1.0], [16.0]], axis=2)  # two to a byte
        return tf.concat([pack(tf.cast(pairs, tf.int8)), to_bits(scales)], axis=1)

    def _unpack(self, words: tf.Tensor, elements: int) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = split_blocks(unpack(words, tf.int8)[:, : elements // 2], self.block_size // 2)
        pairs = tf.cast(pairs, tf.float32)
        # `first` is at most 7 of 16, so rounding finds `second`.
        second = tf.round(pairs * (1 / 16))
        codes = tf.stack([pairs - 16 * second, second], axis=2)
        return tf.reshape(codes, [rows_of(words), elements]), from_bits(words[:, elements // 8 :])
