"""Moves a replica's tensors to other replicas by TensorFlow's collectives: NCCL between GPUs, gRPC between CPUs."""

import tensorflow as tf

from tfdist.strategies.collectives.collective_launcher import CollectiveLauncher
from tfdist.strategies.collectives.transport import Transport, all_reduce_in_order


class TensorFlowTransport(Transport):
    """The transport of a replica over TensorFlow's collectives.

    Args:
      launcher: Launcher of the replica.
      is_ordered: Whether `all_reduce`, in a graph, adds in the order of replicas.
    """

    def __init__(self, launcher: CollectiveLauncher, is_ordered: bool):
        self.launcher, self.is_ordered, self.ranks = launcher, is_ordered, launcher._group_size

    def all_gather(self, rows, options):
        size = None if rows.shape[0] is None else self.ranks * rows.shape[0]
        return tf.ensure_shape(self.launcher._all_gather(rows, options), [size, *rows.shape[1:]])

    def all_to_all(self, rows, options):
        return tf.ensure_shape(self.launcher.all_to_all(rows, options), rows.shape)

    def all_reduce(self, tensor, options):
        if not self.is_ordered or tf.executing_eagerly():
            return self.launcher.all_reduce(tensor, options=options)
        with tf.device(self.launcher._device):
            return all_reduce_in_order(self, tensor, options)
