"""Squared norms of a replica's gradient and of the sum over replicas, from which the gradient noise scale follows."""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.sparse import sum_duplicates

MEASURES = 2  # Numbers that a replica adds to the report of a step.


class GradientNorms:
    """Squared norms of the gradients of one replica's step, over all optimizers of the model.

    Costs two passes over the gradients. Gradients that are summed in the backward pass, such as those of divided
    weights, are left out, since no replica has its own.
    """

    def __init__(self) -> None:
        self._own: list[tf.Tensor] = []
        self._whole: list[tf.Tensor] = []
        self._parts: list[tf.Tensor] = []

    def note(
        self, own: Sequence[Any], summed: Sequence[Any], divided: Collection[int], left_out: Collection[int]
    ) -> None:
        """Adds the gradients of an optimizer: those of this replica, and the sums over all replicas.

        Args:
          own: The gradients of this replica, weighted by its share, so that their sum is that of the global batch.
          summed: The sums. This replica has only its part of some.
          divided: The indices of these sums.
          left_out: The indices of gradients that do not count.
        """
        for i, (mine, total) in enumerate(zip(own, summed, strict=True)):
            if mine is not None and i not in left_out:
                self._own.append(_square(mine))
                (self._parts if i in divided else self._whole).append(_square(total))

    def of_replica(self, replica: Any) -> list[tf.Tensor]:
        """Returns the squared norm of this replica's gradient, and a number whose sum over replicas is that of the sum.

        Args:
          replica: The number of this replica among all replicas.
        """
        is_first = tf.cast(tf.equal(replica, 0), tf.float32)  # All replicas have the same whole sums.
        return [_total(self._own), is_first * _total(self._whole) + _total(self._parts)]


def check_measurable(step: Any) -> None:
    """Refuses to measure gradients that an optimizer exchanges in a branch, as their norms are not known outside of it.

    Raises:
      ValueError: If the exchange is in a branch.
    """
    if step.in_branch:
        raise ValueError(
            "The norms of gradients, which a tfdist.callbacks.AdaptiveBatch needs, can be measured only if the "
            "optimizer exchanges gradients in each step. This optimizer does so in a branch, as with "
            'gradient_accumulation_steps or a LossScaleOptimizer. Leave these out; use "mixed_bfloat16", which needs '
            "no loss scale; or leave out AdaptiveBatch."
        )


def _square(gradient: Any) -> tf.Tensor:
    values = sum_duplicates(gradient).values if isinstance(gradient, tf.IndexedSlices) else gradient
    return 2 * tf.nn.l2_loss(tf.cast(values, tf.float32))


def _total(squares: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(squares) if squares else tf.constant(0.0)
