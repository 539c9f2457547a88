"""Estimates the memory that training a model takes on each replica, without making its variables."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.kept_random_state import kept_random_state
from tfdist.readable_numbers import counted, size
from tfdist.strategies.auto_compression import AutoPolicy
from tfdist.strategies.collectives.shard_groups import is_group_size
from tfdist.strategies.compression import from_name
from tfdist.strategies.compression_policy import OneCodec, policy_of
from tfdist.strategies.distributed_optimizer import exchanging_optimizers
from tfdist.strategies.local_steps.synchronization import DiLoCo, Synchronization, check_synchronization
from tfdist.strategies.memory_needs import MemoryNeed, ModelShapes, TensorShape, TrainedWeight, group_sizes, needs_of
from tfdist.strategies.memory_table import memory_table
from tfdist.strategies.sharding.elementwise import is_factored, takes_parts
from tfdist.strategies.sharding.sharded_state import is_accumulator


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a training job takes on each replica.

    `print` shows a table.

    Attributes:
      replicas: Number of replicas.
      needs: The memory of each replica, by the value of `model_sharding`.
      shard_group_size: Number of replicas that divide the model among themselves; `None` for all.
      needs_in_groups: The same as `needs`, by each divisor of `replicas` from 2 on. A strategy takes a size if it also
        fits the devices of a worker. The largest is one group of all.
    """

    replicas: int
    needs: dict[str | None, MemoryNeed]
    shard_group_size: int | None = None
    needs_in_groups: dict[int, dict[str | None, MemoryNeed]] = dataclasses.field(default_factory=dict)

    def fitting(self, memory_bytes: float) -> list[str | None]:
        """Returns the values of `model_sharding` with which a replica needs at most this many bytes."""
        return [mode for mode, need in self.needs.items() if need.total <= memory_bytes]

    def verdict(self, memory_bytes: float) -> str:
        """Returns a sentence that says which option makes the model fit into this many bytes for each replica."""
        fitting, fits = self.fitting(memory_bytes), f"The model fits into {size(memory_bytes)}"
        if None in fitting:
            return f"{fits} without sharding."
        groups = self._fitting_groups(memory_bytes)
        if fitting and self.shard_group_size is not None:
            return f"{fits} with {self._options(fitting[0], self.shard_group_size)}."
        if fitting:
            smallest = next((each for each, mode in groups.items() if mode == fitting[0]), self.replicas)
            in_groups = f", also with shard_group_size={smallest}" if smallest < self.replicas else ""
            return f"{fits} with model_sharding={fitting[0]!r}{in_groups}."
        if groups:
            larger, mode = next(iter(groups.items()))
            return (
                f"The model does not fit into {size(memory_bytes)} in groups of {self.shard_group_size}. It fits with "
                f"{self._options(mode, larger)}."
            )
        least = min((need for needs in self._in_groups.values() for need in needs.values()), key=_total)
        return (
            f"The model does not fit into {size(memory_bytes)}: each replica needs at least {size(least.total)}. Take "
            "more workers, or a smaller model."
        )

    @property
    def _in_groups(self) -> dict[int, dict[str | None, MemoryNeed]]:
        return self.needs_in_groups or {self.shard_group_size or self.replicas: self.needs}

    def _fitting_groups(self, memory_bytes: float) -> dict[int, str | None]:
        """Returns the sizes of groups in which a sharded model fits, each with the first value that makes it fit."""
        fitting: dict[int, str | None] = {}
        for group_size, needs in sorted(self._in_groups.items()):
            for mode, need in needs.items():
                if mode is not None and need.total <= memory_bytes:
                    fitting.setdefault(group_size, mode)
        return fitting

    def _options(self, mode: str | None, group_size: int) -> str:
        groups = f" and shard_group_size={group_size}" if group_size < self.replicas else " and without groups"
        return f"model_sharding={mode!r}{groups}"

    def __str__(self) -> str:
        columns = {mode or "unsharded": dataclasses.asdict(need) for mode, need in self.needs.items()}
        groups = "" if self.shard_group_size is None else f" in groups of {self.shard_group_size}"
        return f"{counted(self.replicas, 'replica')}{groups}, without activations and batches\n{memory_table(columns)}"


def _total(need: MemoryNeed) -> int:
    return need.total


