"""The interface through which ranks (replicas or workers) exchange tensors, and sums that any transport can run."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

Gradient: TypeAlias = Any  # tf.Tensor | tf.IndexedSlices; TensorFlow ships no types for a type checker.

_WHOLE_BYTES = 48 << 10  # Sent by one rank to all other ranks together.


class Transport(Protocol):
    """Moves tensors between the ranks of a group, such as all replicas. Each rank has its own transport.

    All ranks of a group must call the same methods in the same order, with tensors of equal type and shape.

    Attributes:
      ranks: Number of ranks in the group.
    """

    ranks: int

    def all_gather(self, rows: tf.Tensor, options: Any) -> list[tf.Tensor]:
        """Sends the tensor `rows` to all ranks. Returns the tensors of all, in the order of ranks: `[n, ...]` each."""
        ...

    def all_gather_joined(self, rows: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends the tensor `rows` to all ranks. Returns the tensors of all, in order, joined along axis 0."""
        ...

    def all_to_all(self, rows: tf.Tensor, options: Any) -> list[tf.Tensor]:
        """Sends row j of a tensor `[ranks, ...]` to rank j. Returns the row from each rank in order: `[1, ...]`."""
        ...

    def all_reduce(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sums the tensors of all ranks. The sum has the same bits on all ranks."""
        ...


def sum_in_order(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds the tensors one after another, so that the bits of the sum do not depend on timing."""
    total = terms[0]
    for place, term in enumerate(terms[1:], start=1):
        # Without `Snapshot` TensorFlow would rewrite the sum to one `tf.add_n`, which adds in any order.
        total = tf.add(total if place == 1 else tf.raw_ops.Snapshot(input=total), term)
    return total


def is_sent_whole(size: int, ranks: int) -> bool:
    """Whether `all_reduce_in_order` sends a tensor of `size` bytes whole to each rank: two ranks, or a small tensor."""
    return ranks == 2 or size * (ranks - 1) <= _WHOLE_BYTES


def all_reduce_in_order(transport: Transport, tensor: tf.Tensor, options: Any) -> tf.Tensor:
    """Sums the tensors of all ranks in the order of ranks: the same bits on virtual devices and on workers.

    Each rank sums one part in the order of ranks and sends it to all. Each rank sends 2 (ranks - 1) / ranks of the
    tensor, as in a ring. Small tensors (48 KiB to all other ranks together) are sent whole to each rank.
    """
    ranks, flat, elements = transport.ranks, tf.reshape(tensor, [-1]), tensor.shape.num_elements()

    def whole():
        return sum_in_order(transport.all_gather(flat, options))

    def by_parts():
        size = tf.size(flat)
        rows = tf.reshape(tf.pad(flat, [[0, -size % ranks]]), [ranks, -1])
        part = sum_in_order(transport.all_to_all(rows, options))
        return transport.all_gather_joined(part[0], options)[:size]

    if ranks > 2 and elements is None:  # Decide by the size at run time, as ranks with a static shape do.
        total = tf.cond(is_sent_whole(tf.size(flat) * tensor.dtype.size, ranks), whole, by_parts)
    else:
        total = whole() if ranks == 2 or is_sent_whole(elements * tensor.dtype.size, ranks) else by_parts()
    return tf.ensure_shape(tf.reshape(total, tf.shape(tensor)), tensor.shape)
