"""The rows of a table that have gradients, in place of the whole part, while an optimizer runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.assigned_tensor import AssignedTensor


@contextlib.contextmanager
def only_rows_with_gradients(
    optimizer: Any, gradient: Any, table: Any, part: tf.Variable, step: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields what an optimizer takes to update a replica's part of a table: a gradient and a variable.

    If the update does not change rows without a gradient, the variable has only the other rows, and so has the
    optimizer's state. Otherwise the gradient and the part are unchanged.
    """
    if not (isinstance(gradient, tf.IndexedSlices) and keeps_other_rows(optimizer)):
        yield gradient, part
        return
    rows = step.table_rows = TableRows(table, part, gradient.indices, step.replica)
    try:
        yield rows.renumbered(gradient), rows
    finally:
        step.table_rows = None
    rows.store()


def keeps_other_rows(optimizer: Any) -> bool:
    """Whether an optimizer reads all rows of the variable or its state, but changes only those that have gradients.

    SGD without momentum reads no rows. Others, such as Adam, change all rows, since their averages decay.
    """
    return type(optimizer).update_step is keras.optimizers.Adagrad.update_step


class TableRows(AssignedTensor):
    """Stands for a replica's part of a table in an optimizer's update, and has some of its rows, each once.

    Args:
      table: The `ShardedTable`.
      part: The replica's part of it.
      indices: Numbers of rows of the part, which may repeat.
      replica: Number of the replica within its worker.
    """

    def __init__(self, table: Any, part: tf.Variable, indices: tf.Tensor, replica: int):
        self._table, self._part, self._replica = table, part, replica
        self._rows, self._places = tf.unique(indices)
        self._states: dict[int, tuple[tf.Variable, AssignedTensor]] = {}
        super().__init__(tf.gather(part, self._rows))

    def renumbered(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns the gradient of these rows: that of the part, with the places of the rows here as indices."""
        return tf.IndexedSlices(gradient.values, self._places, tf.shape(self._value))

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
