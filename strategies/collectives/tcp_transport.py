"""Moves a replica's tensors to other workers over the workers' own TCP connections."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import CollectiveLauncher
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.collectives.tensorflow_transport import TensorFlowTransport


class TcpTransport(TensorFlowTransport):
    """Exchanges numbers over this worker's TCP connections, and all else by TensorFlow's collectives.

    Args:
      launcher: Launcher of the replica. It counts the keys of exchanges.
      is_ordered: See `TensorFlowTransport`.
      peers: The connections of this worker. The group of the launcher has one replica on each worker.
    """

    def __init__(self, launcher: CollectiveLauncher, is_ordered: bool, peers: PeerExchange):
        super().__init__(launcher, is_ordered)
        self._peers = peers

    def all_gather(self, rows, options):
        return self._exchange(rows, apart=False) if self._carries(rows, options) else super().all_gather(rows, options)

    def all_gather_joined(self, rows, options):
        if not self._carries(rows, options):
            return super().all_gather_joined(rows, options)
        return self._peers.exchange_joined(rows, *self.launcher.next_exchange())

    def all_to_all(self, rows, options):
        return self._exchange(rows, apart=True) if self._carries(rows, options) else super().all_to_all(rows, options)

    def _exchange(self, rows: tf.Tensor, apart: bool) -> list[tf.Tensor]:
        return self._peers.exchange(rows, *self.launcher.next_exchange(), apart=apart)

    def _carries(self, rows: tf.Tensor, options: Any) -> bool:
        return self._peers.carries(rows) and not self.launcher.has_timeout(options)
