"""Clips gradients of which a replica has only its part, by the norms of the whole gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def clipped(
    optimizer: Any, gradients: list[Any], copies: Sequence[int], sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]
) -> list[Any]:
    """Clips summed gradients by the options of a Keras optimizer, as it clips whole gradients.

    Clipping by norms costs an exchange of one number per gradient that is divided.

    Args:
      optimizer: The optimizer, with `clipnorm`, `global_clipnorm` or `clipvalue`.
      gradients: The gradients, or parts of them.
      copies: For each of them, the number of replicas that have the same part; 0 for a whole gradient.
      sum_over_replicas: Sums a tensor [n] over all replicas.
    """
    norm, value = optimizer.clipnorm, optimizer.clipvalue
    if norm and norm > 0:
        norms = tf.unstack(tf.sqrt(_squares(gradients, copies, sum_over_replicas)))
        return [_scaled(each, norm, tf.maximum(whole, norm)) for each, whole in zip(gradients, norms, strict=True)]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        limit = optimizer.global_clipnorm
        whole = tf.sqrt(tf.reduce_sum(_squares(gradients, copies, sum_over_replicas)))
        # The last term makes the scale NaN if the norm is not finite, as in Keras.
        scale = limit * tf.minimum(1.0 / whole, 1.0 / limit) + (whole - whole)
        return [_scaled(each, scale) for each in gradients]
    if value and value > 0:
        return [keras.ops.clip(each, -value, value) for each in gradients]
    return gradients


def _squares(gradients, copies, sum_over_replicas) -> tf.Tensor:
    """Returns the sums of the squares of whole gradients, float32 [gradients]."""
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    squares = [tf.cast(tf.reduce_sum(tf.square(each)), tf.float32) for each in values]
    parts = [i for i, number in enumerate(copies) if number]
    if parts:
        totals = sum_over_replicas(tf.stack([squares[i] for i in parts]))
        for i, total in zip(parts, tf.unstack(totals), strict=True):
            squares[i] = total / copies[i] if copies[i] > 1 else total
    return tf.stack(squares)


def _scaled(gradient: Any, factor: Any, divisor: Any = None) -> Any:
    """Multiplies a gradient by `factor`, then divides it, in the order of `tf.clip_by_norm`."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_sparse else gradient
    values = values * tf.cast(factor, values.dtype)
    if divisor is not None:
        values = values / tf.cast(divisor, values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sparse else values
