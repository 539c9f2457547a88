"""Detects an Inf or NaN in the loss or gradients of a replica, so that the logs of all workers can report it.

Checks only a few elements of a few gradients, since a pass over all elements would take some percent of a step. An Inf
or NaN that arises in the backward pass reaches all elements of the gradients of the layers before it. An Inf or NaN in
a row of the input reaches a whole row of the first matrix. Any other makes the loss of the next step Inf or NaN, and
that step reports it.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

FINITE = 0
_LOSS, _GRADIENTS = 1, 2
_WORDS = {_LOSS: "the loss", _GRADIENTS: "gradients", _LOSS + _GRADIENTS: "the loss and gradients"}
_MOST = 8  # Largest number of gradients to check.


def in_words(number: int) -> str:
    """Names in words, for a warning, the values with an Inf or NaN, by a number that `told` has returned."""
    return _WORDS[number]


def told(losses: Sequence[tf.Tensor], samples: Sequence[tf.Tensor], has_rows: Any) -> tf.Tensor:
    """Returns a number that tells if losses, gradients or both of a replica have an Inf or NaN; `FINITE` if neither.

    `samples` are elements of its gradients, from `sampled`. Without rows, the loss is that of a stand-in row and does
    not count.
    """
    loss = tf.logical_and(_is_broken(losses), has_rows)
    return _LOSS * tf.cast(loss, tf.float32) + _GRADIENTS * tf.cast(_is_broken(samples), tf.float32)


def sampled(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Takes elements of some gradients, to look for Inf and NaN: at least one of each row and column of a matrix.

    Costs a copy of as many elements as the longer side of each matrix has, for at most eight gradients.
    """
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None]
    values = [each for each in values if each.dtype.is_floating]
    return [_diagonal(each) for each in values[:: math.ceil(len(values) / _MOST) or 1]]


def _diagonal(values: tf.Tensor) -> tf.Tensor:
    """Returns few elements of a gradient, at equal distances, with at least one of each row and column."""
    columns = (values.shape[-1] if values.shape.rank else 1) or 1
    elements = values.shape.num_elements()
    stride = min(columns, columns if elements is None else max(1, elements // columns))
    while math.gcd(stride, columns) > 1:  # Otherwise some columns have no element.
        stride -= 1
    return tf.reshape(values, [-1])[::stride]


def _is_broken(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    by_dtype: dict[tf.DType, list[tf.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tf.reshape(tensor, [-1]))
    finite = [tf.reduce_all(tf.math.is_finite(tf.concat(group, 0))) for group in by_dtype.values()]
    return tf.logical_not(tf.reduce_all(finite)) if finite else tf.constant(False)
