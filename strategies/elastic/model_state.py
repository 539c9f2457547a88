"""Reads and assigns the state of a model that workers send each other: weights, and the variables of the optimizer."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError


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
            f"All workers must train the same model, but worker 0 has {len(values)} variables of the shapes "
            f"{shapes[1]!s:.300}, and this worker {len(variables)} of {shapes[0]!s:.300}. Build and compile the same "
            "model on all workers."
        )
    for variable, value in zip(variables, values, strict=True):
        for own in _local(variable, strategy):
            own.assign(value)


def _local(variable: Any, strategy: tf.distribute.Strategy) -> Sequence[Any]:
    return strategy.experimental_local_results(variable.value)
