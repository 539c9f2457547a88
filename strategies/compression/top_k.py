"""Codec that sends only the largest values of a gradient."""

import dataclasses
import numbers
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_packing import (
    absmax_bits,
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

_LARGEST_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(WordCodec):
    """Sends the largest value of each block of 1 / `ratio` elements with its index; others stay in the residual.

    Sends 80 times fewer bytes than float32 at a ratio of 1 % and 2 workers. Workers choose different values, so
    traffic grows with their number. From 8 / (5 * ratio) workers on (160 at 1 %) it saves nothing. Costs three passes
    over the gradient and one float32 copy of it, and one more copy with momentum. The largest values of the blocks are
    nearly the largest of the whole gradient, and are found without a sort.

    Args:
      ratio: The fraction of values to send, from 1/65536 to 0.5. `1 / ratio` is rounded to an integer.
      momentum: Momentum, from 0 to less than 1, applied here instead of in the optimizer; use an optimizer without
        momentum then. If not 0, a moving sum of gradients with this decay enters the residual, and both are set to 0
        where a value is sent.
      min_elements, start_step, error_feedback: See `Codec`.

    Raises:
      ValueError: If an option is out of range, or `momentum` is set without error feedback.

    References:
      Lin et al., Deep Gradient Compression, 2018, https://arxiv.org/abs/1712.01887
    """

    name: ClassVar[str] = "topk"
    for_sgd: ClassVar[bool] = True
    two_shot: ClassVar[bool] = False

    ratio: float = dataclasses.field(default=0.01, kw_only=False)
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.ratio) or not 1 / _LARGEST_BLOCK <= self.ratio <= 0.5:
            raise self._refusal("ratio", f"a number from 1/{_LARGEST_BLOCK} to 0.5")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise self._refusal("momentum", "a number of at least 0 and less than 1")
        if self.momentum and not self.error_feedback:
            raise self._refusal("momentum", "0 without error feedback")

    @property
    def granule(self) -> int:
        """Number of elements of a block, of which one value is sent; gradients are padded to a multiple of it."""
        return round(1 / self.ratio)

    @property
    def states(self) -> int:
        """Number of state tensors: one for the residual; with momentum one more, before it, for the moving sum."""
        return 2 if self.momentum else super().states

    def words(self, elements: int) -> int:
        """Number of int32 words of an encoded row: one value per block, and its index in one or two bytes."""
        blocks = elements // self.granule
        return blocks + -(-blocks * self._position_type.size // 4)

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        """Encodes gradients: float32 [rows, elements] -> int32 [rows, words]: values, then their indices in blocks."""
        self._check_values(values)
        return self._pack(*self._largest(split_blocks(values, self.granule)))

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        self._check_words(words, elements)
        count = elements // self.granule
        values = from_bits(words[:, :count, tf.newaxis])
        positions = tf.cast(unpack(words[:, count:], self._position_type)[:, :count], tf.int32)
        return tf.reshape(tf.where(self._at(positions), values, 0.0), [rows_of(words), elements])

    def compress(self, values: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        self._check_values(values, state)
        if not self.error_feedback:
            return self.encode(values), ()
        if self.momentum:
            values = self.momentum * state[0] + values
        residual = state[-1] + values
        bits, positions = self._largest(split_blocks(residual, self.granule))
        sent = tf.reshape(self._at(positions), [rows_of(values), values.shape[1]])
        # Set to 0 by position instead of subtracting, since Inf - Inf is NaN.
        new = (values, residual) if self.momentum else (residual,)
        return self._pack(bits, positions), tuple(tf.where(sent, 0.0, part) for part in new)

    def for_rows(self) -> WordCodec:
        """`Float16` for sparse gradients, which have no residual, while this codec needs one to converge."""
        return Float16(min_elements=self.min_elements, start_step=self.start_step)

    @property
    def _position_type(self) -> tf.DType:
        return tf.uint8 if self.granule <= 256 else tf.uint16

    def _at(self, positions: tf.Tensor) -> tf.Tensor:
        """Mask of the sent values: their indices int32 [rows, blocks] -> bool [rows, blocks, granule]."""
        return tf.equal(tf.range(self.granule), positions[:, :, tf.newaxis])

    def _largest(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Bits and index of each block's largest magnitude: [rows, blocks, granule] -> two int32 [rows, blocks]."""
        bits = to_bits(blocks)
        largest = absmax_bits(blocks)
        same = tf.equal(tf.bitwise.bitwise_and(bits, 0x7FFFFFFF), largest[:, :, tf.newaxis])
        # Position and sign in one number, so that one minimum finds both, for the first of equal magnitudes.
        negative = tf.bitwise.right_shift(bits, 31)
        places = tf.where(same, 2 * tf.range(self.granule) - negative, 2 * self.granule)
        first = reduce_blocks(places, tf.minimum, tf.reduce_min)
        return tf.bitwise.bitwise_or(largest, tf.bitwise.left_shift(first, 31)), tf.bitwise.right_shift(first, 1)

    def _pack(self, bits: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Packs bits and indices of the sent values, int32 `[rows, blocks]` each, into int32 `[rows, words]`."""
        padding = -bits.shape[1] % (4 // self._position_type.size)
        positions = tf.pad(tf.cast(positions, self._position_type), [[0, 0], [0, padding]])
        return tf.concat([bits, pack(positions)], axis=1)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
