"""Reads and assigns the state of a model that workers send each other: weights, and the variables of the optimizer."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.errors import ClusterError
from tfdist.readable_numbers import counted


def weights_of(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """Returns the trainable weights of a model, and its other weights."""
    return list(model.trainable_weights), list(model.non_trainable_weights)


def all_state_of(model: keras.Model) -> list[Any]:
    """Returns all variables that a worker needs to join: weights, and the variables of the optimizer, built if new."""
    optimizer = model.optimizer
    if optimizer is None:
        return [*model.weights]
    if not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    return [*model.weights, *optimizer.variables]


def values_of(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    """Returns copies of the values of Keras variables, as this worker's first replica has them."""
    return [np.array(_local(each, strategy)[0].read_value().numpy()) for each in variables]


def assign(variables: Sequence[Any], values: Sequence[np.ndarray], strategy: tf.distribute.Strategy) -> None:
    """Assigns values to Keras variables, on all replicas of this worker.

    Raises:
      ClusterError: If the values are those of another model.
    """
    shapes = [tuple(each.shape) for each in variables], [value.shape for value in values]
    if shapes[0] != shapes[1]:
        raise ClusterError(
            f"All workers must train the same model, but worker 0 has {counted(len(values), 'variable')} of the shapes "
            f"{shapes[1]!s:.300}, and this worker {len(variables)} of {shapes[0]!s:.300}. Build and compile the same "
            "model on all workers."
        )
    for variable, value in zip(variables, values, strict=True):
        for own in _local(variable, strategy):
            own.assign(value)


def advance_schedule(optimizer: Any, steps: int) -> int:
    """Lets the schedule of an optimizer's learning rate, if any, count steps that were not trained.

    Adds multiples of the steps whose gradients the optimizer accumulates, so that each sum stays complete.

    Args:
      optimizer: The optimizer of a model, or `None`.
      steps: Number of steps that were not trained and not counted yet.

    Returns:
      The number of steps that are still not counted.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return 0
    group = optimizer.gradient_accumulation_steps or 1
    if steps < group:
        return steps
    if isinstance(optimizer.get_config().get("learning_rate"), dict):
        keras_internals.counter_of(optimizer).assign_add(steps // group * group)
    return steps % group


def _local(variable: Any, strategy: tf.distribute.Strategy) -> Sequence[Any]:
    return strategy.experimental_local_results(variable.value)
