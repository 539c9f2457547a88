"""The states that compression keeps between steps: captured, and restored at once or in the first step.

States are named by the optimizer's index in the model and the name of the exchange, whatever the program made before.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.strategies.collectives.encoded_reducer import EncodedReducer
from tfdist.strategies.compression_state import CompressionState, sum_of


def capture(communication: CompressionState | None, optimizers: Sequence[Any]) -> dict[str, tf.Tensor]:
    """Returns the states that this worker's replicas keep for the gradients of the optimizers."""
    return {
        f"{name}/{place}": variable.read_value()
        for name, exchange in _exchanges(communication, optimizers)
        for place, variable in _variables(exchange).items()
    }


def pending(
    communication: CompressionState | None, optimizers: Sequence[Any], captured: Mapping[str, tf.Tensor]
) -> dict[str, np.ndarray]:
    """Converts captured states to the form of `CompressionState.state`, for any number of workers; in a few passes."""
    arrays = {}
    for name, exchange in _exchanges(communication, optimizers):
        if f"{name}/counts/0" not in captured:
            continue
        states = [
            [captured[f"{name}/states/{replica}/{i}"] for i in range(len(own))]
            for replica, own in enumerate(exchange.states)
        ]
        # A copy of the exchange with the captured states: `__init__` would make variables, tf.Module would track lists.
        then = object.__new__(type(exchange))
        then.__dict__.update(vars(exchange), states=states)
        arrays.update({f"{name}/{i}": array for i, array in enumerate(then.pending())})
    return arrays


def restore(communication: CompressionState, optimizers: Sequence[Any], saved: Mapping[str, np.ndarray]) -> None:
    """Restores the states of this worker's replicas, bit for bit."""
    for name, own in _by_exchange(saved).items():
        _hand_over(communication, optimizers, name, functools.partial(_assign, own))


def redistribute(
    communication: CompressionState, optimizers: Sequence[Any], states: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Distributes the states of any number of former workers; see `CompressionState.redistribute`."""
    if not all(states):
        return
    for name, own in _by_exchange(sum_of(states)).items():
        arrays = [own[str(i)] for i in range(len(own))]
        _hand_over(communication, optimizers, name, functools.partial(EncodedReducer.spread, pending=arrays))


def _exchanges(
    communication: CompressionState | None, optimizers: Sequence[Any]
) -> Iterator[tuple[str, EncodedReducer]]:
    if communication is not None:
        for place, optimizer in enumerate(optimizers):
            for name, exchange in communication.exchanges_of(optimizer).items():
                yield f"{place}/{name}", exchange


def _variables(exchange: EncodedReducer) -> dict[str, tf.Variable]:
    states = {
        f"states/{replica}/{i}": state
        for replica, states in enumerate(exchange.states)
        for i, state in enumerate(states)
    }
    return {**states, **{f"counts/{replica}": count for replica, count in enumerate(exchange.counts)}}


def _by_exchange(saved: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    grouped: dict[str, dict[str, np.ndarray]] = {}
    for name, value in saved.items():
        place, exchange, rest = name.split("/", 2)
        grouped.setdefault(f"{place}/{exchange}", {})[rest] = value
    return grouped


def _hand_over(communication: CompressionState, optimizers: Sequence[Any], name: str, give: Any) -> None:
    place, _, exchange = name.partition("/")

    def fill(made: EncodedReducer) -> None:
        try:
            give(made)
        except ValueError as error:
            logging.warning("What compression had kept is left out, as it was of another codec: %s", error)

    if int(place) < len(optimizers):
        communication.hand_over(optimizers[int(place)], exchange, fill)


def _assign(saved: Mapping[str, np.ndarray], exchange: EncodedReducer) -> None:
    variables = _variables(exchange)
    here, there = ({name: tuple(each.shape) for name, each in named.items()} for named in (variables, saved))
    if here != there:
        raise ValueError(f"Expected shapes {here}, got {there}.")
    for name, variable in variables.items():
        variable.assign(saved[name])
