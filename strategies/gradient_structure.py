"""Makes all replicas exchange the same kinds of gradients (dense, sparse or None) in eager mode.

In eager mode each replica runs its own Python code, so it may take another branch and have other variables' gradients.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.strategies.step import Step, replicas

# Dense, or sparse with this type of indices. If replicas differ, all use the first of these that any replica has.
_KINDS = ("dense", tf.int64, tf.int32)


def of_one_kind(step: Step, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Converts a replica's `gradients` so that all replicas have the same kinds: dense, sparse or None.

    None becomes zeros if another replica has a gradient. A gradient that is dense on any replica becomes dense on all.
    Replicas without rows of the batch do not count. Costs an exchange of three numbers per gradient, in eager mode.
    """
    if _are_alike_anyway() or len(gradients) != len(variables):  # Keras raises for a wrong number of gradients.
        return gradients
    counts = _replicas_by_kind(step, gradients, bool(step.has_rows))
    return [_of_kind(*each) for each in zip(gradients, variables, counts, strict=True)]


def check_of_one_kind(step: Step, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Fails if replicas have gradients of different kinds, after Keras has removed gradients that are None.

    Costs an exchange of three numbers per variable of the optimizer, in eager mode only. All replicas raise the error.
    """
    if _are_alike_anyway():
        return
    everyone: list[Any] = [None] * len(optimizer._trainable_variables)
    for place, gradient in zip(keras_internals.places_in_optimizer(optimizer, variables), gradients, strict=False):
        everyone[place] = gradient
    unlike = np.flatnonzero(np.any(_replicas_by_kind(step, everyone, True) % replicas(), axis=1))
    if len(unlike):
        paths = ", ".join(repr(optimizer._trainable_variables[place].path) for place in unlike)
        raise ValueError(
            f"All replicas must give optimizer {optimizer.name!r} gradients of the same variables, but the gradients "
            f"of {paths} are None, or sparse, on some replicas only. Call `apply` on "
            "`strategy.distributed_optimizer(optimizer)` instead, which replaces None by zeros."
        )


def _are_alike_anyway():
    return not tf.executing_eagerly() or replicas() == 1


def _replicas_by_kind(step, gradients, counts):
    """The number of replicas (only with true `counts`) that have each kind of a gradient: int [gradients, kinds]."""
    own = np.array([[counts and _kind(gradient) == kind for kind in _KINDS] for gradient in gradients], "float32")
    return step.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(own)).numpy().astype(int)


def _kind(gradient):
    if gradient is None:
        return None
    return gradient.indices.dtype if isinstance(gradient, tf.IndexedSlices) else "dense"


def _of_kind(gradient, variable, counts):
    """Converts a gradient, or None, to the kind that follows from `counts`, the numbers of replicas per kind."""
    if not any(counts):
        return None
    kind, shape = _KINDS[np.flatnonzero(counts)[0]], tuple(variable.shape)
    if kind == "dense":
        if isinstance(gradient, tf.IndexedSlices):
            return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])
        return tf.zeros(shape, variable.dtype) if gradient is None else gradient
    if gradient is None:
        gradient = tf.IndexedSlices(tf.zeros((0, *shape[1:]), variable.dtype), tf.zeros([0], kind))
    if not isinstance(gradient, tf.IndexedSlices):  # This replica has no rows of the batch, so its gradient is zero.
        return tf.IndexedSlices(gradient[:0], tf.zeros([0], kind), tf.constant(shape, kind))
    return tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, kind), tf.constant(shape, kind))
