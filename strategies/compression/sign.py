"""Codec that sends one bit per value."""

import dataclasses
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfdist.strategies.compression.block_packing import (
    from_bits,
    pack,
    reduce_blocks,
    rows_of,
    split_blocks,
    to_bits,
    unpack,
)
from tfdist.strategies.compression.codec import State, WordCodec
from tfdist.strategies.compression.float16 import Float16

__all__ = ["Sign"]

_SIGN_BIT = np.int32(-(2**31))
_BITS = np.array([[1 << k] for k in range(8)], np.int32)  # [8, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign(WordCodec):
    """Sends the sign of each value of a gradient, with the mean magnitude of its block as scale.

    Sends 31 times fewer bytes than float32. Costs two passes over the gradient and, with error feedback, one more pass
    and one float32 copy of it. Every value decodes to plus or minus the scale, never to 0 except in blocks of zeros.
    Training does not converge without error feedback, and may not converge with Adam; use SGD with momentum.

    Args:
      block_size: Number of elements that share one scale, a multiple of 32.
      min_elements: Gradients with fewer elements travel uncompressed; see `Codec`.
      start_step: Number of the first compressed step, counted from 0.
      error_feedback: Whether the error is added to the next gradient; see `Codec`.

    Raises:
      ValueError: If `block_size` is not a positive multiple of 32, or another option is out of range.

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, 2019, https://arxiv.org/abs/1901.09847
    """

    name: ClassVar[str] = "sign"
    for_sgd: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False

    block_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("block_size", at_least=32, multiple_of=32)

    @property
    def granule(self) -> int:
        """Number of elements of a block, which shares one scale; gradients are padded to a multiple of it."""
        return self.block_size

    def words(self, elements: int) -> int:
        """Number of int32 words of an encoded row: one bit per element, and one scale per block."""
        return elements // 32 + elements // self.block_size

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        """Encodes gradients: float32 [rows, elements] -> int32 [rows, words]: signs, then scales."""
        self._check_values(values)
        blocks = split_blocks(values, self.block_size)
        return self._pack(blocks, self._scales(blocks))

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """Decodes what `encode` has returned: int32 [rows, words] -> float32 [rows, elements]."""
        self._check_words(words, elements)
        signs = tf.reshape(
            unpack(words, tf.uint8)[:, : elements // 8],
            [rows_of(words), elements // self.block_size, 1, self.block_size // 8],
        )
        positive = tf.equal(tf.bitwise.bitwise_and(signs, _BITS.astype(np.uint8)), 0)
        scales = from_bits(words[:, elements // 32 :])[:, :, tf.newaxis, tf.newaxis]
        return tf.reshape(tf.where(positive, scales, -scales), [rows_of(words), elements])

    def bound(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """The magnitude of all decoded values of each block, float32 [rows, blocks]; see `WordCodec.bound`."""
        return from_bits(words[:, elements // 32 :])

    def compress(self, values: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Encodes `values` plus the residual, and computes the new residual; see `WordCodec.compress`."""
        self._check_values(values, state)
        if not self.error_feedback:
            return self.encode(values), ()
        blocks = split_blocks(values + state[0], self.block_size)
        scales = self._scales(blocks)
        # Computed from the values, since decoding the words would take another pass.
        signs = tf.bitwise.bitwise_and(to_bits(blocks), _SIGN_BIT)
        decoded = from_bits(tf.bitwise.bitwise_xor(signs, to_bits(scales)[:, :, tf.newaxis]))
        return self._pack(blocks, scales), (tf.reshape(blocks - decoded, [rows_of(values), values.shape[1]]),)

    def for_rows(self) -> WordCodec:
        """`Float16` for sparse gradients, which have no residual, while this codec needs one to converge."""
        return Float16(min_elements=self.min_elements, start_step=self.start_step)

    def _scales(self, blocks: tf.Tensor) -> tf.Tensor:
        """Mean magnitude of each block, its scale: [rows, blocks, block_size] -> [rows, blocks]."""
        # Dividing before the sum avoids overflow.
        return reduce_blocks(tf.abs(blocks) * (1 / self.block_size), tf.add, tf.reduce_sum)

    def _pack(self, blocks: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Packs signs of blocks `[rows, blocks, block_size]` and scales `[rows, blocks]` -> int32 `[rows, words]`.

        Bit k of byte j of a block is the sign of its element j + k * block_size / 8.
        """
        rows, count = rows_of(blocks), blocks.shape[1]
        negative = tf.bitwise.right_shift(to_bits(blocks), 31)  # all bits one, or all bits zero
        negative = tf.reshape(negative, [rows, count, 8, self.block_size // 8])
        signs = tf.reduce_sum(tf.bitwise.bitwise_and(negative, _BITS), axis=2)
        return tf.concat([pack(tf.cast(signs, tf.uint8)), to_bits(scales)], axis=1)
