"""Sums of which each replica of a group gets one part, and the gathering of parts from the replicas of a group."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.part_exchange import PartExchange
from tfdist.strategies.collectives.shard_groups import ShardGroups


class GroupExchange:
    """Sums matrices over all replicas, of which each replica gets one row; each group has all rows of the sum.

    The replicas of a group first sum among themselves, each its row. Then the replicas that have the same row, one of
    each group, sum over the groups. So whole matrices travel within a group only. See `PartExchange`.

    Args:
      collectives: The strategy's collectives.
      groups: The groups of replicas.

    Attributes:
      shards: Number of parts: the number of replicas of a group.
    """

    def __init__(self, collectives: Collectives, groups: ShardGroups):
        self.shards, self._devices = groups.size, groups.devices_of_group
        replicas, worker = range(collectives.replicas), collectives.worker
        self._group = PartExchange(collectives.among([groups.group_of(worker, replica) for replica in replicas]))
        copies = collectives.among([groups.copies_of(worker, replica) for replica in replicas])
        self._copies, self._between = PartExchange(copies), copies

    def shard_of(self, replica: int) -> int:
        """Returns the row of a replica of this worker."""
        return self._group.shard_of(replica % self._devices)

    def reduce_scatter(self, rows: tf.Tensor, replica: int, options: Any) -> tf.Tensor:
        """Sums matrices over all replicas. Returns this replica's row of the sum: [shards, n] -> [n].

        Adds in the order of the replicas of a group, as `PartExchange` does, then in the order of groups.
        """
        return self._sum_of_copies(self._group.reduce_scatter(rows, replica, options), replica, options)

    def all_gather(self, row: tf.Tensor, replica: int, options: Any) -> tf.Tensor:
        """Returns the rows of all replicas of the group: [n] -> [shards, n]."""
        return self._group.all_gather(row, replica, options)

    def _sum_of_copies(self, row: tf.Tensor, replica: int, options: Any) -> tf.Tensor:
        if self._between.within_worker(replica) is None:
            return self._between.across_workers(replica).all_reduce(row, options)
        # Several groups on each of several workers: the devices of a worker sum first, so that each element leaves it
        # once.
        size, parts = row.shape[0], self._copies.shards
        rows = tf.reshape(tf.pad(row, [[0, -size % parts]]), [parts, -1])
        own = self._copies.reduce_scatter(rows, replica, options)
        return tf.reshape(self._copies.all_gather(own, replica, options), [-1])[:size]
