"""The part that a worker takes in a `fit` that goes on when workers are lost.

Worker 0 and the members implement this interface.
"""

import abc
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.events.phase_names import WAITING
from tfdist.faults import beside_steps
from tfdist.strategies.elastic import model_state
from tfdist.strategies.elastic.fit_in_rounds import FitInRounds
from tfdist.strategies.elastic.round_averaging import RoundAveraging
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution
from tfdist.strategies.local_steps.synchronization import Synchronization


class FitRole(abc.ABC):
    """The role of a worker in a `fit`.

    Args:
      synchronization: How often to synchronize, and how.
      workers: Number of workers of the job.
      strategy: The strategy of this worker's devices.

    Attributes:
      averaging: The counts of rows, and on worker 0 the averages of rounds.
    """

    def __init__(self, synchronization: Synchronization, workers: int, strategy: Any):
        self.averaging = RoundAveraging(synchronization, workers)
        self._every, self._strategy = synchronization.every, weakref.ref(strategy)

    @abc.abstractmethod
    def begin_fit(self, fit: FitInRounds, model: keras.Model) -> None:
        """Begins a `fit`, when Keras has built the model. Members wait for worker 0 here."""

    def join_late(self, fit: FitInRounds, model: keras.Model) -> None:  # noqa: B027
        """Joins the `fit` of the others after a step, for which they have not waited. Worker 0 has nothing to join."""

    def joining(self, fit: FitInRounds) -> list[int]:
        """Returns the workers that worker 0 lets join when the next round of a `fit` begins."""
        return []

    def tell_progress(self, fit: FitInRounds) -> None:  # noqa: B027
        """Tells worker 0 how many rows this worker has trained on since the last synchronization."""

    def begin_round(self, fit: FitInRounds, model: keras.Model) -> None:  # noqa: B027
        """Begins a round: worker 0 lets workers join, and waits for all in the first round of the program."""

    @abc.abstractmethod
    def averaged_weights(
        self, fit: FitInRounds, model: keras.Model, done: Contribution, ends: list[np.ndarray]
    ) -> Message | None:
        """Returns the next weights and the steps of the next round, after all have sent their part of a round.

        Args:
          fit: The `fit`.
          model: Its model.
          done: The work of this worker in the round.
          ends: Its weights, the trainable ones first.

        Returns:
          The message of worker 0; `None` if it has ended the `fit`.
        """

    @abc.abstractmethod
    def averaged_logs(self, fit: FitInRounds, epoch: int, part: Message) -> dict[str, float] | None:
        """Returns the logs of an epoch, averaged over all members by rows; `None` if worker 0 has ended the `fit`.

        The message `part` has the logs of this worker.
        """

    @abc.abstractmethod
    def end_fit(self, fit: FitInRounds) -> None:
        """Ends a `fit` on this worker; worker 0 thereby ends it for all."""

    def executions(self, model: keras.Model) -> int:
        """Returns the number of executions of the train function in a round."""
        return -(-self._every // model.steps_per_execution)

    def values(self, variables: Sequence[Any]) -> list[np.ndarray]:
        """Returns copies of the values of Keras variables, once a GPU has computed them."""
        return model_state.values_of(variables, self._strategy())

    def assign(self, variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
        """Assigns values to Keras variables, on all replicas of this worker."""
        model_state.assign(variables, values, self._strategy())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The context of a wait for other workers, which has deadlines of its own."""
        strategy = self._strategy()
        with beside_steps.section(WAITING), strategy.reports.activity.exchanging("fit"):  # type: ignore[union-attr]
            yield
