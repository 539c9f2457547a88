"""All-reduce of matrices by factors of low rank: PowerSGD."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.compression import PowerSGD

# What compiling saves a step is not worth its tenths of a second for a small matrix.
_COMPILED_ELEMENTS = 1 << 18


def all_reduce_low_rank(
    codec: PowerSGD,
    gradients: Sequence[tf.Tensor],
    before: Sequence[tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
    factors: Sequence[tf.Tensor],
    launcher,
    options,
) -> tuple[list[tf.Tensor], list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """Sums the gradients of all replicas, approximately.

    Each replica projects its matrix, the gradient plus what the step before left of its own, onto the columns of a
    factor Q that all share; the sums of the projections are made orthonormal, each replica projects back, and the sum
    of that is the next Q. Two small all-reduces carry all matrices of the call. Traffic a replica: that of an
    all-reduce of (rows + columns) * rank floats a matrix.

    What a step leaves is its matrix without the product of its factors. It is made in the next step, as it is added to
    the gradient: one pass less over the matrix than to keep it.

    Args:
      codec: Rank and options.
      gradients: float32 [rows, columns] each.
      before: Of the step before: its matrix, orthonormal basis and own back projection; none without error feedback.
      factors: Q, [columns, rank] each, equal on all replicas.
      launcher: Of the group of all replicas.
      options: Communication options.

    Returns:
      The sums; what `before` and `factors` are after this step; whether the sums are finite, bool []. An Inf or NaN on
      any replica makes the sums non-finite on all.

    References:
      Vogels et al., PowerSGD, 2019, https://arxiv.org/abs/1905.13727. The residual is taken against this replica's own
      back projection: against the common one the replicas' residuals drift apart without bound.
    """
    if before:
        joined = zip(gradients, before, factors, strict=True)
        pairs = [_join(codec, _is_large(gradient))(gradient, *then, factor) for gradient, then, factor in joined]
    else:
        pairs = [(gradient, codec.project(gradient, q)) for gradient, q in zip(gradients, factors, strict=True)]
    matrices, projections = zip(*pairs, strict=True)
    bases = [codec.orthonormalise(basis) for basis in _all_reduce(projections, launcher, options)]
    own = [codec.back_project(matrix, basis) for matrix, basis in zip(matrices, bases, strict=True)]
    common = _all_reduce(own, launcher, options)
    totals = [codec.decode(basis, factor) for basis, factor in zip(bases, common, strict=True)]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(small)) for small in [*bases, *common]])
    after = list(zip(matrices, bases, own, strict=True)) if before else []
    return totals, after, common, finite


def _is_large(matrix: tf.Tensor) -> bool:
    return matrix.shape.num_elements() >= _COMPILED_ELEMENTS


@functools.cache
def _join(codec: PowerSGD, compiled: bool):
    """A gradient plus what the step before left, and the projection of that."""

    def join(gradient, matrix, basis, own, factor):
        matrix = codec.rest(matrix, basis, own) + gradient
        return matrix, codec.project(matrix, factor)

    return tf.function(join, jit_compile=True, autograph=False) if compiled else join


def _all_reduce(tensors, launcher, options):
    """Sums small tensors of all ranks as one."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    joined = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    parts = tf.split(launcher.all_reduce(joined, options=options), sizes)
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
