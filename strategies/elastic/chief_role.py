"""The role of worker 0 in a `fit`: lets workers join, averages their weights and logs, ends the `fit`."""

import functools
import time
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist._compat import keras_stack
from tfdist.cluster import ClusterSpec
from tfdist.strategies.elastic import model_state
from tfdist.strategies.elastic.elastic_start import greeting_of, write_members
from tfdist.strategies.elastic.ended_fits import EndedFits
from tfdist.strategies.elastic.fit_in_rounds import FitInRounds
from tfdist.strategies.elastic.fit_role import FitRole
from tfdist.strategies.elastic.round_averaging import averaged_logs
from tfdist.strategies.elastic.round_chief import RoundChief
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution
from tfdist.strategies.local_steps.synchronization import Synchronization

_PATIENCE_ROUNDS = 10


class ChiefRole(FitRole):
    """Worker 0 in a `fit`.

    Args:
      synchronization, strategy: As for `FitRole`.
      cluster: The cluster.
      silence_seconds: How long a member may be silent before it counts as lost.
      setup: The properties that must be equal on all workers; see `setup_of_worker`.
    """

    def __init__(
        self,
        synchronization: Synchronization,
        strategy: Any,
        cluster: ClusterSpec,
        silence_seconds: float,
        setup: dict[str, Any],
    ):
        super().__init__(synchronization, cluster.num_workers, strategy)
        self._workers, self._options = cluster.num_workers, strategy.fault_tolerance
        self._ended, self._has_trained, self._round_seconds = EndedFits(), False, 0.0
        write = functools.partial(write_members, start_seconds=self._options.start_timeout_seconds)
        self._chief = RoundChief(cluster, silence_seconds, greeting_of(setup), self._lose, write)
        self._chief.late = self._ended.over

    def joining(self, fit: FitInRounds) -> list[int]:
        """Returns the workers that join when the next round of a `fit` begins."""
        return self._chief.joining(fit.number)

    def begin_fit(self, fit: FitInRounds, model: keras.Model) -> None:
        """Lets members know that the `fit` has begun."""
        self._chief.fit = fit.number

    def begin_round(self, fit: FitInRounds, model: keras.Model) -> None:
        """Lets workers join with the present state; awaits all in the first round of the program."""
        is_first, fit.has_begun = not fit.has_begun, True
        if is_first:
            workers = None if self._has_trained else range(1, self._workers)
            with self.waiting():
                joining = self._chief.await_workers(fit.number, workers, self._options.start_timeout_seconds)
            self._has_trained = True
        else:
            joining = self._chief.joining(fit.number)
        if joining:
            state = self._state(fit, model)
            with self.waiting():
                self._chief.welcome(joining, state)
            if not is_first:
                logging.warning("worker %s has joined", ", ".join(map(str, joining)))
        self._chief.present = Message("place", _place_fields(fit))
        self.averaging.begin(model, self.values(model.trainable_weights))

    def averaged_weights(
        self, fit: FitInRounds, model: keras.Model, done: Contribution, ends: list[np.ndarray]
    ) -> Message:
        """Gathers the parts of the round, and answers with the next weights."""
        trainable, executions = len(model.trainable_weights), self.executions(model)
        with self.waiting():
            parts = self._chief.gather("weights", fit.place, self._patience_seconds)
            answer = self.averaging.averaged(fit.number, done, ends, parts, trainable, executions)
            self._chief.answer(dict.fromkeys(parts, answer))
            self._chief.close_round(parts, fit.steps)
            self._round_seconds = time.monotonic() - fit.began
        return answer

    def averaged_logs(self, fit: FitInRounds, epoch: int, part: Message) -> dict[str, float]:
        """Gathers the logs of the epoch, and answers with their averages."""
        with self.waiting():
            parts = {0: part, **self._chief.gather("logs", fit.place, self._patience_seconds)}
            averages = fit.epoch_logs[epoch] = averaged_logs(parts)
            answer = Message("logs", {"fit": fit.number, "logs": averages})
            self._chief.answer(dict.fromkeys(parts.keys() - {0}, answer))
        return averages

    def end_fit(self, fit: FitInRounds) -> None:
        """Ends the `fit` for all, and keeps its last weights for workers that come later."""
        model = fit.model()
        arrays = [] if model is None else self.values(model_state.all_state_of(model))
        fields = {"fit": fit.number, "has_optimizer": True, "ledger": self.averaging.ledger.to_json()}
        over = Message("over", fields, arrays)
        self._ended.note(model, over)
        with self.waiting():
            self._chief.end_fit(fit.number, over)
        logging.info("%s", self.averaging.ledger.report(self._workers).describe())

    @property
    def _patience_seconds(self) -> float:
        """How long to wait for a member that lives but has not finished its round."""
        given = self._options.stall_timeout_seconds
        return float(given or max(self._options.start_timeout_seconds, _PATIENCE_ROUNDS * self._round_seconds))

    def _lose(self, worker: int, rows: int) -> None:
        self.averaging.ledger.lose(worker, rows)

    def _state(self, fit: FitInRounds, model: keras.Model) -> Message:
        """Returns the state of the model and the place where training goes on, for workers that join."""
        fields = {**_place_fields(fit), "ledger": self.averaging.ledger.to_json()}
        fields["logs"] = sorted(fit.epoch_logs.items())
        return Message("state", fields, self.values(model_state.all_state_of(model)))


def _place_fields(fit: FitInRounds) -> dict[str, Any]:
    """Returns the place where training goes on, as JSON."""
    sharding = keras_stack.sharding_of_fit()
    text = None if sharding is None else sharding.serialize()
    text = text.decode() if isinstance(text, bytes) else text
    return {"fit": fit.number, "place": keras_stack.place_in_fit(), "sharding": text}
