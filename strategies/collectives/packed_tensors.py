"""Joins small tensors into few large ones, so that an operation with branches has few inputs and outputs."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.collectives.buckets import BUCKET_BYTES, fill_buckets, join, separate

_WHOLE = 1 << 62  # No tensor is cut here. `Collectives` cuts those that it sums.


class PackedTensors:
    """Joins small tensors of one dtype to tensors of up to a bucket, and separates them again.

    TensorFlow makes several operations for each input and output of each branch, and visits all of them in each step.

    Args:
      like: The tensors to join, or others of their shapes and dtypes.
    """

    def __init__(self, like: Sequence[tf.Tensor]):
        self._like = list(like)
        of_dtypes: dict[tf.DType, list[int]] = {}
        for position, each in enumerate(like):
            of_dtypes.setdefault(each.dtype, []).append(position)
        self._groups = [
            (positions, fill_buckets([self._like[i] for i in positions], BUCKET_BYTES, part_bytes=_WHOLE))
            for positions in of_dtypes.values()
        ]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins tensors: shapes [...] -> [elements].

        A tensor of at least the size of a bucket, or of unknown size, stays alone.
        """
        return [
            join(bucket, [tensors[i] for i in positions]) for positions, buckets in self._groups for bucket in buckets
        ]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Separates tensors, the inverse of `pack`."""
        found: dict[int, tf.Tensor] = {}
        rest = list(packed)
        for positions, buckets in self._groups:
            own, rest = rest[: len(buckets)], rest[len(buckets) :]
            found.update(zip(positions, separate(buckets, own, [self._like[i] for i in positions]), strict=True))
        return [found[i] for i in range(len(self._like))]
