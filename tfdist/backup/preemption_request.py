"""Requests to save and leave a `fit`: a signal to one worker, or a supervisor that wants to start more workers."""

import functools
import weakref
from typing import Any

import keras

from tfdist._compat import keras_stack
from tfdist.backup.chief_decision import ChiefDecision
from tfdist.backup.commit_writer import CommitWriter
from tfdist.faults import preemption
from tfdist.faults.fault_deadlines import options_of


class PreemptionRequest:
    """Tells the workers of one `fit` whether they are asked to save and leave.

    A supervisor asks by a file, which each commit looks for, because a signal may come when no `fit` listens. If steps
    report, all workers learn of a request from the report of the same step. Otherwise, as in custom loops, all workers
    learn of it from a commit, and leave after the next commit.

    Attributes:
      listens: Whether signals are handled: true from `begin` to `end`.
      validation_seconds: Duration of the last validation; `None` before the first.
    """

    def __init__(self, strategy: Any, agreement: ChiefDecision, validates: bool):
        self.listens = False
        self.validation_seconds: float | None = None
        self._strategy = strategy
        self._agreement = agreement
        self._reports = getattr(strategy, "reports", None) or preemption.LoneReports()
        self._watch: preemption.Watch | None = None
        self._by_report = False
        self._validates_long = validates  # until a validation is timed

    def begin(self, model: keras.Model | None) -> None:
        """Starts to listen for requests to save and leave: signals, or a supervisor with more workers.

        Args:
          model: The model of the running Keras `fit`. `None` in a custom loop, which cannot be seen to run or to end.
        """
        is_under_way = functools.partial(_is_fitting, weakref.ref(model)) if model is not None else lambda: True
        self._watch = preemption.install(self._strategy, self._reports, is_under_way)
        self._reports.listeners.append(self._hear)
        self.listens = True

    def end(self) -> None:
        """Stops listening for requests to save and leave, because no step would react to them any more."""
        if self.listens:
            self.listens = False
            self._reports.listeners.remove(self._hear)
            if self._watch is not None:
                preemption.uninstall(self._watch)

    def tell(self, writer: CommitWriter) -> None:
        """Asks all workers to save and leave, as a signal does, if a commit recorded that a worker was asked."""
        if writer.are_asked and self.listens:
            self._reports.ask_to_stop()

    def is_here(self) -> bool:
        """Whether this worker was asked to save and leave, also while a finished `fit` is skipped."""
        return self.listens and self._reports.asked_here

    @property
    def by_all(self) -> bool:
        """Whether all workers save and leave after this step. A single worker does not wait for a report."""
        return self._by_report or (self._agreement.workers == 1 and self.is_here())

    def may_validate_long(self) -> bool:
        """Whether to save before the next validation, since it may be too long to react to a request."""
        if not self.listens:
            return False
        if self.validation_seconds is not None:  # Agreed on after a step, when no worker waits for another.
            limit = options_of(self._strategy).preemption_timeout_seconds / 2
            is_long = self.validation_seconds > limit
            self._validates_long = self._agreement.settle("fit", None, lambda _: is_long)
        return self._validates_long

    def _hear(self, report: Any) -> None:
        if report.stop:
            self._by_report = True


def _is_fitting(model: weakref.ref[Any]) -> bool:
    """Whether a Keras `fit` of this model is under way in this thread, so that a step will react to a signal."""
    return any(fitting is model() for fitting in keras_stack.fitting_models())
