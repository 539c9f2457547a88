"""Codec that sends the upper half of each float32."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.block_packing import pack, unpack
from tfdist.strategies.compression.codec import WordCodec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BFloat16(WordCodec):
    """Sends gradients as bfloat16 numbers, which have the range of float32 and 8 bits of precision.

    Halves the traffic. Costs one pass over the gradient and no state. `Float16` sends as many bytes with 3 more bits.

    Args:
      min_elements, start_step: See `Codec`.
      error_feedback: Whether the error is added to the next gradient; see `Codec`. Off by default, since
        rounding changes a value by at most 0.4 %, in either direction.

    Raises:
      ValueError: If an option is out of range.

    References:
      Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, https://arxiv.org/abs/1905.12322
    """

    name: ClassVar[str] = "bfloat16"

    error_feedback: bool = False

    @property
    def granule(self) -> int:
        return 2

    def words(self, elements: int) -> int:
        return elements // 2

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        self._check_values(values)
        # Clamp finite values, since the largest float32 would round to Inf. Inf and NaN are kept.
        largest = tf.bfloat16.max
        clamped = tf.where(tf.math.is_finite(values), tf.clip_by_value(values, -float(largest), float(largest)), values)
        return pack(tf.cast(clamped, tf.bfloat16))

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        self._check_words(words, elements)
        return tf.cast(unpack(words, tf.bfloat16), tf.float32)
