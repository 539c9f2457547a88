"""Sums the gradient rows of equal ids, and makes rows again with the same sum and sum of squares.

Keras' adaptive optimizers square each row of a sparse gradient by itself. An id that occurs k times adds the squares of
k rows to the optimizer's state, so the sum of the rows does not suffice to update as Keras does. But any rows with this
sum and this sum of squares do.
"""

from typing import Literal, TypeAlias

import tensorflow as tf

Detail: TypeAlias = Literal["sums", "squares", "rows"]
"""What an optimizer must know of the rows of an id: their sum, also the sum of their squares, or each row."""

# More rows than an id can need, unless its gradients are not finite.
_MOST_ROWS = 1 << 16
# So that equal rows do not count as one more by rounding.
_ROUNDING = 2e-6


def squares_of_each(values: tf.Tensor, segment: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
    """Returns the sums of the squares of the rows of each segment: [rows, n] -> float32 [segments, n]."""
    return tf.math.unsorted_segment_sum(tf.square(tf.cast(values, tf.float32)), segment, segments)


def rows_with(sums: tf.Tensor, squares: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes rows with given sums and sums of squares: at least two rows for each sum.

    One of k rows is above their mean, one is below it by the same amount, and the others equal it. Equal rows have the
    least sum of squares, which sets the least k.

    Args:
      sums: [sums, n].
      squares: float32 [sums, n].

    Returns:
      The rows, and the index of the sum to which each belongs.
    """
    total = tf.cast(sums, tf.float32)
    ratio = tf.reduce_max(tf.math.divide_no_nan(tf.square(total), squares), axis=1)
    ratio = tf.where(tf.math.is_finite(ratio), ratio, 2.0)
    number = tf.cast(tf.clip_by_value(tf.math.ceil(ratio * (1 - _ROUNDING)), 2.0, _MOST_ROWS), tf.int32)
    k = tf.cast(number, tf.float32)[:, None]
    mean = total / k
    apart = tf.sqrt(tf.maximum(squares / k - tf.square(mean), 0.0) * k / 2.0)
    owner = tf.repeat(tf.range(tf.size(number)), number)
    place = tf.range(tf.size(owner)) - tf.gather(tf.cumsum(number, exclusive=True), owner)
    sign = tf.cast(tf.equal(place, 0), tf.float32) - tf.cast(tf.equal(place, 1), tf.float32)
    rows = tf.gather(mean, owner) + sign[:, None] * tf.gather(apart, owner)
    return tf.cast(rows, sums.dtype), owner
