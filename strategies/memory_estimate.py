"""Estimates the memory that training a model takes on each replica, without making its variables."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.readable_numbers import size
from tfdist.strategies.compression import from_name
from tfdist.strategies.compression_policy import policy_of
from tfdist.strategies.distributed_optimizer import exchanging_optimizers
from tfdist.strategies.memory_needs import MemoryNeed, ModelShapes, TensorShape, TrainedWeight, needs_of
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
    """

    replicas: int
    needs: dict[str | None, MemoryNeed]

    def fitting(self, memory_bytes: float) -> list[str | None]:
        """Returns the values of `model_sharding` with which a replica needs at most this many bytes."""
        return [mode for mode, need in self.needs.items() if need.total <= memory_bytes]

    def verdict(self, memory_bytes: float) -> str:
        """Returns a sentence that says which option makes the model fit into this many bytes for each replica."""
        fitting = self.fitting(memory_bytes)
        if None in fitting:
            return f"The model fits into {size(memory_bytes)} without sharding."
        if fitting:
            return f"The model fits into {size(memory_bytes)} with model_sharding={fitting[0]!r}."
        least = min(self.needs.values(), key=lambda need: need.total)
        return (
            f"The model does not fit into {size(memory_bytes)}: each replica needs at least {size(least.total)}. Take "
            "more workers, or a smaller model."
        )

    def __str__(self) -> str:
        columns = {mode or "unsharded": dataclasses.asdict(need) for mode, need in self.needs.items()}
        return f"{self.replicas} replicas, without activations and batches\n{memory_table(columns)}"


def estimate_memory(make_model: Callable[[], keras.Model], replicas: int, *, compression: Any = None) -> MemoryEstimate:
    """Estimates what training needs of the memory of each replica, for each value of `model_sharding`.

    Makes the model in a graph that is never run, so no weights are allocated and the model may be larger than the
    memory. Takes about as long as building the model. Activations and batches are not counted: they grow with the batch
    size of a worker. Tables of `tfdist.layers.ShardedEmbedding` count as if each replica had all rows.

        tfdist.estimate_memory(make_model, replicas=4)

    Args:
      make_model: A function that returns a built and compiled model, as in the scope of a strategy.
      replicas: Number of replicas: workers times devices of each.
      compression: The argument of the strategy, if it compresses.

    Returns:
      The estimate. `print` shows a table, and `verdict` names the option that fits into a given memory.

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
    policy = policy_of(compression)
    with _random_states_kept(), tf.Graph().as_default():
        return MemoryEstimate(replicas, needs_of(_shapes_of(make_model(), policy, replicas), replicas))


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Undoes the draws of Python's and Keras' seeds, so that an estimate does not change the training after it."""
    known = keras_internals.global_seed_generator() if keras_internals.has_global_seed_generator() else None
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
        keras_internals.set_global_seed_generator(known)


def _shapes_of(model: Any, policy: Any, replicas: int) -> ModelShapes:
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            f"The function must return a built model of Keras, got {model!r}. Give the model an `Input`, or call "
            "`model.build(input_shape)`."
        )
    optimizers = exchanging_optimizers(model)
    for optimizer in optimizers:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    known: set[int] = set()
    sparse = {id(each) for each in _embedding_tables(model)}  # Their gradients are sparse, without residuals.
    weights = []
    for variable in model.trainable_variables:
        residual = 0 if id(variable) in sparse else _residual_bytes(variable, policy)
        weights.append(_weight(variable, optimizers, residual, known))
    rest = [each for optimizer in optimizers for each in optimizer.variables if id(each) not in known]
    unique = {id(each): each for each in rest}.values()
    return ModelShapes(tuple(weights), tuple(map(_shape, unique)), tuple(map(_shape, model.non_trainable_variables)))


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


def _embedding_tables(model: keras.Model) -> list[Any]:
    layers = [each for each in keras_internals.layers_of(model) if isinstance(each, keras.layers.Embedding)]
    return [variable for layer in layers for variable in layer.trainable_variables]


def _residual_bytes(variable: Any, policy: Any) -> int:
    """Returns the bytes of float32 numbers that error feedback keeps for the gradient of a weight."""
    shape, dtype = tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype)
    codec = None if policy is None else from_name(policy(shape, dtype, variable.path))
    if codec is None or not codec.error_feedback:
        return 0
    return 4 * int(shape.num_elements())


def _shape(variable: Any) -> TensorShape:
    return TensorShape(tuple(variable.shape), tf.as_dtype(variable.dtype).size)
