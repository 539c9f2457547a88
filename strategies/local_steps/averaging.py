"""Averages variables of replicas by the rows that each replica has trained on."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.step import Step, replicas

_SUM = tf.distribute.ReduceOp.SUM


def share_of(rows: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns the weight of a replica with `rows` of all rows; equal weights if no replica has rows. float32 []."""
    return tf.where(total > 0, tf.math.divide_no_nan(rows, total), 1 / replicas())


def average(step: Step, variables: list[tf.Variable], share: tf.Tensor, reducer: Any) -> None:
    """Assigns the average over replicas to the variables of this replica; `share` is its weight.

    `reducer` is the `GradientReducer` that sums.
    """
    if not variables:
        return
    values = [variable.read_value() for variable in variables]
    wide = [tf.cast(value, tf.float32) if value.dtype.size < 4 else value for value in values]
    totals = reducer.reduce(ReductionRequest(_SUM, [times_share(value, share) for value in wide]), step)
    for variable, total in zip(variables, totals, strict=True):
        variable.assign(tf.cast(total, variable.dtype))


def times_share(value: Any, share: Any) -> Any:
    """Multiplies a tensor by a share; the product with 0 is 0, also for an Inf or NaN of a replica without rows."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(times_share(value.values, share), value.indices, value.dense_shape)
    return tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))
