"""The part of a member, each worker except worker 0, in a `fit` that goes on when workers are lost.

A member joins, sends its weights and logs to worker 0, and takes its answers.
"""

import contextlib
import dataclasses
import sys
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist._compat import keras_internals, keras_stack
from tfdist.cluster import ClusterSpec
from tfdist.errors import WorkerLostError
from tfdist.strategies.elastic import model_state
from tfdist.strategies.elastic.elastic_start import take_greeting
from tfdist.strategies.elastic.fit_in_rounds import FitInRounds
from tfdist.strategies.elastic.fit_role import FitRole
from tfdist.strategies.elastic.round_member import RoundMember
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution, RowLedger
from tfdist.strategies.local_steps.synchronization import Synchronization


class MemberRole(FitRole):
    """A member in a `fit`.

    Args:
      synchronization, strategy: As for `FitRole`.
      cluster: The cluster.
      silence_seconds: How long worker 0 may be silent before it counts as lost.
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
        self._worker = cluster.worker_id
        self._member = RoundMember(cluster, strategy.fault_tolerance.start_timeout_seconds, silence_seconds)
        take_greeting(self._member.hear("greeting"), setup, self._worker)

    def begin_fit(self, fit: FitInRounds, model: keras.Model) -> None:
        """Takes the state of worker 0, or the place where the others train, before which to pass over batches."""
        said = self._joined(fit, "place", "state", is_warm=False)
        if said.kind == "over":
            self._take_end(fit, said)
            keras_internals.begin_with_epoch(model, sys.maxsize)  # Nothing is left to train.
            return
        if said.kind == "state":
            self._take_state(fit, model, said)
        fit.is_warm = said.kind == "state"  # All begin together, and need not trace before.
        epoch, batch = said.fields["place"]
        fit.until = epoch, batch
        text, sharding = said.fields["sharding"], keras_stack.sharding_of_fit()
        fit.reads = sharding is None or text is None
        if not fit.reads:
            sharding.deserialize(text)
        keras_internals.begin_with_epoch(model, epoch)

    def join_late(self, fit: FitInRounds, model: keras.Model) -> None:
        """Joins the `fit` of the others after a step, which has traced it: they have not waited for that.

        The results of the step are replaced by the state of worker 0, at a later place than this step.
        """
        fit.is_warm = True
        said = self._joined(fit, "state", is_warm=True)
        fit.rows = fit.epoch_rows = 0
        if said.kind == "over":
            self._take_end(fit, said)
            return
        self._take_state(fit, model, said)
        model.reset_metrics()
        epoch, batch = said.fields["place"]
        fit.until, fit.reads = (epoch, batch), True
        logging.warning("worker %d joins in epoch %d, after batch %d", self._worker, epoch + 1, batch)

    def tell_progress(self, fit: FitInRounds) -> None:
        """Tells worker 0 how many rows this worker has trained on since the last synchronization."""
        self._member.send(Message("progress", {"rows": fit.rows}))

    def averaged_weights(
        self, fit: FitInRounds, model: keras.Model, done: Contribution, ends: list[np.ndarray]
    ) -> Message | None:
        """Sends the part of this worker, and takes the answer with the counts of rows."""
        fields = {"fit": fit.number, "place": fit.place, "done": dataclasses.asdict(done)}
        answer = self._answer_to(fit, Message("weights", fields, ends))
        if answer is not None:
            self.averaging.ledger = RowLedger.from_json(answer.fields["ledger"])
        return answer

    def averaged_logs(self, fit: FitInRounds, epoch: int, part: Message) -> dict[str, float] | None:
        """Sends the logs of this worker, and takes the averages."""
        answer = self._answer_to(fit, part)
        return None if answer is None else answer.fields["logs"]

    def end_fit(self, fit: FitInRounds) -> None:
        """Leaves the `fit`, which the others continue, unless worker 0 has ended it."""
        if not fit.is_over:
            with contextlib.suppress(WorkerLostError):  # Worker 0 may be done already, and nothing more is needed.
                self._member.send(Message("leave", {"fit": fit.number}))

    def _joined(self, fit: FitInRounds, *kinds: str, is_warm: bool) -> Message:
        """Asks worker 0 to join a `fit`, and returns its answer: one of these kinds, or that the `fit` is over."""
        self._member.send(Message("join", {"fit": fit.number, "is_warm": is_warm}))
        with self.waiting():
            return self._member.hear(*kinds, "over", fit=fit.number)

    def _answer_to(self, fit: FitInRounds, part: Message) -> Message | None:
        """Sends a part, and returns the answer of worker 0, which has the same kind; `None` if the `fit` is over."""
        with self.waiting():
            self._member.send(part)
            answer = self._member.hear(part.kind, "over", fit=fit.number)
        if answer.kind != "over":
            return answer
        self._take_end(fit, answer)
        return None

    def _take_state(self, fit: FitInRounds, model: keras.Model, state: Message) -> None:
        self.assign(model_state.all_state_of(model), state.arrays)
        self.averaging.ledger = RowLedger.from_json(state.fields["ledger"])
        fit.epoch_logs = dict(map(tuple, state.fields["logs"]))

    def _take_end(self, fit: FitInRounds, over: Message) -> None:
        """Takes the news that worker 0 has ended a `fit`, which ends it on this worker."""
        model, fit.is_over = fit.model(), True
        if model is not None:
            model.stop_training = True
            if over.arrays:
                has_optimizer = over.fields["has_optimizer"]
                self.assign(model_state.all_state_of(model) if has_optimizer else model.weights, over.arrays)
        self.averaging.ledger = RowLedger.from_json(over.fields["ledger"])