def estimate_memory(
    make_model: Callable[[], keras.Model],
    replicas: int,
    *,
    compression: Any = None,
    shard_group_size: int | None = None,
    synchronization: Synchronization | None = None,
) -> MemoryEstimate:
    """Estimates what training needs of the memory of each replica, for each value of `model_sharding`.

    Makes the model in a graph that is never run, so no weights are allocated and the model may be larger than the
    memory. Takes about as long as building the model. Activations and batches are not counted: they grow with the batch
    size of a worker. So do the exchanges of a `tfdist.layers.ShardedEmbedding`, for which it counts the rows of one
    replica.

        tfdist.estimate_memory(make_model, replicas=4)

    Args:
      make_model: A function that returns a built and compiled model, as in the scope of a strategy.
      replicas: Number of replicas: workers times devices of each.
      compression: The argument of the strategy, if it compresses.
      shard_group_size: The argument of the strategy, if groups of replicas divide the model among themselves. It must
        divide `replicas`. A strategy takes such a size if it also fits the devices of a worker: it divides their
        number, or is a multiple of it. With one replica it is ignored.
      synchronization: The argument of the strategy, if replicas train by local steps. They shard nothing then.

    Returns:
      The estimate. `print` shows a table, and `verdict` names the options that fit into a given memory.

    Raises:
      ValueError: If an argument is invalid, or the model is not built.
    """
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"`replicas` must be an integer of at least 1, got {replicas!r}.")
    if not callable(make_model) or isinstance(make_model, keras.Model):
        raise ValueError(
            "`make_model` must be a function that returns a model, so that it can be made without memory for its "
            f"weights, got {make_model!r}."
        )
    check_synchronization(synchronization, shard_group_size and "optimizer", compression)
    sizes, policy = group_sizes(replicas), policy_of(compression)
    in_groups = shard_group_size is not None
    if in_groups and not (is_group_size(shard_group_size) and (replicas == 1 or shard_group_size in sizes)):
        possible = ", ".join(map(str, sizes)) or "any, since one replica has no groups"
        raise ValueError(
            f"`shard_group_size` must be an integer of at least 2 that divides the number of replicas, got "
            f"{shard_group_size!r} for {counted(replicas, 'replica')}. Possible sizes: {possible}."
        )
    with unallocated(make_model) as model:
        shapes = _shapes_of(model, policy, synchronization if replicas > 1 else None)
    needs = {each: needs_of(shapes, replicas, each) for each in sizes} or {1: needs_of(shapes, 1)}
    if policy is not None:  # Strategies refuse it with compression.
        for each in needs.values():
            each.pop("parameters", None)
    if synchronization is not None:  # Strategies refuse to shard with it.
        needs = {replicas: {None: needs[replicas][None]}}
    group_size = None if replicas == 1 else shard_group_size
    return MemoryEstimate(replicas, needs[group_size or replicas], group_size, needs)


@contextlib.contextmanager
def unallocated(make_model: Callable[[], keras.Model]) -> Iterator[keras.Model]:
    """Context with the model that a function makes, in a graph that is never run, so without memory for its weights.

    Raises:
      ValueError: If the function returns no built model.
    """
    with _random_states_kept(), tf.Graph().as_default():
        model = make_model()
        if not isinstance(model, keras.Model) or not model.built:
            raise ValueError(
                f"The function must return a built model of Keras, got {model!r}. Give the model an `Input`, or call "
                "`model.build(input_shape)`."
            )
        yield model


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Undoes the draws of Python's and Keras' seeds, so that an estimate does not change the training after it."""
    known = keras_internals.global_seed_generator() if keras_internals.has_global_seed_generator() else None
    try:
        with kept_random_state():
            yield
    finally:
        keras_internals.set_global_seed_generator(known)


def _shapes_of(model: Any, policy: Any, synchronization: Synchronization | None) -> ModelShapes:
    optimizers = exchanging_optimizers(model)
    for optimizer in optimizers:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    known: set[int] = set()
    # Their gradients are sparse, without residuals. The changes of DiLoCo are dense.
    sparse = {id(each) for each in _embedding_tables(model) if synchronization is None}
    tables = {id(each) for each in _embedding_tables(model, divided=True)}
    weights = []
    for variable in model.trainable_variables:
        residual = 0 if id(variable) in sparse else _residual_bytes(variable, policy)
        weight = _weight(variable, optimizers, residual, known)
        weights.append(dataclasses.replace(weight, is_table=id(variable) in tables))
    rest = [each for optimizer in optimizers for each in optimizer.variables if id(each) not in known]
    unique = {id(each): each for each in rest}.values()
    state, copies = [*map(_shape, unique)], []
    if isinstance(synchronization, DiLoCo):
        outer = synchronization.new_outer_optimizer()
        outer.build(model.trainable_variables)
        state += map(_shape, outer.variables)
        copies = [each.value for each in weights] * (2 if synchronization.overlap_steps else 1)
    others = tuple(map(_shape, model.non_trainable_variables))
    return ModelShapes(tuple(weights), tuple(state), tuple(copies), others)


def _weight(variable: Any, optimizers: list[Any], residual_bytes: int, known: set[int]) -> TrainedWeight:
    """Describes a weight with its state in all optimizers, and adds the ids of the state to `known`."""
    value, states, accumulators, elementwise, needs_whole = _shape(variable), [], [], True, False
    for optimizer in optimizers:
        for state in keras_internals.states_of_weight(optimizer, variable):
            if id(state) in known:
                continue
            if is_accumulator(state):
                accumulators.append(_shape(state))
            elif tuple(state.shape) == value.shape or (is_factored(optimizer) and len(state.shape)):
                states.append(_shape(state))
                elementwise &= takes_parts(optimizer) or is_factored(optimizer)
                needs_whole |= not takes_parts(optimizer)
            else:
                continue
            known.add(id(state))
    return TrainedWeight(value, tuple(states), elementwise, needs_whole, tuple(accumulators), residual_bytes)


def _embedding_tables(model: keras.Model, *, divided: bool = False) -> list[Any]:
    layers = [each for each in keras_internals.layers_of(model) if isinstance(each, keras.layers.Embedding)]
    if divided:
        layers = [each for each in layers if getattr(each, "divides_rows", False)]
    return [variable for layer in layers for variable in layer.trainable_variables]


def _residual_bytes(variable: Any, policy: Any) -> int:
    """Returns the bytes of float32 numbers that error feedback keeps for the gradient of a weight."""
    shape, dtype = tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype)
    if policy is None:
        return 0
    if isinstance(policy, AutoPolicy):  # Each allowed codec keeps its own.
        codecs = [OneCodec(codec)(shape, dtype, variable.path) for codec in policy.codecs]
    else:
        codecs = [from_name(policy(shape, dtype, variable.path))]
    return sum(4 * int(shape.num_elements()) for codec in codecs if codec is not None and codec.error_feedback)


def _shape(variable: Any) -> TensorShape:
    return TensorShape(tuple(variable.shape), tf.as_dtype(variable.dtype).size)
