"""Buckets of whole tensors, each of which one shard owns: a shard's row of a bucket has a range of what it owns."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.collectives.buckets import BUCKET_BYTES
from tfdist.strategies.sharding.ownership import Ownership


class OwnerBuckets:
    """The arrangement in buckets of tensors of one dtype that each have an owner; see `PartBuckets`.

    The tensors of an owner lie one after another in its row, from the last to the first. Rows of owners with fewer
    elements are padded, so the padding is what the owners' loads differ.
    """

    def __init__(self, divisions: Sequence[Ownership], dtype: tf.DType):
        self._divisions, self._dtype = divisions, dtype
        shards = divisions[0].shards
        self._queues: list[list[int]] = [[] for _ in range(shards)]
        self._starts, loads = [0] * len(divisions), [0] * shards
        for i in reversed(range(len(divisions))):
            owner = divisions[i].owner
            self._queues[owner].append(i)
            self._starts[i] = loads[owner]
            loads[owner] += divisions[i].elements
        self._length = max(loads)
        columns = max(BUCKET_BYTES // dtype.size // shards, 1)
        self._sizes = [min(columns, self._length - start) for start in range(0, self._length, columns)]

    def join_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins whole tensors to buckets: shapes of the divisions -> [shards, elements] each."""
        return tf.split(tf.stack([self._row(queue, tensors) for queue in self._queues]), self._sizes, axis=1)

    def join_parts(self, parts: Sequence[tf.Tensor], shard: int) -> list[tf.Tensor]:
        """Joins one shard's parts to its rows of the buckets: part shapes -> [elements] each."""
        return tf.split(self._row(self._queues[shard], parts), self._sizes)

    def separate_parts(self, rows: list[tf.Tensor], shard: int) -> list[tf.Tensor]:
        """Inverse of `join_parts`."""
        whole = tf.concat(rows, axis=0)
        return [
            self._tensor(i, whole) if division.owner == shard else tf.zeros([0], self._dtype)
            for i, division in enumerate(self._divisions)
        ]

    def separate_tensors(self, buckets: list[tf.Tensor]) -> list[tf.Tensor]:
        """Inverse of `join_tensors`."""
        rows = tf.unstack(tf.concat(buckets, axis=1))
        return [self._tensor(i, rows[division.owner]) for i, division in enumerate(self._divisions)]

    def _row(self, queue: Sequence[int], tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = [tf.reshape(tensors[i], [-1]) for i in queue]
        padding = self._length - sum(self._divisions[i].elements for i in queue)
        return tf.concat([*flat, tf.zeros([padding], self._dtype)], axis=0)

    def _tensor(self, i: int, row: tf.Tensor) -> tf.Tensor:
        division = self._divisions[i]
        return tf.reshape(row[self._starts[i] : self._starts[i] + division.elements], division.shape)
