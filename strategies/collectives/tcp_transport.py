"""Moves a replica's tensors to other workers over the workers' own TCP connections."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import CollectiveLauncher
from tfdist.strategies.collectives.ordered_sums import ADDED_OUTSIDE
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.collectives.tensorflow_transport import TensorFlowTransport


class TcpTransport(TensorFlowTransport):
    """Exchanges numbers over this worker's TCP connections, and all else by TensorFlow's collectives.

    Args:
      launcher: Launcher of the replica. It counts the keys of exchanges.
      is_ordered: See `TensorFlowTransport`.
      peers: The connections of this worker.
      workers: The workers of the launcher's group, which has one replica on each; `None` for all workers.
    """

    def __init__(
        self,
        launcher: CollectiveLauncher,
        is_ordered: bool,
        peers: PeerExchange,
        workers: Sequence[int] | None = None,
    ):
        super().__init__(launcher, is_ordered)
        self._peers = peers
        if workers is not None:
            peers.limit(launcher._group_key, workers)

    def all_gather(self, rows, options):
        if not self._carries(rows, options):
            return super().all_gather(rows, options)
        return self._peers.all_gather(rows, *self.launcher.next_exchange())

    def all_to_all(self, rows, options):
        if not self._carries(rows, options):
            return super().all_to_all(rows, options)
        return self._peers.all_to_all(rows, *self.launcher.next_exchange())

    def sum_sent_whole(self, tensor, options):
        if not self._carries(tensor, options):
            return super().sum_sent_whole(tensor, options)
        if self.ranks == 2:
            # A sum of two terms has the same bits in both orders. So neither is copied to a place beside the other.
            return tensor + self._peers.swap(tensor, *self.launcher.next_exchange())
        if tensor.dtype not in ADDED_OUTSIDE:
            return super().sum_sent_whole(tensor, options)
        return self._peers.sum_whole(tensor, *self.launcher.next_exchange())

    def sum_parts(self, tensor, options):
        if tensor.dtype not in ADDED_OUTSIDE or not self._carries(tensor, options):
            return super().sum_parts(tensor, options)
        return self._peers.sum_parts(tensor, *self.launcher.next_exchange(count=2))

    def _carries(self, rows: tf.Tensor, options: Any) -> bool:
        return self._peers.carries(rows) and not self.launcher.has_timeout(options)
