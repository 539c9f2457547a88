"""Moves a replica's tensors to other workers over the workers' own TCP connections, in two levels."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import CollectiveLauncher
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.collectives.tensorflow_transport import TensorFlowTransport
from tfdist.strategies.collectives.two_level_transport import TwoLevelTransport


class GroupedTcpTransport(TensorFlowTransport):
    """Exchanges numbers over some TCP connections, in two levels, and all else by TensorFlow's collectives.

    Args:
      launcher: Launcher of the replica, for TensorFlow's collectives between all replicas.
      is_ordered: See `TensorFlowTransport`.
      levels: The two levels, whose transports use this worker's connections.

    Attributes:
      levels: As given.
    """

    def __init__(self, launcher: CollectiveLauncher, is_ordered: bool, levels: TwoLevelTransport):
        super().__init__(launcher, is_ordered)
        self.levels = levels

    def all_gather(self, rows, options):
        return self._levels_for(rows, options, super()).all_gather(rows, options)

    def all_to_all(self, rows, options):
        return self._levels_for(rows, options, super()).all_to_all(rows, options)

    def sum_sent_whole(self, tensor, options):
        return self._levels_for(tensor, options, super()).sum_sent_whole(tensor, options)

    def all_reduce(self, tensor, options):
        with tf.device(self.launcher._device):
            return self._levels_for(tensor, options, super()).all_reduce(tensor, options)

    def _levels_for(self, tensor: tf.Tensor, options: Any, otherwise: Any) -> Any:
        """Returns the two levels if own connections carry the tensor, else `otherwise`."""
        is_carried = PeerExchange.carries(tensor) and not self.launcher.has_timeout(options)
        return self.levels if is_carried else otherwise
