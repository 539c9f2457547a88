"""The gradients of one `PowerSGD` codec: their all-reduce, which exchanges low-rank factors, and residuals."""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.buckets import fill_buckets
from tfdist.strategies.collectives.finite_sums import all_true
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import Gradient, Transport
from tfdist.strategies.compression import PowerSGD
from tfdist.strategies.compression.power_sgd import as_matrix

# Compiling takes about a tenth of a second for each shape. For smaller matrices faster steps do not pay it back. All
# matrices of one shape that travel together count as one.
_COMPILED_ELEMENTS = 1 << 18
# Matrices exchanged together, so that the first ones leave while the backward pass still runs. Their factors have a
# hundredth of the bytes, and an exchange takes about a millisecond.
_MATRICES_BYTES = 16 << 20


class PowerSGDGroup:
    """The gradients of an optimizer that share one `PowerSGD` codec, as matrices, and their exchange in each step.

    With error feedback the codec states are three per matrix: the matrix of the last step, its basis and this replica's
    back projection. The factors of all matrices, which are equal on all replicas, follow.
    """

    def __init__(self, codec: PowerSGD, positions: list[int], gradients: Sequence[Gradient], seed: int):
        self.codec, self.positions = codec, positions
        self._shapes = [as_matrix(gradients[i].shape) for i in positions]
        self._seed = seed
        like = [tf.TensorSpec(shape, tf.float32) for shape in self._shapes]
        buckets = fill_buckets(like, _MATRICES_BYTES)
        self._groups = list(dict.fromkeys(tuple(segment.tensor for segment in bucket) for bucket in buckets))
        self._factors = [(columns, codec.rank) for _, columns in self._shapes]
        before = [((rows, cols), (rows, codec.rank), (cols, codec.rank)) for rows, cols in self._shapes]
        kept = [shape for shapes in before for shape in shapes] if codec.error_feedback else []
        self.state_shapes = [*kept, *self._factors]
        self.num_states = len(self.state_shapes)
        self.kinds = 1 + codec.error_feedback

    @property
    def num_buckets(self) -> int:
        """Number of groups of matrices, each of which takes up to four collectives."""
        return len(self._groups)

    def initial_states(self):
        """The codec states before the first step; None stands for zeros."""
        codec = self.codec
        factors = [
            codec.start(columns, self._seed + position)
            for position, (_, columns) in zip(self.positions, self._shapes, strict=True)
        ]
        return [None] * (self.num_states - len(factors)) + factors

    def sent_bytes(self, collectives: Collectives) -> float:
        """Bytes that a replica sends per step for these gradients, for counts of traffic."""
        sides = [[self._shapes[i][side] for i in group] for group in self._groups for side in range(2)]
        return sum(collectives.sum_bytes(4 * self.codec.rank * sum(side)) for side in sides)

    def exchange(self, gradients, states, replica: int, collectives: Collectives, options: Any, watch: Stopwatch):
        """Returns the sums of the gradients, new codec states, and whether the sums are finite; as in `CodecGroup`."""
        before, factors = self._apart(states)
        totals: list[Any] = [None] * len(self._shapes)
        finite = []
        transport = watch.timed(collectives.among_all(replica))
        for group in self._groups:
            matrices = watch.begin([tf.reshape(tf.cast(gradients[i], tf.float32), self._shapes[i]) for i in group])
            sums, after, new_factors, is_finite = all_reduce_low_rank(
                self.codec,
                matrices,
                [before[i] for i in group] if before else [],
                [factors[i] for i in group],
                transport,
                options,
            )
            sums, after, new_factors = watch.end([sums, after, new_factors])
            finite.append(is_finite)
            for place, i in enumerate(group):
                totals[i] = tf.cast(tf.reshape(sums[place], gradients[i].shape), gradients[i].dtype)
                factors[i] = new_factors[place]
                if before:
                    before[i] = after[place]
        return totals, [*(state for then in before for state in then), *factors], all_true(finite)

    def uncompressed(self, gradients, replica: int, collectives: Collectives, options: Any):
        """Returns the sums of the gradients, before the first step of the codec."""
        return collectives._all_reduce(tf.distribute.ReduceOp.SUM, list(gradients), replica, options)

    def residuals(self, states):
        """The residuals that follow from the codec states of a replica. Costs one pass over the matrices."""
        return [self.codec.rest(*then) for then in self._apart(states)[0]]

    def pending(self, states, replica: int, collectives: Collectives):
        """Returns a replica's codec states, [kind][gradient], to be summed over replicas; factors count once."""
        residuals, factors = self.residuals(states), self._apart(states)[1]
        first = collectives.is_first(replica)
        kinds = [[residual.numpy() for residual in residuals]] if residuals else []
        return [*kinds, [factor.numpy() if first else np.zeros_like(factor.numpy()) for factor in factors]]

    def spread(self, kinds, replica: int, collectives: Collectives):
        """Inverse of `pending`. Returns codec states such that `pending` of all replicas sums to `kinds`."""
        replicas, rank = collectives.ranks * collectives.spread, self.codec.rank
        states = []
        for matrix in (matrix for residuals in kinds[:-1] for matrix in residuals):
            # With zeros as basis and back projection, the residual is the matrix itself.
            states += [matrix / replicas, *(tf.zeros([axis, rank]) for axis in matrix.shape)]
        return [*states, *kinds[-1]]

    def _apart(self, states):
        """Splits the codec states: `[matrix, basis, back projection]` per matrix, if any; and the factors of all."""
        own, factors = list(states[: -len(self._factors)]), list(states[-len(self._factors) :])
        return [own[i : i + 3] for i in range(0, len(own), 3)], factors


