"""Some rows of a table at a time, in place of the whole part, while an optimizer runs."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.assigned_tensor import AssignedTensor

# A part has at most this number of blocks, whose temporary tensors then need little memory beside it.
_MOST_BLOCKS = 16
_LEAST_BLOCK_BYTES = 16 << 20
_SGD = keras.optimizers.SGD.update_step
_OF_ROWS = {keras.optimizers.Adagrad.update_step}
_OF_ALL_ROWS = {
    getattr(keras.optimizers, name).update_step
    for name in ("Adadelta", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
}


def update_table(
    optimizer: Any, gradient: Any, table: Any, part: tf.Variable, step: Any, update: Callable[[Any, Any], None]
) -> None:
    """Updates a replica's part of a table.

    TensorFlow would copy each whole variable that the optimizer reads, and make temporary tensors of the same size. So
    the optimizer gets some rows of the part at a time, and the same rows of its state. Adagrad gets those that have
    gradients, since it changes no others. Other optimizers of Keras get one block of rows after another. Whole parts
    are for dense gradients, for optimizers of the user, and for SGD without momentum, which reads no rows.

    Args:
      optimizer: The optimizer.
      gradient: The gradient of the part.
      table: The `ShardedTable`.
      part: The replica's part of it.
      step: The step of the replica.
      update: Updates a variable by a gradient.
    """
    kind, is_sparse = type(optimizer).update_step, isinstance(gradient, tf.IndexedSlices)
    if is_sparse and kind in _OF_ROWS:
        rows, places = tf.unique(gradient.indices)
        given = tf.IndexedSlices(gradient.values, places, tf.stack([tf.size(rows), *part.shape[1:]]))
        _update_rows(rows, given, table, part, step, update)
    elif is_sparse and kind in _OF_ALL_ROWS and not (kind is _SGD and not optimizer.momentum):
        _update_in_blocks(gradient, table, part, step, update)
    else:
        update(gradient, part)


def rows_of_block(shape: tuple[int, ...], element_bytes: int) -> int:
    """Returns the number of rows of a block of a part: all of a small part."""
    least = -(-_LEAST_BLOCK_BYTES // max(shape[1] * element_bytes, 1))
    return min(shape[0], max(least, -(-shape[0] // _MOST_BLOCKS)))


def _update_in_blocks(gradient, table, part, step, update):
    rows, size = part.shape[0], rows_of_block(tuple(part.shape), part.dtype.size)
    if size == rows:
        update(gradient, part)
        return

    def update_block(first, size):
        own = tf.where((gradient.indices >= first) & (gradient.indices < first + size))[:, 0]
        places = tf.gather(gradient.indices, own) - first
        shape = tf.constant([size, *part.shape[1:]], places.dtype)  # A static one, so that the block has one too.
        given = tf.IndexedSlices(tf.gather(gradient.values, own), places, shape)
        _update_rows(first + tf.range(size, dtype=first.dtype), given, table, part, step, update)

    def body(first):
        update_block(first, size)
        return (first + size,)

    end = rows // size * size
    start = tf.zeros([], gradient.indices.dtype)
    tf.while_loop(lambda first: first < end, body, (start,), parallel_iterations=1)
    if end < rows:
        update_block(start + end, rows - end)


def _update_rows(rows, gradient, table, part, step, update):
    own = step.table_rows = TableRows(table, part, rows, step.replica)
    try:
        update(gradient, own)
    finally:
        step.table_rows = None
    own.store()


class TableRows(AssignedTensor):
    """Stands for a replica's part of a table in an optimizer's update, and has some of its rows.

    Args:
      table: The `ShardedTable`.
      part: The replica's part of it.
      rows: Numbers of rows of the part, each once.
      replica: Number of the replica within its worker.
    """

    def __init__(self, table: Any, part: tf.Variable, rows: tf.Tensor, replica: int):
        self._table, self._part, self._rows, self._replica = table, part, rows, replica
        self._states: dict[int, tuple[tf.Variable, AssignedTensor]] = {}
        super().__init__(tf.gather(part, rows))

    def of(self, state: Any) -> AssignedTensor | None:
        """Returns these rows of optimizer state; `None` if it does not belong to the table."""
        if state.weight is not self._table:
            return None
        if id(state) not in self._states:
            part = state.values[self._replica]
            self._states[id(state)] = part, AssignedTensor(tf.gather(part, self._rows))
        return self._states[id(state)][1]

    def store(self) -> None:
        """Assigns the new rows to the part and to the state."""
        for variable, rows in ((self._part, self), *self._states.values()):
            variable.scatter_update(tf.IndexedSlices(rows.read_value(), self._rows))

    def __getattr__(self, name: str) -> Any:
        # The names, the device and the identity are those of the table.
        return getattr(object.__getattribute__(self, "_table"), name)
