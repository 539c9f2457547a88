"""Initial values of tables, drawn in blocks of rows, so that a replica can make its part without the whole table."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.partition import Partition

_WHOLE_BYTES = 64 << 20
# A block takes up to 5 times its memory while it is drawn. Smaller blocks take longer.
_BLOCK_BYTES = 4 << 20
_SEED_SHIFT, _SEEDS = 0x9E3779B1, (1 << 31) - 2  # Keras takes seeds modulo the latter.
_DRAWN = (keras.initializers.RandomUniform, keras.initializers.RandomNormal, keras.initializers.TruncatedNormal)
_EQUAL = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


def initial_state(initializer: Any, shape: Sequence[int], dtype: str) -> tf.Tensor:
    """Returns the initial values of a part of optimizer state, as an initializer makes them.

    `Constant` of Keras takes twice the memory of its result, so it makes one row, which is then repeated.
    """
    if type(initializer) in _EQUAL:
        return tf.broadcast_to(initializer((1, *shape[1:]), dtype=dtype), shape)
    return initializer(shape, dtype=dtype)


class TableInitializer(keras.initializers.Initializer):
    """Makes the initial values of a table in blocks of rows: the same values for any number of replicas.

    A table of at most 64 MiB has the values that `initializer` gives it. In larger tables each block of 4 MiB is drawn
    with a seed of its own. Initializers whose values depend on the shape, such as `GlorotUniform`, make the whole table
    at once.

    A replica draws all blocks, since each of them has some of its rows: rows are dealt out in turn, and a generator
    cannot skip single rows faster than it draws them.
    """

    def __init__(self, initializer: Any):
        self._initializer = initializer

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        """Returns the initial values of a whole table."""
        blocks = list(self._blocks(tuple(shape), tf.as_dtype(dtype or keras.config.floatx())))
        return blocks[0] if len(blocks) == 1 else tf.concat(blocks, axis=0)

    def fill(self, part: tf.Variable, partition: Partition, shard: int) -> None:
        """Assigns the initial values of a shard's part of a table."""
        first, filled = 0, 0
        for block in self._blocks(partition.shape, part.dtype):
            own = block[(shard - first) % partition.shards :: partition.shards]
            # `part[...].assign` would first read the part, and then copy it whole because of the second reference.
            end = filled + own.shape[0]
            tf.raw_ops.ResourceStridedSliceAssign(ref=part.handle, begin=[filled], end=[end], strides=[1], value=own)
            first, filled = first + block.shape[0], filled + own.shape[0]

    def _blocks(self, shape: tuple[int, ...], dtype: tf.DType) -> Iterator[tf.Tensor]:
        rows = max(_BLOCK_BYTES // (shape[1] * dtype.size), 1)
        if shape[0] * shape[1] * dtype.size <= _WHOLE_BYTES or type(self._initializer) not in (*_DRAWN, *_EQUAL):
            rows = shape[0]
        for number, first in enumerate(range(0, shape[0], rows)):
            yield self._of_block(number)((min(rows, shape[0] - first), *shape[1:]), dtype=dtype.name)

    def _of_block(self, number: int) -> Any:
        seed = getattr(self._initializer, "seed", None)
        if number == 0 or not isinstance(seed, int):  # A seed generator draws new numbers for each block.
            return self._initializer
        config = self._initializer.get_config() | {"seed": (seed + number * _SEED_SHIFT) % _SEEDS}
        return type(self._initializer).from_config(config)
