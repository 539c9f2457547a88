"""A product of two thin matrices in place of a matrix."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdist.strategies.compression.codec import Codec, WordCodec, as_float32
from tfdist.strategies.compression.float16 import Float16

__all__ = ["PowerSGD"]

# A column of which less than this is left, beside the columns before it, is their sum but for rounding.
_DEPENDENT = 1e-6
# Sums over as many replicas stay in range, whatever their matrices hold: powers of two that factors are divided by.
_REPLICA_BITS = 3
# Up to here a product of factors takes as long as memory does.
_UNROLLED_RANK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    """Low-rank approximation of matrices by one step of power iteration, which goes on from step to step.

    With M the gradient plus the residual, [rows, columns], all workers of the same Q:

        P = orthonormalise(sum of project(M, Q))
        Q of a worker = back_project(M, P)
        Q = sum of the Qs of workers                 kept for the next step
        result = decode(P, Q)
        residual = M - decode(P, Q of the worker)

    Cuts traffic of a matrix rows * columns / (rank * (rows + columns)) times, at rank 8 for 5120 x 5120
    320x. Costs three matrix products of that rank, a float32 copy of the gradient, and the factors.

    Args:
      rank: Columns of the factors. With 4 a matrix of thousands of columns has enough, one of 128 too few.
      seed: Of the first Q.
      min_elements: See `Codec`.
      start_step: See `Codec`.
      error_feedback: See `Codec`.

    Raises:
      ValueError: If `rank` is not positive, or another option is out of range.

    Workers with unlike CPUs may round matrix products in other ways, and so drift apart: each decodes by itself.

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
        """Whether the factors are less than half of a [rows, columns] matrix."""
        return 2 * self.rank * (rows + columns) < rows * columns

    def start(self, rows: int, columns: int, seed: int) -> tf.Tensor:
        """The first Q of a [rows, columns] matrix, float32 [columns, rank]: the same wherever `seed` is.

        Args:
          rows: Rows of the matrix.
          columns: Columns of the matrix.
          seed: Tells matrices apart, from 0 up.
        """
        del rows
        # Uniform: the same bits on every device, which the logarithms of a normal distribution are not.
        return tf.random.stateless_uniform([columns, self.rank], [self.seed, seed], -1.0, 1.0, alg="philox")

    def project(self, matrix: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """[rows, columns], [columns, rank] -> [rows, rank]. Only the directions of both count."""
        _check_matrix(matrix)
        # Q is as large as the last gradient: of huge or tiny ones the product would leave the range of float32. Columns
        # that vanished, as after a gradient of zeros, would stay zeros for ever, so they start again.
        rows, columns = matrix.shape
        bits = (columns - 1).bit_length() + _REPLICA_BITS
        return tf.matmul(matrix, _unit_columns(q, self.start(rows, columns, 0)) * 2.0**-bits)

    def orthonormalise(self, p: tf.Tensor) -> tf.Tensor:
        """Modified Gram-Schmidt over columns, [rows, rank]. A column that depends on those before it becomes zeros."""
        done: list[tf.Tensor] = []
        for column in tf.unstack(_unit_columns(p, 0.0), axis=1):
            length = tf.norm(column)
            # Twice: what is left of an almost dependent column is mostly rounding, and points anywhere.
            for other in done * 2:
                column -= other * tf.reduce_sum(other * column)
            left = tf.norm(column)
            # NaN is not less than anything, and stays.
            depends = left <= _DEPENDENT * length
            done.append(tf.where(depends, 0.0, column / tf.where(depends, 1.0, left)))
        return tf.stack(done, axis=1)

    def back_project(self, matrix: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
        """[rows, columns], [rows, rank] -> [columns, rank]. Takes several times as long under `jit_compile=True`.

        Divided by a power of two, by which `decode` multiplies: it is as long as columns of the matrix, which may be
        longer than any float32.
        """
        _check_matrix(matrix)
        # Turning the thin factors, not the matrix, is faster.
        return tf.transpose(tf.matmul(p / _headroom(p), matrix, transpose_a=True))

    def decode(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """[rows, rank], [columns, rank] -> [rows, columns]."""
        return tf.matmul(p * _headroom(p), q, transpose_b=True)

    def rest(self, matrix: tf.Tensor, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """What `decode` leaves of a matrix: [rows, columns], [rows, rank], [columns, rank] -> [rows, columns]."""
        if self.rank > _UNROLLED_RANK:
            return matrix - self.decode(p, q)
        # Compiled, one pass over the matrix.
        p, q = p * _headroom(p), tf.transpose(q)
        return matrix - tf.add_n([p[:, i : i + 1] * q[i : i + 1] for i in range(self.rank)])

    def round_trip(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Codec`."""
        values = as_float32(values, "PowerSGD")
        if values.shape.rank < 2:
            raise ValueError(f"PowerSGD takes matrices, of two axes at least, not shape {values.shape}. Reshape it.")
        if not values.shape.num_elements():
            return values, values
        columns = values.shape[-1]
        rows = values.shape.num_elements() // columns
        matrix = tf.reshape(values, [rows, columns])
        p = self.orthonormalise(self.project(matrix, self.start(rows, columns, 0)))
        q = self.back_project(matrix, p)
        return tuple(tf.reshape(part, values.shape) for part in (self.decode(p, q), self.rest(matrix, p, q)))

    def for_rows(self) -> WordCodec:
        """Float16: rows of `tf.IndexedSlices` have no residual, which this codec cannot do without."""
        return Float16(min_elements=self.min_elements, start_step=self.start_step)


def _unit_columns(matrix: tf.Tensor, instead: tf.Tensor | float) -> tf.Tensor:
    """Columns divided by their largest magnitude, so that squares stay in range; `instead` of columns of zeros."""
    absmax = tf.reduce_max(tf.abs(matrix), axis=0)
    vanishes = absmax == 0
    return tf.where(vanishes, instead, matrix / tf.where(vanishes, 1.0, absmax))


def _headroom(p: tf.Tensor) -> float:
    """A power of two no less than the root of the rows of `p`, times the replicas."""
    return 2.0 ** (((p.shape[0] - 1).bit_length() + 1) // 2 + _REPLICA_BITS)


def _check_matrix(matrix: tf.Tensor) -> None:
    if len(matrix.shape) != 2 or tf.as_dtype(matrix.dtype) != tf.float32:
        raise ValueError(
            f"PowerSGD takes float32 [rows, columns], not {tf.as_dtype(matrix.dtype).name} {list(matrix.shape)}. Cast "
            "and reshape it."
        )
