"""One update of an optimizer whose state is sharded: each replica updates its part of the weights."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.strategies.sharding.elementwise import takes_parts
from tfdist.strategies.sharding.muon_update import orthogonalizes
from tfdist.strategies.sharding.ownership import Ownership
from tfdist.strategies.sharding.part_clipping import clipped
from tfdist.strategies.sharding.part_tensors import Division, part_of
from tfdist.strategies.sharding.sharded_state import ShardedState, is_accumulator
from tfdist.strategies.sharding.sharded_weight import ShardedWeight, is_sharded_weight
from tfdist.strategies.sharding.table_rows import update_table
from tfdist.strategies.sharding.table_update import table_of
from tfdist.strategies.sharding.weight_part import MatrixPart, WeightPart, tensorflow_variable
from tfdist.strategies.sharding.work_ahead import WorkAhead


def partitions_of(optimizer: Any, variables: Sequence[Any]) -> list[Division | None]:
    """Returns how an optimizer's state for each of these variables is divided; `None` if it is not."""
    states = [each.value for each in optimizer.variables if isinstance(each.value, ShardedState)]
    divides = takes_parts(optimizer)
    known = {id(e.weight): e.partition for e in states if divides or isinstance(e.partition, Ownership)}
    weights = [tensorflow_variable(each) for each in variables]
    known |= {id(weight): weight.partition for weight in weights if isinstance(weight, ShardedWeight)}
    return [None if table_of(weight) else known.get(id(weight)) for weight in weights]


