"""All-reduce of matrices by factors of low rank: PowerSGD."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.compression import PowerSGD

# What compiling saves a step is not worth its tenths of a second for a small matrix.
_COMPILED_ELEMENTS = 1 << 18


def all_reduce_low_rank(
    codec: PowerSGD,
    matrices: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    factors: Sequence[tf.Tensor],
    launcher,
    options,
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
    """Sums the matrices of all replicas, approximately.

    Each replica projects its matrix onto the columns of a factor Q that all share; the sums of the projections are made
    orthonormal, each replica projects back, and the sum of that is the next Q. Two small all-reduces carry all matrices
    of the call. Traffic a replica: that of an all-reduce of (rows + columns) * rank floats a matrix.

    Args:
      codec: Rank and options.
      matrices: float32 [rows, columns] each.
      residuals: What earlier steps left behind, of the same shapes; none without error feedback.
      factors: Q, [columns, rank] each, equal on all replicas.
      launcher: Of the group of all replicas.
      options: Communication options.

    Returns:
      The sums; the residuals and the factors as they are after this step; whether the sums are finite, bool []. An Inf
      or NaN on any replica makes the sums non-finite on all.

    References:
      Vogels et al., PowerSGD, 2019, https://arxiv.org/abs/1905.13727. The residual is taken against this replica's own
      back projection: against the common one the replicas' residuals drift apart without bound.
    """
    if residuals:
        matrices = [matrix + residual for matrix, residual in zip(matrices, residuals, strict=True)]
    pairs = list(zip(matrices, factors, strict=True))
    bases = _all_reduce([codec.project(matrix, factor) for matrix, factor in pairs], launcher, options)
    bases = [codec.orthonormalise(basis) for basis in bases]
    own = [codec.back_project(matrix, basis) for matrix, basis in zip(matrices, bases, strict=True)]
    common = _all_reduce(own, launcher, options)
    totals = [codec.decode(basis, factor) for basis, factor in zip(bases, common, strict=True)]
    if residuals:
        kept = zip(matrices, bases, own, strict=True)
        residuals = [_rest(codec, _is_large(matrix))(matrix, basis, factor) for matrix, basis, factor in kept]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(small)) for small in [*bases, *common]])
    return totals, list(residuals), common, finite


def _is_large(matrix: tf.Tensor) -> bool:
    return matrix.shape.num_elements() >= _COMPILED_ELEMENTS


@functools.cache
def _rest(codec: PowerSGD, compiled: bool):
    return tf.function(codec.rest, jit_compile=True, autograph=False) if compiled else codec.rest


def _all_reduce(tensors, launcher, options):
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    joined = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    parts = tf.split(launcher.all_reduce(joined, options=options), sizes)
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
