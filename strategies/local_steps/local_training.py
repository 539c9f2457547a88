"""Local steps of a strategy: gradients that stay on their replica, and synchronizations between steps."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals, keras_stack
from tfdist.strategies.local_steps.background_exchanges import BackgroundExchanges
from tfdist.strategies.local_steps.fragments import check_suffice
from tfdist.strategies.local_steps.synchronization import (
    Synchronization,
    check_keeps_no_averages,
    described_state,
)
from tfdist.strategies.local_steps.trained_weights import TrainedWeights
from tfdist.strategies.loss_weight import times
from tfdist.strategies.step import Step, current_step, replicas


class LocalTraining:
    """The local steps of a strategy with several replicas.

    Args:
      synchronization: How often to synchronize, and how.
      strategy: The strategy.

    Attributes:
      synchronization: As given.
    """

    def __init__(self, synchronization: Synchronization, strategy: Any):
        self.synchronization = synchronization
        self._strategy = weakref.ref(strategy)
        runs_beside = strategy.extended.reducer_beside is not strategy.extended.reducer
        self._background = BackgroundExchanges() if runs_beside else None
        # By the `id` of the model, or of the step counter of the first optimizer in a loop of the user. Not by weak
        # keys, since variables of Keras are compared by their values.
        self._trained: dict[int, TrainedWeights] = {}

    def gradients(self, step: Step, optimizer: Any, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients that an optimizer applies on this replica: those of its own rows.

        Args:
          step: The step of the replica.
          optimizer: The optimizer.
          gradients: Gradients of one replica. In a loop of the user they are divided by the size of the global batch,
            so they are multiplied by the number of replicas.
          variables: The variables of the gradients.
        """
        check_keeps_no_averages(optimizer)
        step.exchanges.count += 1  # Keras' optimizer has asked for the gradients, as it should.
        trained = self.of_step(step, optimizer)
        trained.include(_keras_variables(optimizer, variables))
        trained.begin_update(step)
        gradients = step.or_zeros(list(gradients))
        if step.model is None:
            gradients = [times(gradient, tf.constant(float(replicas()))) for gradient in gradients]
        return trained.averaged_at_first(step, gradients)

    def of_step(self, step: Step, optimizer: Any = None) -> TrainedWeights:
        """Returns the `TrainedWeights` of the model, or the loop, that runs a step."""
        if step.trained is None:
            step.trained = self._of(step.model if step.model is not None else keras_internals.counter_of(optimizer))
        return step.trained

    def of_model(self, model: keras.Model, optimizers: Sequence[Any]) -> TrainedWeights:
        """Returns the `TrainedWeights` of a model and these optimizers, also before its first step."""
        trained = self._of(model)
        for optimizer in optimizers:
            trained.include(_keras_variables(optimizer, keras_internals.trained_variables(optimizer)))
        return trained

    def check_model(self, model: keras.Model) -> None:
        """Checks before the first step of a model that its weights suffice for all fragments, if they are known.

        Only the optimizer that the model was compiled with counts. Optimizers of models inside it may train nothing in
        this `fit`. `TrainedWeights.include` checks each optimizer that trains.

        Raises:
          ValueError: If there are more fragments than weights of the optimizer.
        """
        optimizer = getattr(model, "optimizer", None)
        if id(model) in self._trained or not isinstance(optimizer, keras.optimizers.Optimizer):
            return
        weights = keras_internals.trained_variables(optimizer)
        if not weights and model.built:
            weights = model.trainable_variables  # Keras builds the optimizer for these.
        if weights:
            check_suffice(len(weights), getattr(self.synchronization, "fragments", 1))

    def has_trained(self, model: keras.Model) -> bool:
        """Whether replicas may have different weights of a model, since they have trained it."""
        trained = self._trained.get(id(model))
        with tf.init_scope():  # A step may be traced now.
            return trained is not None and int(trained.taken[0].numpy()) > 0

    def await_averages(self, model: keras.Model) -> None:
        """Awaits what travels of a model in the background, so that no state changes until the next step."""
        if id(model) in self._trained:
            self._trained[id(model)].await_averages()

    def take_travel_times(self) -> tuple[float, float]:
        """Returns the longest time that a fragment travelled, and the time that steps waited, since the last call.

        Both are in seconds. Only exchanges that overlap with steps count.
        """
        times = [each.times.take() for trained in self._trained.values() for each in trained.travelling]
        return max((longest for longest, _ in times), default=0.0), sum(waited for _, waited in times)

    def copied_bytes(self) -> int:
        """Returns the bytes of the copies of weights that each replica keeps, without the state of optimizers."""
        return sum(outer.copied_bytes() for trained in self._trained.values() for outer in trained.outer)

    def _of(self, owner: Any) -> TrainedWeights:
        if id(owner) not in self._trained:
            self._trained[id(owner)] = TrainedWeights(self.synchronization, self._strategy(), self._background)
            weakref.finalize(owner, self._trained.pop, id(owner), None).atexit = False
        return self._trained[id(owner)]

    def synchronize(self, run: Callable[..., Any], asks_to_stop: Any) -> bool:
        """Makes the weights of all replicas equal that were trained since the last synchronization, outside of a step.

        All workers must call it. Returns whether any worker has asked to stop; see `TrainedWeights`.
        """
        stepped = self._stepped()
        has_peers = self._strategy().extended._num_workers > 1  # type: ignore[union-attr]
        if has_peers and not set(stepped) <= {id(model) for model in keras_stack.fitting_models()}:
            gc.collect()  # Else a model that the program has dropped would count on some workers only.
            stepped = self._stepped()
        return any([trained.synchronize_outside(run, asks_to_stop) for trained in stepped.values()])

    def _stepped(self) -> dict[int, TrainedWeights]:
        return {owner: trained for owner, trained in list(self._trained.items()) if trained.has_stepped}


def local_training() -> LocalTraining | None:
    """The local steps of the current strategy; `None` if its replicas exchange gradients in each step."""
    return getattr(tf.distribute.get_strategy().extended, "local_training", None)


def kind_of_local_steps(strategy: Any) -> str | None:
    """The name of the kind of `synchronization`, such as "DiLoCo", if replicas train by local steps; else `None`."""
    training = getattr(strategy.extended, "local_training", None)
    return None if training is None else type(training.synchronization).__name__


def state_of_local_steps(strategy: Any) -> str | None:
    """Describes what decides the state of local steps, see `described_state`; `None` without local steps."""
    training = getattr(strategy.extended, "local_training", None)
    return None if training is None else described_state(training.synchronization)


def is_outer_update() -> bool:
    """Whether an optimizer applies sums over all replicas now, which it must not sum again."""
    step = current_step()
    return step is not None and step.applies_sums


def _keras_variables(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the Keras variables that hold TensorFlow's variables of an optimizer; Keras variables unchanged."""
    own = {id(each.value): each for each in keras_internals.trained_variables(optimizer) if hasattr(each, "value")}
    found = [variable if isinstance(variable, keras.Variable) else own.get(id(variable)) for variable in variables]
    lacking = next((i for i, each in enumerate(found) if each is None), None)
    if lacking is not None:
        raise ValueError(
            f"`synchronization` needs weights that are variables of Keras, but optimizer {optimizer.name!r} trains "
            f"{variables[lacking].name!r}, a `tf.Variable`. Use `keras.Variable` or `add_weight`."
        )
    return found
