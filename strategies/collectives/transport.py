"""The interface through which ranks (replicas or workers) exchange tensors, and sums that any transport can run."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tfdist.strategies.collectives.ordered_sums import sum_in_order

Gradient: TypeAlias = Any  # tf.Tensor | tf.IndexedSlices; TensorFlow ships no types for a type checker.

_WHOLE_BYTES = 48 << 10  # Sent by one rank to all other ranks together.


class Transport(Protocol):
    """Moves tensors between the ranks of a group, such as all replicas. Each rank has its own transport.

    Subclasses have `all_gather`, `all_to_all` and `all_reduce`.

    All ranks of a group must call the same methods in the same order, with tensors of equal type and shape.

    Attributes:
      ranks: Number of ranks in the group.
    """

    ranks: int

    def all_gather(self, rows: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends `rows` to all ranks. Returns the rows of all ranks in order: `[n, ...]` -> `[ranks * n, ...]`."""
        ...

    def all_to_all(self, rows: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends row j to rank j. Returns the rows from all ranks in order: `[ranks, ...]` -> `[ranks, ...]`."""
        ...

    def sum_sent_whole(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends a tensor to all ranks. Returns the sum of the tensors of all ranks, in the order of ranks."""
        return sum_in_order(self.all_gather(tensor[None], options))

    def sum_parts(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sums the tensors of all ranks in the order of ranks, one part on each rank: `[ranks * n]`, as the result."""
        part = sum_in_order(self.all_to_all(tf.reshape(tensor, [self.ranks, -1]), options))
        return self.all_gather(part, options)

    def all_reduce(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sums the tensors of all ranks. The sum has the same bits on all ranks."""
        ...


def is_sent_whole(size: float, ranks: int) -> bool:
    """Whether `all_reduce_in_order` sends a tensor of `size` bytes whole to each rank: two ranks, or a small tensor."""
    return ranks == 2 or size * (ranks - 1) <= _WHOLE_BYTES


def all_reduce_in_order(transport: Transport, tensor: tf.Tensor, options: Any) -> tf.Tensor:
    """Sums the tensors of all ranks in the order of ranks: the same bits on virtual devices and on workers.

    Each rank sums one part in the order of ranks and sends it to all. Each rank sends 2 (ranks - 1) / ranks of the
    tensor, as in a ring. Small tensors (48 KiB to all other ranks together) are sent whole to each rank.
    """
    return sum_by_size(
        tensor,
        transport.ranks,
        lambda size: is_sent_whole(size, transport.ranks),
        lambda flat: transport.sum_sent_whole(flat, options),
        lambda padded: transport.sum_parts(padded, options),
    )


def sum_by_size(
    tensor: tf.Tensor,
    parts: int,
    is_whole: Callable[[Any], Any],
    sum_whole: Callable[[tf.Tensor], tf.Tensor],
    sum_parts: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Sums a tensor whole or in parts, which its size decides: while the graph runs, if the shape is not static.

    Args:
      tensor: A tensor of any shape, which the result has too.
      parts: Number of parts.
      is_whole: Tells from the number of bytes whether to sum the tensor whole.
      sum_whole: Sums a tensor: [elements] -> [elements].
      sum_parts: Sums a tensor that is padded to a multiple of `parts`: [parts * n] -> [parts * n].
    """
    flat, elements = tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]), tensor.shape.num_elements()
    size = tf.size(flat) if elements is None else elements

    def in_parts():
        padding = -size % parts  # 0 needs no operations, if the size is static.
        is_padded = elements is None or padding > 0
        return sum_parts(tf.pad(flat, [[0, padding]]))[:size] if is_padded else sum_parts(flat)

    whole = is_whole(size * tensor.dtype.size)
    if tf.is_tensor(whole):
        total = tf.cond(whole, lambda: sum_whole(flat), in_parts)
    else:
        total = sum_whole(flat) if whole else in_parts()
    if elements is not None:
        return total if tensor.shape.rank == 1 else tf.reshape(total, tensor.shape)
    return tf.ensure_shape(tf.reshape(total, tf.shape(tensor)), tensor.shape)
