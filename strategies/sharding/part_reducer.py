"""Exchanges the parts of many tensors in buckets: sums of which each replica gets its parts, and whole tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.group_exchange import GroupExchange
from tfdist.strategies.collectives.part_exchange import PartExchange
from tfdist.strategies.collectives.shard_groups import ShardGroups
from tfdist.strategies.sharding.owner_buckets import OwnerBuckets
from tfdist.strategies.sharding.ownership import Ownership
from tfdist.strategies.sharding.part_buckets import PartBuckets
from tfdist.strategies.sharding.part_tensors import Division, whole_of


class PartReducer:
    """Sums and gathers tensors that are divided among all replicas of a strategy, or among those of each group.

    Sums are over all replicas in both cases.

    Args:
      collectives: The strategy's collectives.
      groups: The groups of replicas; `None` for one group of all.

    Attributes:
      groups: As given.
      shards: Number of parts of each tensor: the number of replicas of a group.
    """

    def __init__(self, collectives: Collectives, groups: ShardGroups | None = None):
        self._collectives, self.groups = collectives, groups
        self._exchange = PartExchange(collectives) if groups is None else GroupExchange(collectives, groups)
        self.shards = self._exchange.shards
        self._gathers: dict[tuple[Division, ...], Any] = {}  # Functions that gather eagerly; tracing them takes long.

    def shard_of(self, replica: int) -> int:
        """Returns the number of the parts of a replica of this worker."""
        return self._exchange.shard_of(replica)

    def reduce_scatter_tensors(
        self,
        tensors: Sequence[tf.Tensor],
        *,
        partitions: Sequence[Division],
        replica: int,
        options: Any = None,
        cuts: bool = True,
    ) -> list[tf.Tensor]:
        """Sums tensors over all replicas. Returns this replica's part of each sum.

        See `PartBuckets` for `cuts`.
        """
        options = options or tf_internals.CommunicationOptions()

        def reduce(group: Sequence[tf.Tensor], buckets: Any) -> list[tf.Tensor]:
            joined = buckets.join_tensors(group)
            rows = [self._exchange.reduce_scatter(each, replica, options) for each in joined]
            return buckets.separate_parts(rows, self.shard_of(replica))

        with tf.device(self._collectives.device(replica)):
            return _by_kind(tensors, partitions, reduce, cuts)

    def all_gather_parts(
        self,
        parts: Sequence[tf.Tensor],
        *,
        partitions: Sequence[Division],
        replica: int,
        options: Any = None,
        cuts: bool = True,
    ) -> list[tf.Tensor]:
        """Gathers tensors of which each replica has a part. Returns the whole tensors.

        See `PartBuckets` for `cuts`.
        """
        options = options or tf_internals.CommunicationOptions()

        def gather(group: Sequence[tf.Tensor], buckets: Any) -> list[tf.Tensor]:
            joined = buckets.join_parts(group, self.shard_of(replica))
            return buckets.separate_tensors([self._exchange.all_gather(each, replica, options) for each in joined])

        with tf.device(self._collectives.device(replica)):
            return _by_kind(parts, partitions, gather, cuts)

    def gather_eagerly(
        self, parts: Sequence[Sequence[tf.Tensor]], partitions: Sequence[Division]
    ) -> list[list[tf.Tensor]]:
        """Gathers parts outside of a step, for all replicas of this worker: [replica][tensor] in and out."""
        replicas = range(self._collectives.replicas)
        owner = {self.shard_of(replica): replica for replica in reversed(replicas)}
        if len(owner) == self.shards:  # All parts are in this process.
            order = [owner[shard] for shard in range(self.shards)]
            wholes = [_joined([parts[replica][i] for replica in order], each) for i, each in enumerate(partitions)]
            return [wholes for _ in replicas]

        return self._gather_function(tuple(partitions))([list(own) for own in parts])

    def _gather_function(self, partitions: tuple[Division, ...]) -> Any:
        if partitions not in self._gathers:

            @tf.function(autograph=False)
            def gather(everyone):
                return [
                    self.all_gather_parts(own, partitions=partitions, replica=replica, cuts=False)
                    for replica, own in enumerate(everyone)
                ]

            self._gathers[partitions] = gather
        return self._gathers[partitions]


def _joined(parts: Sequence[tf.Tensor], partition: Division) -> tf.Tensor:
    if isinstance(partition, Ownership):
        return tf.identity(parts[partition.owner])
    return whole_of(partition, tf.stack([tf.reshape(part, [-1]) for part in parts]))


def _by_kind(
    tensors: Sequence[tf.Tensor],
    partitions: Sequence[Division],
    exchange: Callable[[Sequence[tf.Tensor], Any], list[tf.Tensor]],
    cuts: bool,
) -> list[tf.Tensor]:
    """Calls `exchange` for the tensors of each dtype and kind of division and their buckets; returns all results."""
    groups: dict[tuple[tf.DType, type], list[int]] = {}
    for i, (tensor, partition) in enumerate(zip(tensors, partitions, strict=True)):
        groups.setdefault((tensor.dtype, type(partition)), []).append(i)
    results = list(tensors)
    for (dtype, kind), group in groups.items():
        divisions: list[Any] = [partitions[i] for i in group]
        buckets = OwnerBuckets(divisions, dtype) if kind is Ownership else PartBuckets(divisions, dtype, cuts=cuts)
        for i, result in zip(group, exchange([tensors[i] for i in group], buckets), strict=True):
            results[i] = result
    return results
