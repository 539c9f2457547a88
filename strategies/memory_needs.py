"""Policy: bytes of memory that a training job needs on each replica, by the shapes of its variables alone."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from tfdist.strategies.sharding.ownership import owners
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.weight_creation import FEWEST_ELEMENTS
from tfdist.strategies.sharding.work_ahead import AHEAD_BYTES

# From this number of replicas on, the sums of gradients are encoded too, with a residual each.
_FEWEST_ENCODED_SUMS = 3


@dataclasses.dataclass(frozen=True)
class TensorShape:
    """Shape of a tensor and the bytes of each element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclasses.dataclass(frozen=True)
class TrainedWeight:
    """A weight, with the state that training keeps for it.

    Attributes:
      value: The weight.
      states: The optimizer's state for the weight, such as Adam's two momenta.
      is_elementwise: Whether each replica can keep any part of the state.
      needs_whole: Whether the optimizer updates whole weights only, so that the weight cannot be divided.
      accumulators: Gradients that `gradient_accumulation_steps` adds up.
      residual_bytes: Bytes that compression keeps for the replica's own gradient of the weight between steps.
      is_table: Whether its rows are divided among all replicas, whatever the strategy shards.
    """

    value: TensorShape
    states: tuple[TensorShape, ...] = ()
    is_elementwise: bool = True
    needs_whole: bool = False
    accumulators: tuple[TensorShape, ...] = ()
    residual_bytes: int = 0
    is_table: bool = False

    def part_of_table(self, replicas: int) -> "TrainedWeight":
        """Returns the part of a replica, if the rows are divided; otherwise the weight."""
        if not self.is_table:
            return self

        def part(whole: TensorShape) -> TensorShape:
            return TensorShape(Partition.of_table(whole.shape, replicas).part_shape, whole.item_bytes)

        states, accumulators = (tuple(map(part, each)) for each in (self.states, self.accumulators))
        return dataclasses.replace(self, value=part(self.value), states=states, accumulators=accumulators)


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """Shapes of all variables of a model and its optimizer.

    Attributes:
      weights: The weights that are trained.
      other_state: State of the optimizer that is not of the shape of a weight, so that each replica has all of it.
      local_copies: Copies of weights that replicas keep for local steps.
      other: Variables that are not trained, such as statistics of layers.
    """

    weights: tuple[TrainedWeight, ...]
    other_state: tuple[TensorShape, ...] = ()
    local_copies: tuple[TensorShape, ...] = ()
    other: tuple[TensorShape, ...] = ()

    @property
    def dense(self) -> list[TrainedWeight]:
        """The weights that replicas exchange as a whole. Exchanges of tables grow with the batch."""
        return [each for each in self.weights if not each.is_table]


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory that training takes on the replica that takes the most.

    Without activations and batches, which the batch size decides, and without the memory of Python and TensorFlow.

    Attributes:
      weights: Weights that are trained.
      gradients: Gradients of a step.
      exchange: Sums of the gradients, or weights that are gathered, while replicas exchange them.
      optimizer_state: State of the optimizer.
      accumulated_gradients: Gradients that `gradient_accumulation_steps` adds up.
      residuals: Residuals of compression, kept from step to step.
      local_copies: With `tfdist.DiLoCo`, the weights of the last synchronization, and changes that travel.
      other: Other variables, such as statistics of layers.
    """

    weights: int
    gradients: int
    exchange: int
    optimizer_state: int
    accumulated_gradients: int
    residuals: int
    local_copies: int
    other: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))


def needs_of(model: ModelShapes, replicas: int, group_size: int | None = None) -> dict[str | None, MemoryNeed]:
    """Returns the memory of each replica, by the value of `model_sharding`. One replica shards nothing.

    Args:
      model: The variables.
      replicas: Number of replicas.
      group_size: Number of replicas that divide the model among themselves; `None` for all.
    """
    model = dataclasses.replace(model, weights=tuple(each.part_of_table(replicas) for each in model.weights))
    whole, dense = _whole(model, replicas), model.dense
    if replicas == 1:
        return {None: whole}
    shards = group_size or replicas
    of_tables = _bytes(state for each in model.weights if each.is_table for state in each.states)
    # Groups sum encoded gradients as a whole. Otherwise a replica encodes no sum of which it needs only its part.
    summed_whole = [each.value for each in dense if each.residual_bytes and shards < replicas]
    in_parts = [each.value for each in dense if not each.residual_bytes or shards == replicas]
    residuals = sum(_residuals(each, 1 if each.is_elementwise else replicas) for each in model.weights)
    sharded = dataclasses.replace(
        whole,
        optimizer_state=_sharded_state(dense, shards) + of_tables + _bytes(model.other_state),
        residuals=whole.residuals if shards < replicas else residuals,
        # Sums of parts exist beside the gradients. Gathered weights take the memory of the gradients afterwards.
        exchange=_part_bytes(in_parts, shards) + _bytes(summed_whole),
    )
    needs: dict[str | None, MemoryNeed] = {None: whole, "optimizer": sharded}
    if not any(each.needs_whole or not each.is_elementwise or each.residual_bytes for each in dense):
        needs["parameters"] = _with_parts_of_weights(dense, sharded, shards)
    return needs


def group_sizes(replicas: int) -> list[int]:
    """Returns the sizes of equal groups of at least two replicas, the smallest first, and last that of one group."""
    return [size for size in range(2, replicas + 1) if replicas % size == 0]


def _with_parts_of_weights(dense: Sequence[TrainedWeight], sharded: MemoryNeed, shards: int) -> MemoryNeed:
    """Returns the need if large weights, and gradients added up for them, are divided too; by that of sharded state."""
    large = [each for each in dense if math.prod(each.value.shape) >= max(FEWEST_ELEMENTS, shards)]
    divided = [each.value for each in large]
    accumulators = [accumulator for each in large for accumulator in each.accumulators]
    parts = sharded.weights - _bytes(divided) + _part_bytes(divided, shards)
    accumulated = sharded.accumulated_gradients - _bytes(accumulators) + _part_bytes(accumulators, shards)
    in_flight = max((each.bytes for each in divided), default=0)
    # A weight is gathered while the one before is in use, and its gradient exists beside them until it is summed.
    exchange = 2 * max(in_flight, min(AHEAD_BYTES, _bytes(divided)))
    return dataclasses.replace(
        sharded, weights=parts, gradients=parts, accumulated_gradients=accumulated, exchange=exchange
    )


def _whole(model: ModelShapes, replicas: int) -> MemoryNeed:
    exchanges = replicas > 1
    weights = _bytes(each.value for each in model.weights)
    return MemoryNeed(
        weights=weights,
        gradients=weights,
        exchange=_bytes(each.value for each in model.dense) if exchanges else 0,
        optimizer_state=_bytes(state for each in model.weights for state in each.states) + _bytes(model.other_state),
        accumulated_gradients=_bytes(each for weight in model.weights for each in weight.accumulators),
        residuals=sum(_residuals(each, replicas) for each in model.weights) if exchanges else 0,
        local_copies=_bytes(model.local_copies) if exchanges else 0,
        other=_bytes(model.other),
    )


def _residuals(weight: TrainedWeight, parts: int) -> int:
    """Returns the bytes of residuals for a weight whose summed gradient is encoded in `parts`, one on each replica."""
    of_sum = -(-weight.residual_bytes // parts) if parts >= _FEWEST_ENCODED_SUMS else 0
    return weight.residual_bytes + of_sum


def _sharded_state(weights: Sequence[TrainedWeight], shards: int) -> int:
    """Returns the bytes of the state of weights on the one of `shards` replicas that has the most of it."""
    cut = sum(_part_bytes(each.states, shards) for each in weights if each.is_elementwise)
    owned = [each for each in weights if not each.is_elementwise]
    return cut + _largest_load(owned, shards, lambda each: _bytes(each.states))


def _largest_load(weights: Sequence[TrainedWeight], shards: int, load: Callable[[TrainedWeight], int]) -> int:
    loads = [0] * shards
    owner_of = owners([math.prod(each.value.shape) for each in weights], shards)
    for weight, owner in zip(weights, owner_of, strict=True):
        loads[owner] += load(weight)
    return max(loads)


def _part_bytes(tensors: Iterable[TensorShape], shards: int) -> int:
    return sum(Partition.of(each.shape, shards).part_elements * each.item_bytes for each in tensors)


def _bytes(tensors: Iterable[TensorShape]) -> int:
    return sum(each.bytes for each in tensors)
