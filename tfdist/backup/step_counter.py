"""A `train_function` that counts the batches that it reads, and can skip batches that were trained on before."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.errors import BackupError
from tfdist.faults import beside_steps
from tfdist.readable_numbers import counted
from tfdist.strategies import keras_calls


class CountedSteps:
    """Wraps `model.train_function` to count the batches read, and to skip those trained on before a restart.

    Attributes:
      notes: Its presence prevents another wrapper by `note_functions`: `function` already notes its executions.
      function: The wrapped train function.
      iterator: The present iterator, of an epoch or of the whole `fit`.
      consumed: Number of batches taken from `iterator`.
      left: Number of batches of this epoch that are still to be skipped.
    """

    notes = True

    def __init__(self, function: Callable[[Iterator[Any]], Any], steps_per_execution: int):
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
        """Makes the next calls skip `batches` batches, trained on before a restart: they return `logs`.

        Args:
          batches: Number of batches of this epoch to skip.
          ahead: Number of batches before this epoch to read from the same iterator.
          said_ahead: Called with `ahead` once these batches are read.
          reads: Whether skipped batches must be read. Some inputs continue at their position by themselves.
          runs_last: Whether to train on the last skipped execution, because a step makes missing variables.
          logs: Logs of the last skipped batch.
        """
        self.left, self._ahead, self._said_ahead = batches, ahead, said_ahead
        self._reads, self._runs_last, self._logs = reads, runs_last, logs

    def __call__(self, iterator: Any) -> Any:
        """Trains for one execution of the train function, or skips its batches."""
        if inspect.isgenerator(iterator):  # from `train_on_batch` in a callback
            return self.function(iterator)
        if iterator is not self.iterator:
            if self.iterator is not None:  # an interrupted `fit` had more batches to skip
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

    def _train(self, iterator: Iterator[Any]) -> Any:
        logs = self.function(iterator)
        self.consumed += self._steps
        return logs

    def _read(self, iterator: Iterator[Any], batches: int, may_end: bool = False) -> None:
        for number in range(batches):
            try:
                next(iterator)
            except StopIteration:
                if may_end and number:  # An epoch's last execution may have fewer steps.
                    return
                raise BackupError(
                    f"The backup was made later in the input, which now ends after {counted(self.consumed, 'batch')}. "
                    "Give `fit` the same data as before, or another backup_dir."
                ) from None
            self.consumed += 1
            beside_steps.moved()


def count_steps(model: keras.Model, former: CountedSteps | None = None) -> CountedSteps:
    """Wraps the model's train function in `CountedSteps`, unless it is one already, and returns the wrapper.

    If the train function was replaced, the `former` wrapper of this `fit` continues.
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
    """Restores the original train function of a model, which `count_steps` has wrapped."""
    if isinstance(model.train_function, CountedSteps):
        model.train_function = model.train_function.function
