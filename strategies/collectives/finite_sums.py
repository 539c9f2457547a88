"""Whether sums of gradients are finite, that is, without Inf and NaN."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.transport import Gradient


def is_finite(total: Gradient) -> tf.Tensor:
    """Whether a summed gradient is finite, bool []; equal on all replicas because the sums are."""
    values = total.values if isinstance(total, tf.IndexedSlices) else total
    values = tf.abs(values) if values.dtype.is_complex else values
    return tf.reduce_all(tf.math.is_finite(values)) if values.dtype.is_floating else tf.constant(True)


def check_if(totals: Sequence[Gradient], positions: Sequence[int], is_unseen: tf.Tensor) -> tuple[Any, Any, Any]:
    """The arguments of a `tf.cond` that tells whether sums are finite, and looks at them only if no codec has done."""
    return is_unseen, lambda: tf.reduce_all([is_finite(totals[i]) for i in positions]), lambda: tf.constant(True)
