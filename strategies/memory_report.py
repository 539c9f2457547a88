"""The memory that the variables of a strategy take on each replica, with and without sharding."""

import dataclasses
import math
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.strategies.distributed_variables import OptimizerVariable, WeightVariable
from tfdist.strategies.memory_table import memory_table
from tfdist.strategies.sharding.sharded_state import ShardedState, is_accumulator
from tfdist.strategies.sharding.sharded_table import ShardedTable
from tfdist.strategies.sharding.sharded_weight import ShardedWeight


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of memory that a strategy's variables take on the replica of this worker that takes the most.

    Counts variables, not what the program computes with them, such as activations.

    Attributes:
      weights: Weights that are trained.
      gradients: Gradients of these weights while a step computes them, of the same size.
      optimizer_state: State of optimizers.
      accumulated_gradients: Gradients that `gradient_accumulation_steps` adds up.
      residuals: Residuals of compression, kept from step to step.
      local_copies: With `tfdist.DiLoCo`, the weights of the last synchronization, and changes that travel.
      other: Other variables, such as statistics of layers and metrics.
      whole_optimizer_state: The same as `optimizer_state`, without sharding.
      whole_weights: The same as `weights` and `gradients`, without sharding.
    """

    weights: int
    gradients: int
    optimizer_state: int
    accumulated_gradients: int
    residuals: int
    local_copies: int
    other: int
    whole_optimizer_state: int
    whole_weights: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.kinds.values())

    @property
    def whole_total(self) -> int:
        """Sum of all parts, without sharding."""
        return sum(self._whole_kinds().values())

    @property
    def kinds(self) -> dict[str, int]:
        """The parts by name, as they are now."""
        return {name: value for name, value in dataclasses.asdict(self).items() if not name.startswith("whole_")}

    def _whole_kinds(self) -> dict[str, int]:
        whole = {"weights": self.whole_weights, "gradients": self.whole_weights}
        return {**self.kinds, **whole, "optimizer_state": self.whole_optimizer_state}

    def __str__(self) -> str:
        return memory_table({"now": self.kinds, "unsharded": self._whole_kinds()})


class MadeVariables:
    """The variables that a strategy has made and the program still holds."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def add(self, variable: Any) -> None:
        """Notes a new variable."""
        self._known.append(weakref.ref(variable))

    def report(self, residuals: int, local_copies: int) -> MemoryReport:
        """Returns the memory of the variables; `residuals` and `local_copies` are those of a replica in bytes."""
        variables = [variable for known in self._known if (variable := known()) is not None]
        kinds: dict[str, list[Any]] = {}
        for variable in variables:
            kinds.setdefault(_kind_of(variable), []).append(variable)
        weights = _on_one_replica(kinds.get("weights", ()))
        state = kinds.get("optimizer_state", [])
        return MemoryReport(
            weights=weights,
            gradients=weights,
            optimizer_state=_on_one_replica(state),
            accumulated_gradients=_on_one_replica(kinds.get("accumulated_gradients", ())),
            residuals=residuals,
            local_copies=local_copies,
            other=_on_one_replica(kinds.get("other", ())),
            whole_optimizer_state=sum(map(_whole_bytes, state)),
            whole_weights=sum(map(_whole_bytes, kinds.get("weights", ()))),
        )


def _kind_of(variable: Any) -> str:
    if isinstance(variable, ShardedWeight | ShardedTable):
        return "weights"
    if isinstance(variable, OptimizerVariable | ShardedState):
        return "accumulated_gradients" if is_accumulator(variable) else "optimizer_state"
    return "weights" if isinstance(variable, WeightVariable) and variable.trainable else "other"


def _on_one_replica(variables: Iterable[Any]) -> int:
    """Returns the bytes of the replica of this worker that takes the most."""
    replicas = zip(*(map(_bytes, getattr(each, "values", (each,))) for each in variables), strict=True)
    return max((sum(sizes) for sizes in replicas), default=0)


def _bytes(variable: tf.Variable) -> int:
    return math.prod(variable.shape) * variable.dtype.size


def _whole_bytes(variable: Any) -> int:
    if isinstance(variable, ShardedState):
        return math.prod(variable.partition.shape) * variable.dtype.size
    return _bytes(variable)