def all_reduce_low_rank(
    codec: PowerSGD,
    gradients: Sequence[tf.Tensor],
    before: Sequence[tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
    factors: Sequence[tf.Tensor],
    transport: Transport,
    options: Any,
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
      transport: This replica's transport to all replicas.
      options: TensorFlow's `CommunicationOptions` for collectives.

    Returns:
      The sums, the new `before` and `factors`, and whether the sums are finite, bool []. An Inf or NaN on any replica
      makes the sums non-finite on all replicas.

    References:
      Vogels et al., PowerSGD, 2019, https://arxiv.org/abs/1905.13727. Unlike there, the residual uses the replica's own
      back projection. With the common one, the residuals of the replicas drift apart without bound.
    """
    if before:
        alike = collections.Counter(tuple(gradient.shape) for gradient in gradients)
        joined = zip(gradients, before, factors, strict=True)
        pairs = [
            _join(codec, _is_large(gradient, alike[tuple(gradient.shape)]))(gradient, *then, factor)
            for gradient, then, factor in joined
        ]
    else:
        pairs = [(gradient, codec.project(gradient, q)) for gradient, q in zip(gradients, factors, strict=True)]
    matrices, projections = zip(*pairs, strict=True)
    sums, are_finite = _all_reduce(projections, transport, options)
    bases = _orthonormalised(codec, sums)
    own = [codec.back_project(matrix, basis) for matrix, basis in zip(matrices, bases, strict=True)]
    common, finite = _all_reduce(own, transport, options)
    totals = [codec.decode(basis, factor) for basis, factor in zip(bases, common, strict=True)]
    finite = are_finite & finite
    after = list(zip(matrices, bases, own, strict=True)) if before else []
    return totals, after, common, finite


def _is_large(matrix: tf.Tensor, number: int) -> bool:
    """Whether to compile the code for a `number` of matrices of one shape, which XLA compiles once."""
    return number * matrix.shape.num_elements() >= _COMPILED_ELEMENTS


def _orthonormalised(codec: PowerSGD, matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Makes the columns of matrices orthonormal: all matrices of one shape together, which takes fewer operations."""
    alike: dict[int, list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape[0], []).append(i)
    bases: list[Any] = [None] * len(matrices)
    for places in alike.values():
        together = codec.orthonormalise(tf.stack([matrices[i] for i in places]))
        for i, basis in zip(places, tf.unstack(together), strict=True):
            bases[i] = basis
    return bases


@functools.cache
def _join(codec: PowerSGD, compiled: bool):
    """A function that adds the residual of the last step to a gradient, and projects the sum onto `factor`."""

    def join(gradient, matrix, basis, own, factor):
        matrix = codec.rest(matrix, basis, own) + gradient
        return matrix, codec.project(matrix, factor)

    return tf.function(join, jit_compile=True, autograph=False) if compiled else join


def _all_reduce(tensors, transport, options):
    """Sums the factors of several matrices, small tensors, over all ranks in one collective.

    Returns the sums, and whether all of them are finite, bool [].
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    joined = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    total = transport.all_reduce(joined, options)
    sums = [tf.reshape(part, tensor.shape) for part, tensor in zip(tf.split(total, sizes), tensors, strict=True)]
    return sums, tf.reduce_all(tf.math.is_finite(total))
