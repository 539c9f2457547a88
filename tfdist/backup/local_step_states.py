"""Saves what replicas that train by local steps keep: counts of steps and rows, and the state of outer updates."""

from typing import Any

import tensorflow as tf

from tfdist.backup.state_provider import CapturedState, SavedState, StateProvider, TrainedFit
from tfdist.strategies.distributed_optimizer import optimizers_of
from tfdist.strategies.local_steps.local_training import state_of_local_steps
from tfdist.strategies.local_steps.outer_update import IS_KEPT
from tfdist.strategies.local_steps.trained_weights import TrainedWeights


class LocalStepStates(StateProvider):
    """Saves and restores the state of local steps. The weights of each replica are among the `VariableStates`.

    On another number of workers, or with another `synchronization`, training starts from the weights of the last
    synchronization (DiLoCo), or from the average of the weights of all replicas (LocalSGD). With other fragments or
    another outer optimizer, the outer optimizer begins anew.
    """

    name = "local_steps"

    def __init__(self, fit: TrainedFit):
        super().__init__(fit)
        training = getattr(fit.model.distribute_strategy.extended, "local_training", None)
        self._trained: TrainedWeights | None = None
        if training is not None:
            self._trained = training.of_model(fit.model, optimizers_of(fit.model))

    def capture(self) -> CapturedState:
        """Returns the state of this worker's replicas, and the places of weights and statistics in the model."""
        elastic = getattr(self._fit.model.distribute_strategy, "elastic", None)
        if elastic is not None:
            arrays, counts = elastic.state()
            return CapturedState(own=arrays, plain={"outer": [], "statistics": [], "rows": counts})
        if self._trained is None:
            return CapturedState(plain={"outer": [], "statistics": []})
        own = {name: _read(variable) for name, variable in self._trained.state().items()}
        plain = {
            "outer": [self._places([each.value for each in outer.weights]) for outer in self._trained.outer],
            "statistics": self._places(self._trained.statistics),
        }
        return CapturedState(own=own, plain=plain)

    def restore(self, saved: SavedState) -> None:
        """Restores the state, or gives all replicas the weights of the last synchronization."""
        elastic = getattr(self._fit.model.distribute_strategy, "elastic", None)
        if elastic is not None and "rows" in saved.plain and not saved.is_of_later_fit:
            elastic.restore(saved.own.arrays, saved.plain["rows"])
        if saved.synchronization is None:
            return
        if self._trained is not None:
            self._trained.await_averages()  # Those of an earlier `fit` that has failed.
        if not saved.is_alike:
            self._start_from_synchronized(saved)
        elif self._trained is not None and not saved.is_of_later_fit:
            # The next synchronization may come before the first step.
            weights = self._fit.model.weights
            self._trained.include_statistics([weights[place].value for place in saved.plain["statistics"]])
            for name, variable in self._trained.state().items():
                if name in saved.own.arrays:
                    variable.assign(saved.own.arrays[name])
            self._trained.continue_travelling()

    def _start_from_synchronized(self, saved: SavedState) -> None:
        """Gives all replicas equal weights, and the state of the outer optimizers."""
        before = saved.parts[0].arrays  # Equal on all former replicas, apart from steps and rows.
        for place, weights in enumerate(saved.plain["outer"]):
            if not before[f"outer/{place}/{IS_KEPT}@0"]:
                continue  # The weights were synchronized just before the commit.
            for i, weight in enumerate(weights):
                variable = self._fit.model.weights[weight].value
                copies = variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]
                for copy in copies:
                    copy.assign(before[f"outer/{place}/start/{i}@0"])
        if self._trained is None or saved.is_of_later_fit:
            return
        keeps = saved.synchronization == state_of_local_steps(self._fit.model.distribute_strategy)
        for name, variable in self._trained.state().items():
            former = f"{name.partition('@')[0]}@0"
            if "/optimizer/" in name or name.startswith("taken"):
                if former in before and (keeps or name.startswith("taken")):
                    variable.assign(before[former])
            elif "/start/" not in name:  # No step is taken yet since this synchronization.
                variable.assign(tf.zeros_like(variable))

    def _places(self, variables: list[Any]) -> list[int]:
        """Returns the numbers of TensorFlow's variables among the weights of the model, as far as they are weights."""
        known = {id(each.value): place for place, each in enumerate(self._fit.model.weights)}
        return [known[id(each)] for each in variables if id(each) in known]


def _read(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
