"""Codec that sends eight bits per value."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_packing import from_bits, pack, to_bits, unpack
from tfdist.strategies.compression.quantised import Quantised

__all__ = ["Int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Quantised):
    """Sends eight-bit integers with one scale per block of a gradient (absmax quantization).

    Sends 3.9 times fewer bytes than float32. Costs two passes over the gradient and, with error feedback, one more pass
    and one float32 copy of it. Zeros stay exact zeros.

    Args:
      block_size: Number of elements that share one scale, a multiple of 4. Larger blocks send fewer scales and quantize
        small values more coarsely.
      min_elements: Gradients with fewer elements travel uncompressed; see `Codec`.
      start_step: Number of the first compressed step, counted from 0.
      error_feedback: Whether the error is added to the next gradient; see `Codec`.

    Raises:
      ValueError: If `block_size` is not a positive multiple of 4, or another option is out of range.

    References:
      Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015, https://arxiv.org/abs/1511.04561
    """

    name: ClassVar[str] = "int8"
    largest: ClassVar[int] = 127

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("block_size", at_least=4, multiple_of=4)

    def words(self, elements: int) -> int:
        """Number of int32 words of an encoded row: a quarter of `elements`, and one scale per block."""
        return elements // 4 + elements // self.block_size

    def _pack(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        return tf.concat([pack(tf.cast(codes, tf.int8)), to_bits(scales)], axis=1)

    def _unpack(self, words: tf.Tensor, elements: int) -> tuple[tf.Tensor, tf.Tensor]:
        # Unpack all words, scales included, and slice the int8 codes: faster than slicing the words first.
        return unpack(words, tf.int8)[:, :elements], from_bits(words[:, elements // 4 :])
