"""The common part of codecs that send blocks of integers with a scale, for any bit width."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_packing import absmax_bits, from_bits, rows_of, split_blocks
from tfdist.strategies.compression.codec import State, WordCodec

__all__ = ["Quantised"]

# For a smaller largest magnitude the reciprocal of the scale would be Inf, so such blocks are sent as zeros.
_SMALLEST = 2.0**-118


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised(WordCodec):
    """Base of `Int8` and `Int4`: sends the values of a block, scaled to integers from -`largest` to `largest`."""

    largest: ClassVar[int]

    block_size: int = 256

    @property
    def granule(self) -> int:
        """Number of elements of a block, which shares one scale; gradients are padded to a multiple of it."""
        return self.block_size

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        """Encodes gradients: float32 [rows, elements] -> int32 [rows, words]: integers, then scales."""
        self._check_values(values)
        return self._pack(*self._quantise(split_blocks(values, self.block_size)))

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """Decodes what `encode` has returned: int32 [rows, words] -> float32 [rows, elements]."""
        self._check_words(words, elements)
        codes, scales = self._unpack(words, elements)
        blocks = split_blocks(tf.cast(codes, tf.float32), self.block_size)
        return tf.reshape(blocks * scales[:, :, tf.newaxis], [rows_of(words), elements])

    def bound(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """The largest magnitude in each block before it was encoded, float32 [rows, blocks]; see `WordCodec.bound`."""
        return self._unpack(words, elements)[1] * self.largest

    def compress(self, values: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Encodes `values` plus the residual, and computes the new residual; see `WordCodec.compress`."""
        self._check_values(values, state)
        if not self.error_feedback:
            return self.encode(values), ()
        blocks = split_blocks(values + state[0], self.block_size)
        codes, scales = self._quantise(blocks)
        # Computed from the codes, since decoding the words would take another pass.
        residual = blocks - codes * scales[:, :, tf.newaxis]
        return self._pack(codes, scales), (tf.reshape(residual, [rows_of(values), values.shape[1]]),)

    def _quantise(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Quantizes `[rows, blocks, block_size]` to integers, as float32 of that shape, and scales `[rows, blocks]`."""
        absmax = from_bits(absmax_bits(blocks))
        # Inf and NaN show in the scale. The inner `tf.where` avoids a division by zero, at which
        # `tf.debugging.enable_check_numerics` would stop even though the quotient is not used.
        vanishes = absmax < _SMALLEST
        reciprocal = tf.where(vanishes, 0.0, self.largest / tf.where(vanishes, 1.0, absmax))
        return tf.round(blocks * reciprocal[:, :, tf.newaxis]), absmax * (1 / self.largest)

    def _pack(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Packs integers, as float32 `[rows, blocks, block_size]`, and scales `[rows, blocks]` -> `[rows, words]`."""
        raise NotImplementedError

    def _unpack(self, words: tf.Tensor, elements: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Inverse of `_pack`: int32 `[rows, words]` -> integers `[rows, elements]` and scales `[rows, blocks]`."""
        raise NotImplementedError