def updates_parts(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether an optimizer updates a part only of any of these variables on each replica."""
    return any(map(table_of, variables)) or any(partitions_of(optimizer, variables))


class ShardedUpdate:
    """Replaces weights by their parts while an optimizer runs on a replica, and puts the new parts together.

    Args:
      optimizer: The optimizer, with state for any variables that is sharded.
      variables: The variables to update, in the order of the gradients.
      step: The step of the replica.

    Attributes:
      partitions: How each variable is divided; `None` if it is not.
      assigned: Optimizer state that every replica has, and that the update has assigned.
      updated: The `WeightPart` that the optimizer updates now, if it tells.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], step: Any):
        self._optimizer, self._step = optimizer, step
        self.assigned: list[Any] = []
        self.updated: Any = None
        self._gathered: MatrixPart | None = None
        self._assigning: WorkAhead[tf.Operation] = WorkAhead()
        self._done: set[int] = set()  # The ids of parts that are assigned.
        self.partitions = partitions_of(optimizer, variables)
        check_updates_parts(optimizer, variables)
        self._shard = shard = tf.distribute.get_strategy().extended.parts.shard_of(step.replica)
        parts = [
            _part(optimizer, variable, partition, shard)
            for variable, partition in zip(variables, self.partitions, strict=True)
            if partition is not None
        ]
        self._parts = {id(part.whole): part for part in parts}
        tables = [table for table in map(table_of, variables) if table is not None]
        self._tables = {id(table): table.values[step.replica] for table in tables}
        self._table_of_part = {id(table.values[step.replica]): table for table in tables}
        tables_too = zip(self.partitions, map(_division_of_table, variables), strict=True)
        divisions = [partition or division for partition, division in tables_too]
        replicas = tf.distribute.get_strategy().extended.replicas
        self._copies = [0 if division is None else replicas // division.shards for division in divisions]

    def clipped(self, sums: list[Any]) -> list[Any]:
        """Clips summed gradients, of which some are parts, as the optimizer would clip whole gradients."""

        def sum_over_replicas(values: tf.Tensor) -> tf.Tensor:
            return self._step.all_reduce(tf.distribute.ReduceOp.SUM, values)

        return clipped(self._optimizer, sums, self._copies, sum_over_replicas)

    def in_parts(self, variables: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Returns what this replica updates of `variables`: their indices, and parts for those that are divided.

        If weights are divided, the last ones come first, since their gradients do.
        """
        known = {**self._parts, **self._tables}
        parts = [known.get(id(tensorflow_variable(each)), each) for each in variables]
        places = [i for i, part in enumerate(parts) if not (isinstance(part, WeightPart) and part.is_empty)]
        if any(is_sharded_weight(part.whole) for part in self._parts.values()):
            places.reverse()
        return places, [parts[i] for i in places]

    @contextlib.contextmanager
    def after_earlier_updates(self, variable: Any) -> Iterator[None]:
        """Lets the optimizer update a divided weight after those before, except the last ones, and assigns it at once.

        Otherwise the gradients, the temporary tensors and the new values of all weights could exist at once.
        """
        if not isinstance(variable, WeightPart) or not is_sharded_weight(variable.whole):
            yield
            return
        with tf.control_dependencies(self._assigning.to_await()):
            yield
            assigning = self._assign(variable)
        if assigning is not None:  # In a graph.
            self._assigning.add(assigning, variable.shape.num_elements() * variable.dtype.size)

    def apply(self, gradient: Any, variable: Any, update: Callable[[Any, Any], None]) -> None:
        """Calls `update` with a gradient and a variable; for a table with some of its rows at a time."""
        table = self._table_of_part.get(id(variable))
        if table is None:
            update(gradient, variable)
        else:
            update_table(self._optimizer, gradient, table, variable, self._step, update)

    def gather(self, part: tf.Tensor) -> tf.Tensor:
        """Gathers a tensor that is divided as the weight `updated`, such as its momentum; returns the whole tensor."""
        before, self._gathered = self._gathered, self.updated if isinstance(self.updated, MatrixPart) else None
        # If weights are divided, all whole updates may be too large to exist at once, so each waits for the one before.
        with tf.control_dependencies([before.read_value()] if before is not None else []):
            part = tf.identity(part)
        return gathered([part], [self.updated.partition], self._step, cuts=False)[0]

    def store(self) -> None:
        """Gathers the parts of all replicas and assigns them to the variables.

        State of an owned weight that is not sharded itself travels along, since only the owner has updated it.

        Raises:
          ValueError: If an update of whole weights has assigned state of which the weight is not known.
        """
        parts = []
        for part in self._parts.values():
            if is_sharded_weight(part.whole):
                if id(part) not in self._done:
                    self._assign(part)
            elif part.is_whole:
                part.whole.assign(part.read_value())
            else:
                parts.append(part)
        beside = self._states_beside(parts)
        if any(isinstance(part.partition, Ownership) for part in parts):
            self._check_assigned([state for state, _ in beside])
        own = [part.read_value() for part in parts]
        own += [part_of(owned, state, self._shard) for state, owned in beside]
        divisions = [part.partition for part in parts] + [owned for _, owned in beside]
        targets = [part.whole for part in parts] + [state for state, _ in beside]
        for target, whole in zip(targets, gathered(own, divisions, self._step), strict=True):
            target.assign(whole)

    def _assign(self, part: WeightPart) -> Any:
        """Assigns the new part of a divided weight. Returns the operation, in a graph."""
        self._done.add(id(part))
        part.whole.note_assigned()
        return part.whole.own_part.assign(part.read_value(), read_value=False)

    def _check_assigned(self, known: Sequence[Any]) -> None:
        unknown = [state.name for state in self.assigned if not any(state is each for each in known)]
        if unknown:
            raise ValueError(
                f"With model_sharding one replica updates each weight of {self._optimizer.name!r}, "
                f"which assigns {', '.join(map(repr, unknown))}, but it is not known for which weight. Make it by "
                "`add_variable_from_reference`, or keep it in a list in the order of the weights."
            )

    def _states_beside(self, parts: Sequence[WeightPart]) -> list[tuple[Any, Ownership]]:
        """Returns the states of owned weights that every replica has, with their owners."""
        found = []
        for part in parts:
            if isinstance(part.partition, Ownership):
                for state in keras_internals.states_of_weight(self._optimizer, part.whole):
                    if not isinstance(state.value, ShardedState) and not is_accumulator(state):
                        owned = dataclasses.replace(part.partition, shape=tuple(state.shape))
                        found.append((state.value, owned))
        return found


def _division_of_table(variable: Any) -> Division | None:
    table = table_of(variable)
    return None if table is None else table.partition


def _part(optimizer: Any, variable: Any, partition: Division, shard: int) -> WeightPart:
    is_whole = orthogonalizes(optimizer, variable)
    if is_whole and is_sharded_weight(variable):
        return MatrixPart(variable, partition, shard)
    return WeightPart(variable, partition, shard, is_whole=is_whole)


def check_updates_parts(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses an optimizer that needs whole weights, if any of these variables is divided."""
    weight = next((each for each in variables if is_sharded_weight(each)), None)
    if weight is not None and not takes_parts(optimizer):
        raise ValueError(
            f"With model_sharding='parameters' each replica has a part of {tensorflow_variable(weight).name!r}, but "
            f"optimizer {optimizer.name!r} updates whole weights. Use an optimizer that updates each element by "
            "itself, such as AdamW, or model_sharding='optimizer'. If this one does, set `updates_elementwise = True` "
            "in its class."
        )


def gathered(
    parts: Sequence[tf.Tensor], partitions: Sequence[Division], step: Any, *, cuts: bool = True
) -> list[tf.Tensor]:
    """Gathers tensors of which each replica has its part: part shapes -> shapes of the partitions."""
    reducer = tf.distribute.get_strategy().extended.reducer
    return reducer.gather_parts(parts, partitions, step, cuts=cuts) if parts else []
