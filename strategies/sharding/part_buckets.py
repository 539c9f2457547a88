"""Buckets of parts: the parts of many tensors travel together, and every shard's row of a bucket is laid out alike."""

from collections.abc import Sequence
from typing import cast

import tensorflow as tf

from tfdist.strategies.collectives.buckets import (
    Bucket,
    Segment,
    bucket_bytes,
    fill_buckets,
    join,
    part_bytes,
    separate,
)
from tfdist.strategies.sharding.part_tensors import rows_of, whole_of
from tfdist.strategies.sharding.partition import Partition

_MOST_BYTES = 1 << 30  # An exchange takes less than 2 GiB of each worker.


class PartBuckets:
    """The arrangement in buckets of tensors of one dtype that are divided among shards.

    A bucket is a matrix with a row for each shard. A row holds the shard's parts of several tensors one after another.

    Args:
      partitions: The division of each tensor, all into the same number of parts.
      dtype: Type of all tensors.
      granule: Number of elements that a codec encodes as a unit. Each part in a row is padded to a multiple of it.
      repeats: Whether this padding repeats the last elements of a part instead of zeros.
      cuts: Whether large tensors are cut, so that one bucket is copied while another travels. Otherwise a bucket takes
        whole parts of up to 1 GiB. To cut a weight that a step reads and to join it again would take its memory twice.

    Attributes:
      columns: Number of elements of a row of each bucket.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        dtype: tf.DType,
        granule: int = 1,
        *,
        repeats: bool = False,
        cuts: bool = True,
    ):
        self._partitions, self._granule, self._repeats = partitions, granule, repeats
        shards = partitions[0].shards
        self._like = [tf.TensorSpec([each.part_elements], dtype) for each in partitions]
        limit = bucket_bytes([tf.TensorSpec(each.shape, dtype) for each in partitions]) // shards
        limit = limit if cuts else _MOST_BYTES
        self._buckets = fill_buckets(self._like, limit, granule, part_bytes=part_bytes(shards) // shards)
        self.columns = [sum(segment.padded(granule) for segment in bucket) for bucket in self._buckets]

    def join_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins whole tensors to buckets: shapes of the partitions -> [shards, elements] each."""
        rows = [rows_of(*each) for each in zip(self._partitions, tensors, strict=True)]
        return [self._columns_of(bucket, rows, self._repeats) for bucket in self._buckets]

    def join_parts(self, parts: Sequence[tf.Tensor], shard: int) -> list[tf.Tensor]:
        """Joins one shard's parts to its rows of the buckets: part shapes -> [elements] each."""
        del shard  # The rows of all shards are laid out alike.
        return [join(bucket, parts, self._granule) for bucket in self._buckets]

    def separate_parts(self, rows: list[tf.Tensor], shard: int) -> list[tf.Tensor]:
        """Inverse of `join_parts`."""
        del shard
        parts = separate(self._buckets, rows, self._like, self._granule)
        shaped = zip(parts, self._partitions, strict=True)
        return [part if part.shape == each.part_shape else tf.reshape(part, each.part_shape) for part, each in shaped]

    def separate_tensors(self, buckets: list[tf.Tensor]) -> list[tf.Tensor]:
        """Inverse of `join_tensors`."""
        columns: dict[int, list[tuple[int, tf.Tensor]]] = {}
        for bucket, matrix in zip(self._buckets, buckets, strict=True):
            sizes = [segment.padded(self._granule) for segment in bucket]
            parts = [matrix] if len(sizes) == 1 else tf.split(matrix, sizes, axis=1)
            for segment, part in zip(bucket, parts, strict=True):
                columns.setdefault(segment.tensor, []).append((segment.start, part[:, : _size(segment)]))
        tensors = []
        for position, partition in enumerate(self._partitions):
            cuts = [cut for _, cut in sorted(columns[position], key=lambda placed: placed[0])]
            tensors.append(whole_of(partition, cuts[0] if len(cuts) == 1 else tf.concat(cuts, axis=1)))
        return tensors

    def mask(self, bucket: int) -> tf.Tensor:
        """Returns 1 for each element of a bucket that is an element of a tensor, and 0 for padding: [shards, n]."""
        columns = []
        for segment in self._buckets[bucket]:
            partition = self._partitions[segment.tensor]
            own = [partition.elements_of(shard) - segment.start for shard in range(partition.shards)]
            lengths = [min(max(each, 0), _size(segment)) for each in own]
            columns.append(tf.sequence_mask(lengths, segment.padded(self._granule), tf.float32))
        return columns[0] if len(columns) == 1 else tf.concat(columns, axis=1)

    def _columns_of(self, bucket: Bucket, rows: Sequence[tf.Tensor], repeats: bool) -> tf.Tensor:
        cuts = []
        for segment in bucket:
            whole, size = rows[segment.tensor], _size(segment)
            cut = whole if size == whole.shape[1] else whole[:, segment.start : segment.stop]
            padding = segment.padded(self._granule) - size
            if padding and repeats:
                last = cut[:, -(size % self._granule) :]
                cut = tf.concat([cut, tf.tile(last, [1, -(-padding // last.shape[1])])[:, :padding]], axis=1)
            elif padding:
                cut = tf.pad(cut, [[0, 0], [0, padding]])
            cuts.append(cut)
        return cuts[0] if len(cuts) == 1 else tf.concat(cuts, axis=1)


def _size(segment: Segment) -> int:
    return cast(int, segment.stop) - segment.start  # All parts have a static size.
