"""Codec that sends a matrix as the product of two thin matrices."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.codec import Codec, WordCodec, as_float32
from tfdist.strategies.compression.float16 import Float16

# A column is linearly dependent on the columns before it if less than this part of its length remains beside them.
_DEPENDENT = 1e-6
# Factors are divided by powers of two, so that sums over 2^3 replicas cannot overflow for any matrices.
_REPLICA_BITS = 3
# Up to this rank the unrolled product of factors is limited by memory bandwidth, not by arithmetic.
_UNROLLED_RANK = 8


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix, of the form with the smallest factors.

    The first axes give the rows, the other axes the columns. If several forms have equally small factors, the one with
    the fewest columns counts.
    """
    sizes = [int(size) for size in shape]
    forms = [(math.prod(sizes[:axis]), math.prod(sizes[axis:])) for axis in range(1, len(sizes))]
    return min(reversed(forms), key=sum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    """Sends low-rank factors of a matrix, from one power iteration per step, which starts at the last step's result.

    M is the gradient plus the residual, [rows, columns]. All workers begin the step with the same Q:

        P = orthonormalise(sum over workers of project(M, Q))
        Q_worker = back_project(M, P)
        Q = sum over workers of Q_worker                kept for the next step
        result = decode(P, Q)
        residual = M - decode(P, Q_worker)

    Sends rows * columns / (rank * (rows + columns)) times fewer bytes: 320 times fewer for 5120 x 5120 at rank 8. A
    tensor of more than two axes is divided between axes where this sends the fewest bytes.
    Costs three matrix products of that rank, a float32 copy of the gradient, and the factors.

    Each worker decodes the result itself. Workers with different CPUs may round matrix products differently, so their
    weights may drift apart.

    Args:
      rank: Number of columns of the factors. 4 suffices for matrices with thousands of columns, but not for 128.
      seed: Seed of the random factor Q in the first step.
      min_elements, start_step, error_feedback: See `Codec`.

    Raises:
      ValueError: If `rank` is not positive, or another option is out of range.

    References:
      Vogels et al., PowerSGD, 2019, https://arxiv.org/abs/1905.13727
    """

    name: ClassVar[str] = "powersgd"

    rank: int = dataclasses.field(default=8, kw_only=False)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("rank", at_least=1)
        self._check_integer("seed", at_least=0, at_most=2**31 - 1)

    def saves(self, rows: int, columns: int) -> bool:
        """Whether low-rank factors take less than half the bytes of a [rows, columns] matrix, and so are worth it."""
        return 2 * self.rank * (rows + columns) < rows * columns

    def start(self, columns: int, seed: int) -> tf.Tensor:
        """Returns the factor Q of matrix number `seed` in its first step, float32 `[columns, rank]`."""
        # A uniform distribution has the same bits on every device; the logarithms of a normal one may differ.
        return tf.random.stateless_uniform([columns, self.rank], [self.seed, seed], -1.0, 1.0, alg="philox")

    def project(self, matrix: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """Computes the first factor: matrix times scaled `q`, `[rows, columns], [columns, rank] -> [rows, rank]`."""
        _check_matrix(matrix)
        # Q is as large as the last gradient, so without scaling the product could overflow or underflow float32. A
        # column of zeros, as after a gradient of zeros, would remain zeros, so it is replaced by the first Q.
        columns = matrix.shape[1]
        bits = (columns - 1).bit_length() + _REPLICA_BITS
        with tf.init_scope():  # Once, while tracing: a graph would draw the same numbers in each step.
            first = self.start(columns, 0)
        return tf.matmul(matrix, _unit_columns(q, first) * 2.0**-bits)

    def orthonormalise(self, p: tf.Tensor) -> tf.Tensor:
        """Makes the columns of [..., rows, rank] orthonormal by modified Gram-Schmidt. Dependent columns become zeros.

        Takes some tens of operations, also for several matrices.
        """
        done: list[tf.Tensor] = []
        for column in tf.unstack(_unit_columns(p, 0.0), axis=-1):
            length = tf.norm(column, axis=-1, keepdims=True)
            # Twice, because the remainder of an almost dependent column is mostly rounding error.
            for other in done * 2:
                column -= other * tf.reduce_sum(other * column, axis=-1, keepdims=True)
            left = tf.norm(column, axis=-1, keepdims=True)
            # A comparison with NaN is false, so columns with NaN are kept.
            depends = left <= _DEPENDENT * length
            done.append(tf.where(depends, 0.0, column / tf.where(depends, 1.0, left)))
        return tf.stack(done, axis=-1)

    def back_project(self, matrix: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
        """Computes the second factor: `[rows, columns], [rows, rank] -> [columns, rank]`.

        The result is divided by a power of two, with which `decode` multiplies, because the length of a column of the
        matrix may exceed the range of float32. Takes several times as long under `jit_compile=True`.
        """
        _check_matrix(matrix)
        # Transposing the thin result is faster than transposing the matrix.
        return tf.transpose(tf.matmul(p / _headroom(p), matrix, transpose_a=True))

    def decode(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """Multiplies both factors to the decoded matrix: `[rows, rank], [columns, rank] -> [rows, columns]`."""
        return tf.matmul(p * _headroom(p), q, transpose_b=True)

    def rest(self, matrix: tf.Tensor, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """Computes the residual, `matrix - decode(p, q)`: [rows, columns], [rows, rank], [columns, rank]."""
        if self.rank > _UNROLLED_RANK:
            return matrix - self.decode(p, q)
        # Once compiled, this is one pass over the matrix.
        p, q = tf.split(p * _headroom(p), self.rank, axis=1), tf.split(tf.transpose(q), self.rank)
        return matrix - tf.add_n([column * row for column, row in zip(p, q, strict=True)])

    def round_trip(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = as_float32(values, "PowerSGD")
        if values.shape.rank < 2:
            raise ValueError(f"PowerSGD takes values with at least two axes, got shape {values.shape}. Reshape them.")
        if not values.shape.num_elements():
            return values, values
        rows, columns = as_matrix(values.shape)
        matrix = tf.reshape(values, [rows, columns])
        p = self.orthonormalise(self.project(matrix, self.start(columns, 0)))
        q = self.back_project(matrix, p)
        return tuple(tf.reshape(part, values.shape) for part in (self.decode(p, q), self.rest(matrix, p, q)))

    def for_rows(self) -> WordCodec:
        """`Float16` for sparse gradients, which have no residual, while this codec needs one to converge."""
        return Float16(min_elements=self.min_elements, start_step=self.start_step)


def _unit_columns(matrix: tf.Tensor, instead: tf.Tensor | float) -> tf.Tensor:
    """Divides columns by their largest magnitude, so that squares stay in range; `instead` replaces zero columns."""
    absmax = tf.reduce_max(tf.abs(matrix), axis=-2, keepdims=True)
    vanishes = absmax == 0
    return tf.where(vanishes, instead, matrix / tf.where(vanishes, 1.0, absmax))


def _headroom(p: tf.Tensor) -> float:
    """Divisor that keeps factors in range: a power of two, at least sqrt(rows of `p`) times 2^`_REPLICA_BITS`."""
    return 2.0 ** (((p.shape[0] - 1).bit_length() + 1) // 2 + _REPLICA_BITS)


def _check_matrix(matrix: tf.Tensor) -> None:
    if len(matrix.shape) != 2 or tf.as_dtype(matrix.dtype) != tf.float32:
        raise ValueError(
            f"PowerSGD takes float32 [rows, columns], got {tf.as_dtype(matrix.dtype).name} {list(matrix.shape)}. Cast "
            "and reshape it."
        )
