"""Gradients of one kind on all replicas, which each run Python by itself where nothing is traced.

There a replica may take another path than others, by the values of its rows, and have gradients of other variables. In
a graph replicas have the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.step import Step

# What a gradient may be, and the first that any replica has all others can be made: dense, or rows by their indices.
_KINDS = ("dense", tf.int64, tf.int32)


def of_one_kind(step: Step, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
    """`gradients`, with zeros for `None` where another replica has one; dense if they are so anywhere, else rows.

    What only replicas without rows have is none. Costs an exchange of three numbers for each, if nothing is traced.
    """
    if _are_traced() or len(gradients) != len(variables):  # Which Keras refuses.
        return gradients
    counts = _replicas_by_kind(step, gradients, bool(step.has_rows))
    return [_of_kind(*each) for each in zip(gradients, variables, counts, strict=True)]


def check_of_one_kind(step: Step, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Refuses gradients of which Keras has left out those that are `None`, if these are others on other replicas.

    Costs an exchange of three numbers for each variable of the optimizer, if nothing is traced.

    Raises:
      ValueError: On all replicas.
    """
    if _are_traced():
        return
    everyone: list[Any] = [None] * len(optimizer._trainable_variables)
    for place, gradient in zip(_tf.places_in_optimizer(optimizer, variables), gradients, strict=False):
        everyone[place] = gradient
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    unlike = np.flatnonzero(np.any(_replicas_by_kind(step, everyone, True) % replicas, axis=1))
    if len(unlike):
        paths = ", ".join(repr(optimizer._trainable_variables[place].path) for place in unlike)
        raise ValueError(
            f"All replicas must give optimizer {optimizer.name!r} gradients of the same variables, but those of "
            f"{paths} are None on some, or of rows on some only. Call `apply` on "
            "`strategy.distributed_optimizer(optimizer)` instead, which takes them for zeros there."
        )


def _are_traced():
    return not tf.executing_eagerly() or tf.distribute.get_replica_context().num_replicas_in_sync == 1


def _replicas_by_kind(step, gradients, counts):
    """How many replicas that count have each gradient of each kind, int [gradients, kinds]."""
    own = np.array([[counts and _kind(gradient) == kind for kind in _KINDS] for gradient in gradients], "float32")
    return step.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(own)).numpy().astype(int)


def _kind(gradient):
    if gradient is None:
        return None
    return gradient.indices.dtype if isinstance(gradient, tf.IndexedSlices) else "dense"


def _of_kind(gradient, variable, counts):
    """A gradient, or none, as what so many replicas have of each kind asks for."""
    if not any(counts):
        return None
    kind, shape = _KINDS[np.flatnonzero(counts)[0]], tuple(variable.shape)
    if kind == "dense":
        if isinstance(gradient, tf.IndexedSlices):
            return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])
        return tf.zeros(shape, variable.dtype) if gradient is None else gradient
    if gradient is None:
        gradient = tf.IndexedSlices(tf.zeros((0, *shape[1:]), variable.dtype), tf.zeros([0], kind))
    if not isinstance(gradient, tf.IndexedSlices):  # Of a replica without rows, so zeros.
        return tf.IndexedSlices(gradient[:0], tf.zeros([0], kind), tf.constant(shape, kind))
    return tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, kind), tf.constant(shape, kind))
