"""Saves codec states (residuals, momenta) of gradient compression, and restores them at once or in the first step.

Codec states are named by the optimizer's index in the model and by gradient exchange, whatever was made before.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.backup.state_provider import CapturedState, SavedState, StateProvider
from tfdist.strategies.collectives.encoded_reducer import EncodedReducer
from tfdist.strategies.compression_state import CompressionState, sum_of
from tfdist.strategies.distributed_optimizer import exchanging_optimizers, optimizers_of


class ResidualStates(StateProvider):
    """Saves and restores the codec states (residuals, momenta) that compression keeps for a model's optimizers."""

    name = "residuals"

    def capture(self) -> CapturedState:
        """Returns the codec states of this worker's replicas for a commit.

        The late arrays have the form of `CompressionState.state`, for any number of workers.
        """
        exchanges = list(self._exchanges())
        kept = {
            f"{name}/{place}": variable.read_value()
            for name, exchange in exchanges
            for place, variable in _variables(exchange).items()
        }
        layouts = {name: exchange.layout.serialize() for name, exchange in exchanges}
        return CapturedState(own=kept, own_plain=layouts, late=functools.partial(_pending, exchanges, kept))

    def restore(self, saved: SavedState) -> None:
        """Restores codec states of this worker's replicas bit for bit, or distributes the former workers'."""
        if self._communication is None or saved.is_of_later_fit:
            return
        if saved.is_alike:
            layouts = saved.own.plain or {}  # Commits of earlier versions have none.
            for name, own in _by_exchange(saved.own.arrays).items():
                self._hand_over(name, functools.partial(_assign, own, layouts.get(name)))
        elif all(part.late for part in saved.parts):  # see `CompressionState.redistribute`
            for name, own in _by_exchange(sum_of([part.late for part in saved.parts])).items():
                arrays = [own[str(i)] for i in range(len(own))]
                self._hand_over(name, functools.partial(EncodedReducer.spread, pending=arrays))

    def drop_awaited(self) -> None:
        """Drops restored codec states of gradients that this `fit` has not exchanged."""
        if self._communication is not None and self._communication.drop_awaited():
            logging.warning("Residuals of gradients that are no longer exchanged are dropped.")

    @property
    def _communication(self) -> CompressionState | None:
        return getattr(self._fit.model.distribute_strategy, "communication", None)

    def _optimizers(self) -> list[Any]:
        """Returns all optimizers of the model that may exchange, also the outer ones of local steps."""
        training = getattr(self._fit.model.distribute_strategy.extended, "local_training", None)
        if training is None:
            return exchanging_optimizers(self._fit.model)
        trained = training.of_model(self._fit.model, optimizers_of(self._fit.model))
        return [outer.optimizer for outer in trained.outer]

    def _exchanges(self) -> Iterator[tuple[str, EncodedReducer]]:
        if self._communication is None:
            return
        found = set()  # A `LossScaleOptimizer` has the exchanges of the optimizer in it.
        for place, optimizer in enumerate(self._optimizers()):
            for name, exchange in self._communication.exchanges_of(optimizer).items():
                if id(exchange) not in found:
                    found.add(id(exchange))
                    yield f"{place}/{name}", exchange

    def _hand_over(self, name: str, give: Callable[[EncodedReducer], None]) -> None:
        place, _, exchange = name.partition("/")
        optimizers = self._optimizers()

        def fill(made: EncodedReducer) -> None:
            try:
                give(made)
            except ValueError as error:
                logging.warning("Residuals of another codec are dropped: %s", error)

        if self._communication is not None and int(place) < len(optimizers):
            self._communication.hand_over(optimizers[int(place)], exchange, fill)


def _pending(
    exchanges: Sequence[tuple[str, EncodedReducer]], captured: Mapping[str, tf.Tensor]
) -> dict[str, np.ndarray]:
    arrays = {}
    for name, exchange in exchanges:
        states = [
            [captured[f"{name}/states/{replica}/{i}"] for i in range(len(own))]
            for replica, own in enumerate(exchange.states)
        ]
        # A copy of the exchange with the captured states: `__init__` would make variables, tf.Module would track lists.
        then = object.__new__(type(exchange))
        then.__dict__.update(vars(exchange), states=states)
        arrays.update({f"{name}/{i}": array for i, array in enumerate(then.pending())})
    return arrays


def _variables(exchange: EncodedReducer) -> dict[str, tf.Variable]:
    states = {
        f"states/{replica}/{i}": state
        for replica, states in enumerate(exchange.states)
        for i, state in enumerate(states)
    }
    chosen = {f"chosen/{replica}": control.chosen for replica, control in enumerate(exchange.controls)}
    return {**states, **chosen, **{f"counts/{replica}": count for replica, count in enumerate(exchange.counts)}}


def _by_exchange(saved: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    grouped: dict[str, dict[str, np.ndarray]] = {}
    for name, value in saved.items():
        place, exchange, rest = name.split("/", 2)
        grouped.setdefault(f"{place}/{exchange}", {})[rest] = value
    return grouped


def _assign(saved: Mapping[str, np.ndarray], layout: str | None, exchange: EncodedReducer) -> None:
    own_layout = exchange.layout.serialize()
    if layout not in (None, own_layout):  # The choice of `Auto` is a place in its list of codecs, in any shapes.
        raise ValueError(
            "the backup has codec states of other gradients, or of another `allow` of Auto, than this program. "
            "Residuals, the choice of codecs and counts of traffic begin anew. To keep them, pass the same "
            "`compression`."
        )
    variables = _variables(exchange)
    here, there = ({name: tuple(each.shape) for name, each in named.items()} for named in (variables, saved))
    if here != there:
        raise ValueError(f"Expected shapes {here}, got {there}.")
    counts = exchange.own_counts()
    for name, variable in variables.items():
        variable.assign(saved[name])
    exchange.keep_own_counts(counts)  # The saved counts, by which codecs know their step, are of another process.
