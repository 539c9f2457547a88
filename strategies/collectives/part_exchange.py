"""The halves of an all-reduce: sums of which each shard gets one part, and the gathering of parts from all shards."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.ordered_sums import sum_in_order
from tfdist.strategies.collectives.replica_transports import ReplicaTransports


class PartExchange:
    """Sums matrices over all replicas, so that each replica gets one row, and gathers rows from all replicas.

    Both together send as many bytes as an all-reduce, and give the same sums. If workers have several devices each, the
    devices of a worker first sum among themselves, so that each row crosses the network once per worker.
    """

    def __init__(self, transports: ReplicaTransports):
        self._transports = transports
        self.shards = transports.ranks * transports.spread

    def shard_of(self, replica: int) -> int:
        """Returns the row of a replica of this worker: first the rows of all first replicas, in the order of workers.

        So the devices of a worker can sum first, and each then exchanges consecutive rows with other workers.
        """
        workers = self.shards // self._transports.replicas
        return replica * workers + self._transports.worker

    def reduce_scatter(self, rows: tf.Tensor, replica: int, options: Any) -> tf.Tensor:
        """Sums matrices over all replicas. Returns this replica's row of the sum: [shards, n] -> [n].

        Without devices to sum among first, it adds in the order of replicas, as `all_reduce_in_order` does.
        """
        within, across = self._transports.within_worker(replica), self._transports.across_workers(replica)
        elements = rows.shape[1]
        if within is not None:
            rows = sum_in_order(within.all_to_all(tf.reshape(rows, [within.ranks, -1]), options))
            rows = tf.reshape(rows, [across.ranks, elements])
        return sum_in_order(across.all_to_all(rows, options))

    def all_gather(self, row: tf.Tensor, replica: int, options: Any) -> tf.Tensor:
        """Returns the rows of all replicas: [n] -> [shards, n]."""
        within, across = self._transports.within_worker(replica), self._transports.across_workers(replica)
        rows = across.all_gather(tf.expand_dims(row, 0), options)  # [1, n] -> [ranks, n]
        if within is not None:
            rows = within.all_gather(tf.reshape(rows, [1, -1]), options)
        shape = [self.shards, row.shape[0]]
        return rows if rows.shape == shape else tf.reshape(rows, shape)
