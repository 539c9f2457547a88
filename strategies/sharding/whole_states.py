"""Whole values of optimizer state that is kept in parts, while an optimizer that needs whole state runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies.sharding.assigned_tensor import AssignedTensor
from tfdist.strategies.sharding.elementwise import is_factored
from tfdist.strategies.sharding.part_tensors import own_part_of
from tfdist.strategies.sharding.sharded_state import ShardedState, is_average
from tfdist.strategies.sharding.sharded_update import gathered
from tfdist.strategies.step import current_step


@contextlib.contextmanager
def whole_states(optimizer: Any) -> Iterator[None]:
    """Context in which an optimizer that needs whole state has it, if each replica keeps a part of it."""
    step = current_step()
    if step is None or not is_factored(optimizer) or not _is_sharded(optimizer):
        yield
        return
    states = step.whole_states = WholeStates(optimizer, step)
    try:
        yield
    finally:
        step.whole_states = None  # From here on, states are parts again.
    states.keep()


def _is_sharded(optimizer: Any) -> bool:
    return any(isinstance(each.value, ShardedState) for each in optimizer.variables)


class WholeStates:
    """Gives Adafactor whole state in a step, in place of the parts that replicas keep.

    Each replica updates whole weights by whole sums of gradients, as without sharding, and keeps its part of the new
    state. Adafactor computes the state of a matrix, which has the size of the matrix, from the means of its rows and
    columns. So only these means and the state of vectors, which are small, are gathered in a step.

    Args:
      optimizer: The optimizer.
      step: The step of the replica.
    """

    def __init__(self, optimizer: Any, step: Any):
        self._values: dict[int, tuple[ShardedState, _WholeState]] = {}
        kept = [each.value for each in optimizer.variables if isinstance(each.value, ShardedState)]
        states = [each for each in kept if not is_average(each)]
        small = [each for each in states if each.weight is None or len(each.partition.shape) < 2]
        parts = [tf.convert_to_tensor(each) for each in small]
        wholes = dict(zip(map(id, small), gathered(parts, [each.partition for each in small], step), strict=True))
        self._shard = tf.distribute.get_strategy().extended.parts.shard_of(step.replica)
        for state in states:
            self._values[id(state)] = state, _WholeState(state, wholes.get(id(state)), step)

    def of(self, state: ShardedState) -> AssignedTensor:
        """Returns the whole value of a state, which takes assignments."""
        return self._values[id(state)][1]

    def keep(self) -> None:
        """Gives each state this replica's part of its new value."""
        for state, value in self._values.values():
            if value.is_assigned:
                state.assign(own_part_of(state.partition, value.read_value(), self._shard))


class _WholeState(AssignedTensor):
    """The whole value of a state, gathered when it is first read, unless it has been assigned before."""

    def __init__(self, state: ShardedState, value: tf.Tensor | None, step: Any):
        super().__init__(value)
        self._state, self._step, self.is_assigned = state, step, False

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self._state.partition.shape)

    @property
    def dtype(self) -> tf.DType:
        return self._state.dtype

    def read_value(self) -> tf.Tensor:
        if self._value is None:
            part = tf.convert_to_tensor(self._state.values[self._step.replica])
            self._value = gathered([part], [self._state.partition], self._step)[0]
        return self._value

    def assign(self, value: Any, **kwargs: Any) -> AssignedTensor:
        self.is_assigned = True
        return super().assign(value, **kwargs)
