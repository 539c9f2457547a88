"""The common part of codecs that send the values of a block as short codes, with one scale per block."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_packing import absmax_bits, from_bits, rows_of, split_blocks, to_bits
from tfdist.strategies.compression.codec import State, WordCodec

# For a smaller largest magnitude the reciprocal of the scale would be Inf, so such blocks are sent as zeros.
_SMALLEST = 2.0**-118


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCodec(WordCodec):
    """Base of codecs that send the codes of all values of a row, several in each word, and then its blocks' scales."""

    codes_per_word: ClassVar[int]
    multiple: ClassVar[int]  # `block_size` must be a multiple of it.
    largest: ClassVar[float]  # No code decodes to more than this many scales.

    block_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("block_size", at_least=self.multiple, multiple_of=self.multiple)

    @property
    def granule(self) -> int:
        return self.block_size

    def words(self, elements: int) -> int:
        return elements // self.codes_per_word + elements // self.block_size

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        self._check_values(values)
        return self._pack(*self._codes(split_blocks(values, self.block_size)))

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        self._check_words(words, elements)
        codes = split_blocks(tf.cast(self._unpack_codes(words, elements), tf.float32), self.block_size)
        return tf.reshape(self._decoded(codes, self._unpack_scales(words, elements)), [rows_of(words), elements])

    def bound(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        return self._unpack_scales(words, elements) * self.largest

    def compress(self, values: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        self._check_values(values, state)
        if not self.error_feedback:
            return self.encode(values), ()
        blocks = split_blocks(values + state[0], self.block_size)
        codes, scales = self._codes(blocks)
        # Computed from the codes, since decoding the words would take another pass.
        residual = blocks - self._decoded(codes, scales)
        return self._pack(codes, scales), (tf.reshape(residual, [rows_of(values), values.shape[1]]),)

    def _codes(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Quantizes `[rows, blocks, block_size]` to codes of that shape, and scales `[rows, blocks]`."""
        raise NotImplementedError

    def _decoded(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Inverse of `_codes`: the decoded blocks."""
        return codes * tf.expand_dims(scales, -1)

    def _pack(self, codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        return tf.concat([self._pack_codes(codes), to_bits(scales)], axis=1)

    def _pack_codes(self, codes: tf.Tensor) -> tf.Tensor:
        """Packs the codes of blocks, [rows, blocks, block_size] -> int32 [rows, words without scales]."""
        raise NotImplementedError

    def _unpack_codes(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """Inverse of `_pack_codes`: int32 `[rows, words]`, with scales -> `[rows, elements]`."""
        raise NotImplementedError

    def _unpack_scales(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        return from_bits(words[:, elements // self.codes_per_word :])


class Quantised(BlockCodec):
    """Base of `Int8` and `Int4`: sends the values of a block, scaled to integers from -`largest` to `largest`."""

    def _codes(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        absmax = from_bits(absmax_bits(blocks))
        # Inf and NaN show in the scale. The inner `tf.where` avoids a division by zero, at which
        # `tf.debugging.enable_check_numerics` would stop even though the quotient is not used.
        vanishes = absmax < _SMALLEST
        reciprocal = tf.where(vanishes, 0.0, self.largest / tf.where(vanishes, 1.0, absmax))
        return tf.round(blocks * tf.expand_dims(reciprocal, -1)), absmax * (1 / self.largest)
