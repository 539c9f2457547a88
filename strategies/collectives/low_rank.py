"""All-reduce of matrices with PowerSGD, which exchanges low-rank factors."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.compression import PowerSGD

# Compiling takes tenths of a second, which the faster steps do not pay back for smaller matrices.
_COMPILED_ELEMENTS = 1 << 18


def all_reduce_low_rank(
    codec: PowerSGD,
    gradients: Sequence[tf.Tensor],
    before: Sequence[tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
    factors: Sequence[tf.Tensor],
    launcher,
    options,
) -> tuple[list[tf.Tensor], list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """Sums the gradients of all replicas approximately, by one step of PowerSGD.

    Each replica multiplies its matrix, the gradient plus the residual, with a factor Q that all replicas share. The sum
    of the products is orthonormalized. Each replica projects its matrix back onto this basis, and the sum of the back
    projections is the next Q. Two small all-reduces carry all matrices of the call: (rows + columns) * rank floats per
    matrix.

    The residual is the matrix minus the product of its factors. It is computed in the next step, while it is added to
    the gradient, which saves one pass over the matrix.

    Args:
      codec: The codec, which holds rank and options.
      gradients: float32 [rows, columns] each.
      before: For each gradient its matrix, orthonormal basis and own back projection in the last step; empty without
        error feedback.
      factors: For each gradient the factor Q, [columns, rank], equal on all replicas.
      launcher: This replica's launcher in the group of all replicas.
      options: Communication options.

    Returns:
      The sums, the new `before` and `factors`, and whether the sums are finite, bool []. An Inf or NaN on any replica
      makes the sums non-finite on all replicas.

    References:
      Vogels et al., PowerSGD, 2019, https://arxiv.org/abs/1905.13727. Unlike there, the residual uses the replica's own
      back projection. With the common one, the residuals of the replicas drift apart without bound.
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
    """A function that adds the residual of the last step to a gradient, and projects the sum onto `factor`."""

    def join(gradient, matrix, basis, own, factor):
        matrix = codec.rest(matrix, basis, own) + gradient
        return matrix, codec.project(matrix, factor)

    return tf.function(join, jit_compile=True, autograph=False) if compiled else join


def _all_reduce(tensors, launcher, options):
    """Sums a list of small tensors over all ranks in one collective."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    joined = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    parts = tf.split(launcher.all_reduce(joined, options=options), sizes)
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
