"""A transport in two levels: between the ranks of a group, and between ranks with the same place in each group."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.ordered_sums import sum_in_order
from tfdist.strategies.collectives.transport import Transport, is_sent_whole, sum_by_size


class TwoLevelTransport(Transport):
    """Exchanges with all ranks, over a transport within a group and one across groups.

    Ranks are numbered group by group, and all groups have the same size. A rank sends messages to the ranks of its
    group, and to those that have its place in the other groups. With groups of the square root of the number of ranks,
    these are fewer than twice the square root.

    A large tensor is summed as in one level, and each rank sends as many bytes: the ranks of a group sum one part each,
    this part is summed across the groups, and each group gathers the parts. `all_gather` sends as many bytes as in one
    level too, and `all_to_all` up to twice as many.

    Sums add in the order of the ranks of a group, then in the order of groups. So they have the same bits on all ranks
    and in each run, but not those of a sum in one level.

    Args:
      within: The transport between the ranks of this rank's group.
      across: The transport between the ranks of all groups that have the same place as this rank.

    Attributes:
      ranks: Number of ranks of all groups.
    """

    def __init__(self, within: Transport, across: Transport):
        self._within, self._across, self.ranks = within, across, within.ranks * across.ranks

    def all_gather(self, rows: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends `rows` to all ranks: first to those of the group, which then send the rows of the whole group."""
        return self._across.all_gather(self._within.all_gather(rows, options), options)

    def all_to_all(self, rows: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends row j to rank j: first to the rank of this group that has the place of rank j in its group."""
        groups, size = self._across.ranks, self._within.ranks
        by_place = _swapped(tf.reshape(rows, [groups, size, -1]))  # [receiver's place, receiver's group, elements]
        by_group = _swapped(self._within.all_to_all(by_place, options))  # [receiver's group, sender's place, elements]
        received = self._across.all_to_all(by_group, options)  # [sender's group, sender's place, elements]
        if rows.shape.is_fully_defined():
            return tf.reshape(received, rows.shape)
        return tf.ensure_shape(tf.reshape(received, tf.shape(rows)), rows.shape)

    def sum_sent_whole(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends a tensor to the ranks of the group, and the sum of the group across groups."""
        return self._across.sum_sent_whole(self._within.sum_sent_whole(tensor, options), options)

    def all_reduce(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sums the tensors of all ranks. Small ones (48 KiB to all peers together) are sent whole."""

        def sum_parts(padded):
            rows = tf.reshape(padded, [self._within.ranks, -1])
            part = sum_in_order(self._within.all_to_all(rows, options))
            return self._within.all_gather(self._across.all_reduce(part, options), options)

        return sum_by_size(
            tensor,
            self._within.ranks,
            self._is_whole,
            lambda flat: self.sum_sent_whole(flat, options),
            sum_parts,
        )

    def sum_bytes(self, size: float) -> float:
        """Bytes that a rank sends to sum a tensor of `size` bytes."""
        within, across = self._within.ranks, self._across.ranks
        if self._is_whole(size):
            return size * (within + across - 2)
        part = size / within
        return 2 * part * (within - 1) + part * _times_sent(part, across)

    @property
    def relay(self) -> float:
        """How many times as many bytes `all_to_all` sends as in one level."""
        within, across = self._within.ranks, self._across.ranks
        return ((within - 1) * across + (across - 1) * within) / (self.ranks - 1)

    def _is_whole(self, size):
        return is_sent_whole(size, self._within.ranks + self._across.ranks - 1)


def _times_sent(size: float, ranks: int) -> float:
    """How often a rank sends a tensor of `size` bytes to sum it over `ranks` in one level."""
    return ranks - 1 if is_sent_whole(size, ranks) else 2 * (ranks - 1) / ranks


def _swapped(rows: tf.Tensor) -> tf.Tensor:
    """Exchanges the first two axes: [a, b, elements] -> [b, a, elements]."""
    return tf.transpose(rows, [1, 0, 2])
