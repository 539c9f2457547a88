"""Codec that sends one bit per value."""

import dataclasses
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfdist.strategies.compression.block_codec import BlockCodec
from tfdist.strategies.compression.block_packing import from_bits, pack, reduce_blocks, rows_of, to_bits, unpack
from tfdist.strategies.compression.codec import WordCodec
from tfdist.strategies.compression.float16 import Float16

_SIGN_BIT = np.int32(-(2**31))
_BITS = np.array([[1 << k] for k in range(8)], np.int32)  # [8, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign(BlockCodec):
    """Sends the sign of each value of a gradient, with the mean magnitude of its block as scale.

    Sends 31 times fewer bytes than float32. Costs two passes over the gradient and, with error feedback, one more pass
    and one float32 copy of it. Every value decodes to plus or minus the scale, never to 0 except in blocks of zeros.
    Training does not converge without error feedback, and may not converge with Adam; use SGD with momentum.

    Args:
      block_size: Number of elements that share one scale, a multiple of 32.
      min_elements, start_step, error_feedback: See `Codec`.

    Raises:
      ValueError: If `block_size` is not a positive multiple of 32, or another option is out of range.

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, 2019, https://arxiv.org/abs/1901.09847
    """

    name: ClassVar[str] = "sign"
    for_sgd: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False

    codes_per_word: ClassVar[int] = 32
    multiple: ClassVar[int] = 32
    largest: ClassVar[float] = 1

    block_size: int = 1024

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        self._check_words(words, elements)
        signs = tf.reshape(
            unpack(words, tf.uint8)[:, : elements // 8],
            [rows_of(words), elements // self.block_size, 1, self.block_size // 8],
        )
        positive = tf.equal(tf.bitwise.bitwise_and(signs, _BITS.astype(np.uint8)), 0)
        scales = self._unpack_scales(words, elements)[:, :, tf.newaxis, tf.newaxis]
        return tf.reshape(tf.where(positive, scales, -scales), [rows_of(words), elements])

    def for_rows(self) -> WordCodec:
        """`Float16` for sparse gradients, which have no residual, while this codec needs one to converge."""
        return Float16(min_elements=self.min_elements, start_step=self.start_step)

    def _codes(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Dividing before the sum avoids overflow.
        return blocks, reduce_blocks(tf.abs(blocks) * (1 / self.block_size), tf.add, tf.reduce_sum)

    def _decoded(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        signs = tf.bitwise.bitwise_and(to_bits(codes), _SIGN_BIT)
        return from_bits(tf.bitwise.bitwise_xor(signs, to_bits(scales)[:, :, tf.newaxis]))

    def _pack_codes(self, codes: tf.Tensor) -> tf.Tensor:
        """Packs signs. Bit k of byte j of a block is the sign of its element j + k * block_size / 8."""
        negative = tf.bitwise.right_shift(to_bits(codes), 31)  # all bits one, or all bits zero
        negative = tf.reshape(negative, [rows_of(codes), codes.shape[1], 8, self.block_size // 8])
        signs = tf.reduce_sum(tf.bitwise.bitwise_and(negative, _BITS), axis=2)
        return pack(tf.cast(signs, tf.uint8))
