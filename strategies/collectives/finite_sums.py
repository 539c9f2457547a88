"""Whether sums of gradients are finite, that is, without Inf and NaN."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.compression import WordCodec


class DecodedSum(NamedTuple):
    """A sum of gradients that was decoded from words.

    Attributes:
      total: The sum, float32.
      words: The words from which it is decoded, int32 [ranks, words].
      elements: Number of elements of a row of words.
    """

    total: tf.Tensor
    words: tf.Tensor
    elements: int


def is_finite(total: Gradient) -> tf.Tensor:
    """Whether a summed gradient is finite, bool []; equal on all replicas because the sums are."""
    values = total.values if isinstance(total, tf.IndexedSlices) else total
    values = tf.abs(values) if values.dtype.is_complex else values
    return tf.reduce_all(tf.math.is_finite(values)) if values.dtype.is_floating else tf.constant(True)


def check_if(totals: Sequence[Gradient], is_unseen: tf.Tensor) -> tuple[Any, Any, Any]:
    """The arguments of a `tf.cond` that tells whether sums are finite, and looks at them only if no codec has done."""
    return is_unseen, lambda: all_true([is_finite(each) for each in totals]), lambda: tf.constant(True)


def all_finite(totals: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all values of some tensors are finite, bool []."""
    return all_true([tf.reduce_all(tf.math.is_finite(total)) for total in totals])


def all_true(conditions: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all of at least one condition hold, bool []. Takes fewer operations than `tf.reduce_all` of a list."""
    return conditions[0] if len(conditions) == 1 else tf.reduce_all(tf.stack(conditions))


def decoded_are_finite(codec: WordCodec, sums: Sequence[DecodedSum]) -> tf.Tensor:
    """Whether decoded sums are finite, bool []; reads all their values only if no bound of the codec shows it.

    Call it outside of functions that XLA compiles: its branch makes them slow to compile.
    """
    bounds = [codec.bound(each.words, each.elements) for each in sums]

    def look():
        return all_finite([each.total for each in sums])

    if any(bound is None for bound in bounds):
        return look()
    largest = [tf.reduce_sum(bound) for bound in bounds]  # Infinite, or not a number, before any of the sums is.
    total = largest[0] if len(largest) == 1 else tf.add_n(largest)
    return tf.cond(tf.math.is_finite(total), lambda: tf.constant(True), look)
