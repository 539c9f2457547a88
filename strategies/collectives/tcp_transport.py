"""Moves a replica's tensors to other workers over the workers' own TCP connections."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import CollectiveLauncher, TensorFlowTransport
from tfdist.strategies.collectives.peer_exchange import PeerExchange


class TcpTransport(TensorFlowTransport):
    """Exchanges numbers over this worker's TCP connections, and all else by TensorFlow's collectives.

    Args:
      launcher: Launcher of the replica. It counts the keys of exchanges.
      peers: The connections of this worker. The group of the launcher has one replica on each worker.
    """

    def __init__(self, launcher: CollectiveLauncher, peers: PeerExchange):
        super().__init__(launcher)
        self._peers = peers

    def all_gather(self, rows, options):
        """Returns the tensors of all ranks in their order; see `Transport.all_gather`."""
        return self._exchange(rows, apart=False) if self._carries(rows, options) else super().all_gather(rows, options)

    def all_gather_joined(self, rows, options):
        """Returns the tensors of all ranks as one, joined along axis 0; see `Transport.all_gather_joined`."""
        if not self._carries(rows, options):
            return super().all_gather_joined(rows, options)
        return tf.concat(self._exchange(rows, apart=False), axis=0)

    def all_to_all(self, rows, options):
        """Sends row j to rank j, and returns the row from each rank; see `Transport.all_to_all`."""
        return self._exchange(rows, apart=True) if self._carries(rows, options) else super().all_to_all(rows, options)

    def _exchange(self, rows: tf.Tensor, apart: bool) -> list[tf.Tensor]:
        return self._peers.exchange(rows, *self._launcher.next_exchange(), apart=apart)

    def _carries(self, rows: tf.Tensor, options: Any) -> bool:
        return self._peers.carries(rows) and not self._launcher.has_timeout(options)
