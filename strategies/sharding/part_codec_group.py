"""The gradients of one codec of which each replica gets its part of the sum: buckets, encoded exchange, residuals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.codec_group import encode, sum_encoded
from tfdist.strategies.collectives.finite_sums import decoded_are_finite
from tfdist.strategies.collectives.ordered_sums import sum_in_order
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.compression import WordCodec
from tfdist.strategies.sharding.part_buckets import PartBuckets
from tfdist.strategies.sharding.part_reducer import PartReducer
from tfdist.strategies.sharding.partition import Partition


class PartCodecGroup:
    """The gradients of an optimizer that share one `WordCodec`, divided among the replicas, and their exchange.

    A replica encodes the part of each shard and sends it to the shard, which decodes and sums in the order of ranks.
    This is the first half of an encoded all-reduce. The second half is that of the weights, which travel as they are,
    so no replica encodes a sum. The residuals of a replica are as large as its gradients.

    If a worker has several devices, they first sum in full precision, so that each part leaves the worker once.

    Args:
      codec: The codec.
      positions: Positions of the gradients among those of the optimizer.
      partitions: How each of these gradients is divided.
      collectives: The strategy's collectives.
    """

    def __init__(
        self, codec: WordCodec, positions: list[int], partitions: Sequence[Partition], collectives: Collectives
    ):
        self.codec, self.positions, self.partitions = codec, positions, partitions
        self._buckets = PartBuckets(partitions, tf.float32, codec.granule, repeats=not codec.keeps_zeros)
        self._shards = collectives.ranks * collectives.spread
        shapes = [(collectives.ranks, columns) for columns in self._buckets.columns]
        self.state_shapes = [shape for shape in shapes for _ in range(codec.states)]
        self.num_states, self.kinds = len(self.state_shapes), codec.states

    @property
    def num_buckets(self) -> int:
        """Number of buckets, each of which takes up to four collectives."""
        return len(self._buckets.columns)

    def initial_states(self):
        """The codec states before the first step; None stands for zeros."""
        return [None] * self.num_states

    def sent_bytes(self, collectives: Collectives) -> float:
        """Bytes that a replica sends per step: encoded gradients, and weights as they are."""
        words = sum(self.codec.words(columns) for columns in self._buckets.columns)
        weights = sum(partition.part_elements for partition in self.partitions)
        return 4 * (collectives.ranks - 1) * (words + weights)

    def exchange(self, gradients, states, replica: int, collectives: Collectives, options: Any, watch: Stopwatch):
        """Returns this replica's parts of the sums, the new codec states, and whether these parts are finite."""
        across, within = watch.timed(collectives.across_workers(replica)), collectives.within_worker(replica)
        within = None if within is None else watch.timed(within)
        sums, kept, decoded = [], [], []
        members = [tf.cast(gradient, tf.float32) for gradient in gradients]
        kinds = self.codec.states
        for i, joined in enumerate(self._buckets.join_tensors(members)):
            rows, columns = watch.begin(joined), self._buckets.columns[i]
            if within is not None:
                rows = sum_in_order(within.all_to_all(tf.reshape(rows, [within.ranks, -1]), options))
            rows = tf.reshape(rows, [across.ranks, columns])
            words, new = encode(self.codec, rows, tuple(states[i * kinds : (i + 1) * kinds]))
            summed = sum_encoded(self.codec, across.all_to_all(words, options), columns)
            if not self.codec.keeps_zeros:  # Copied values in the padding must leave no residual.
                mask = self._own_rows(self._buckets.mask(i), replica, collectives)
                new = tuple(state * mask for state in new)
            total, new = watch.end([tf.reshape(summed.total, [-1]), list(new)])
            sums.append(total)
            kept += new
            decoded.append(summed)
        parts = self._buckets.separate_parts(sums, 0)
        parts = [tf.cast(part, gradient.dtype) for part, gradient in zip(parts, gradients, strict=True)]
        return parts, kept, decoded_are_finite(self.codec, decoded)

    def uncompressed(self, gradients, replica: int, collectives: Collectives, options: Any):
        """Returns this replica's parts of the sums, before the first step of the codec."""
        return PartReducer(collectives).reduce_scatter_tensors(
            gradients, partitions=self.partitions, replica=replica, options=options
        )

    def residuals(self, states):
        """The residuals among the codec states of a replica, without the momenta before them."""
        return list(states[self.kinds - 1 :: self.kinds]) if self.kinds else []

    def pending(self, states, replica: int, collectives: Collectives):
        """Returns a replica's codec states, shaped like the gradients: [kind of state][gradient]; see `CodecGroup`."""
        kinds = []
        for kind in range(self.kinds):
            buckets = []
            for state in states[kind :: self.kinds]:
                rows = np.zeros([self._shards, state.shape[1]], np.float32)
                rows[self._own(replica, collectives)] = state.numpy()
                buckets.append(tf.constant(rows))
            kinds.append([whole.numpy() for whole in self._buckets.separate_tensors(buckets)])
        return kinds

    def spread(self, kinds, replica: int, collectives: Collectives):
        """Inverse of `pending`. Returns codec states such that `pending` of all replicas sums to `kinds`."""
        joined = [self._buckets.join_tensors([tf.constant(array) for array in arrays]) for arrays in kinds]
        states = []
        for bucket in range(len(self._buckets.columns)):
            # Values that the buckets repeat in their padding are no residuals.
            mask = 1.0 if self.codec.keeps_zeros else self._buckets.mask(bucket)
            states += [self._own_rows(kind[bucket] * mask, replica, collectives) / collectives.ranks for kind in joined]
        return states

    def _own(self, replica: int, collectives: Collectives) -> slice:
        """Returns the rows of a bucket that a replica sends to other workers: all, unless devices sum first."""
        start = replica * collectives.ranks if collectives.spread > 1 else 0
        return slice(start, start + collectives.ranks)

    def _own_rows(self, bucket: tf.Tensor, replica: int, collectives: Collectives) -> tf.Tensor:
        return bucket[self._own(replica, collectives)]
