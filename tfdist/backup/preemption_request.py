"""Whether the workers of a `fit` are asked to leave: by a signal to one, or by a supervisor that wants more of them."""

import functools
import weakref
from typing import Any

import keras

from tfdist import _tf
from tfdist.backup.commit_agreement import CommitAgreement
from tfdist.backup.commit_writer import CommitWriter
from tfdist.faults import preemption
from tfdist.faults.fault_tolerance import options_of


class PreemptionRequest:
    """What one `fit` knows of it.

    A supervisor asks by a file, which is looked for at each commit: a signal may come when nobody listens any more.
    Where steps report, all learn of either by a report of the same step. Where they do not, as those of loops of the
    user's, all learn of it by a commit, and leave after their next.

    Args:
      strategy: Of the model.
      agreement: Among the workers.
      validates: Whether epochs end with a validation.

    Attributes:
      listens: From `begin` to `end`.
      validation_seconds: How long the last validation took, once there was one.
    """

    def __init__(self, strategy: Any, agreement: CommitAgreement, validates: bool):
        self.listens = False
        self.validation_seconds: float | None = None
        self._strategy = strategy
        self._agreement = agreement
        self._reports = getattr(strategy, "reports", None) or preemption.LoneReports()
        self._watch: preemption.Watch | None = None
        self._by_report = False
        self._validates_long = validates  # until one is timed

    def begin(self, model: keras.Model | None) -> None:
        """Listens.

        Args:
          model: Whose Keras `fit` is under way. `None` in a loop of the user's, of which nobody knows whether it runs.
        """
        is_under_way = functools.partial(_is_fitting, weakref.ref(model)) if model is not None else _always
        self._watch = preemption.install(self._strategy, self._reports, is_under_way)
        self._reports.listeners.append(self._hear)
        self.listens = True

    def end(self) -> None:
        """Listens no more: nothing would answer a signal."""
        if self.listens:
            self.listens = False
            self._reports.listeners.remove(self._hear)
            if self._watch is not None:
                preemption.uninstall(self._watch)

    def tell(self, saver: CommitWriter) -> None:
        """Asks all workers to leave, as by a signal, if a commit says that one was asked."""
        if saver.are_asked and self.listens:
            self._reports.ask_to_stop()

    def is_here(self) -> bool:
        """Whether this worker was asked, also while a `fit` is passed over."""
        return self.listens and self._reports.asked_here

    @property
    def by_all(self) -> bool:
        """Whether all workers leave after this step; one that is alone need not wait for a report."""
        return self._by_report or (self._agreement.workers == 1 and self.is_here())

    def may_validate_long(self) -> bool:
        """Whether a request to leave may not be answered in time in the validation that follows."""
        if not self.listens:
            return False
        if self.validation_seconds is not None:  # Asked here, after a step, as nobody waits for anybody.
            limit = options_of(self._strategy).preemption_timeout_seconds / 2
            is_long = self.validation_seconds > limit
            self._validates_long = self._agreement.settle("fit", None, lambda _: is_long)
        return self._validates_long

    def _hear(self, report: Any) -> None:
        if report.stop:
            self._by_report = True


def _is_fitting(model: weakref.ref[Any]) -> bool:
    """Whether a Keras `fit` of this model is under way in this thread."""
    return any(fitting is model() for fitting in _tf.keras_fitting_models())


def _always() -> bool:
    return True
