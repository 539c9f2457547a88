"""A model's `train_function` that counts what it reads, and can pass over what was trained on before."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.errors import BackupError
from tfdist.faults import watchdog
from tfdist.strategies import keras_calls


class CountedSteps:
    """Stands for `model.train_function` during a `fit`.

    Attributes:
      notes: That it is not to be wrapped: what it stands for notes the executions.
      function: What it stands for.
      iterator: At hand, of an epoch or of the whole `fit`.
      consumed: Batches taken from it.
      left: Batches of this epoch that are still to be passed over.
    """

    notes = True

    def __init__(self, function: Callable[[Iterator], Any], steps_per_execution: int):
        self.function = function
        self.consumed = 0
        self.left = 0
        self._steps = steps_per_execution
        self.iterator: Any = None
        self._ahead = 0
        self._said_ahead: Callable[[int], None] = lambda _: None
        self._reads = self._runs_last = False
        self._logs: Any = None

    def pass_over(
        self, batches: int, ahead: int, said_ahead: Callable[[int], None], reads: bool, runs_last: bool, logs: Any
    ) -> None:
        """Lets the next calls return `logs` instead of training, for `batches` batches.

        Args:
          batches: Of this epoch.
          ahead: Batches before this epoch, from the same iterator.
          said_ahead: Called with their number once they are read.
          reads: Whether they have to be read; an input may itself continue where it was.
          runs_last: Whether the last of them is trained on, for the variables that a step makes.
          logs: Of the last of them.
        """
        self.left, self._ahead, self._said_ahead = batches, ahead, said_ahead
        self._reads, self._runs_last, self._logs = reads, runs_last, logs

    def __call__(self, iterator: Any) -> Any:
        """Trains for one execution, or passes over its batches."""
        if inspect.isgenerator(iterator):  # the one batch of a callback's `train_on_batch`
            return self.function(iterator)
        if iterator is not self.iterator:
            if self.iterator is not None:  # a `fit` that was broken off had more to pass over
                self.left = self._ahead = 0
            self.iterator, self.consumed = iterator, 0
        if self._ahead:
            self._read(iterator, self._ahead)
            self._said_ahead(self._ahead)
            self._ahead = 0
        if not self.left:
            return self._train(iterator)
        self.left -= self._steps
        if self._runs_last and not self.left:
            self._train(iterator)
        elif self._reads:
            self._read(iterator, self._steps, may_end=not self.left)
        else:
            self.consumed += self._steps
        return self._logs

    def _train(self, iterator):
        logs = self.function(iterator)
        self.consumed += self._steps
        return logs

    def _read(self, iterator, batches, may_end=False):
        for number in range(batches):
            try:
                next(iterator)
            except StopIteration:
                if may_end and number:  # An epoch's last execution may have fewer steps.
                    return
                raise BackupError(
                    f"The backup was made further on in the input, which now ends after {self.consumed} batches. Give "
                    "`fit` the data it had, or another backup_dir."
                ) from None
            self.consumed += 1
            watchdog.moved()


def count_steps(model: keras.Model, former: CountedSteps | None = None) -> CountedSteps:
    """Puts `CountedSteps` in the place of the model's train function, unless they are there.

    Args:
      model: Whose.
      former: Those of this `fit` so far, which go on counting if the function was made anew.
    """
    if not isinstance(model.train_function, CountedSteps):
        reports = getattr(model.distribute_strategy, "reports", None)
        if reports is not None:
            keras_calls.note_functions(reports.activity, model)
        if former is None:
            former = CountedSteps(model.train_function, model.steps_per_execution)
        former.function = model.train_function
        model.train_function = former
    return model.train_function


def uncount_steps(model: keras.Model) -> None:
    """Puts the train function back."""
    if isinstance(model.train_function, CountedSteps):
        model.train_function = model.train_function.function
