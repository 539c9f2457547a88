"""The position of a `fit` in its input: counts the batches that are read, and continues there after a restart."""

import functools
from collections.abc import Mapping

from absl import logging

from tfdist._compat import keras_internals
from tfdist.backup.random_states import RandomStates
from tfdist.backup.sharding_positions import ShardingPositions
from tfdist.backup.state_provider import CapturedState, SavedState, StateProvider, TrainedFit
from tfdist.backup.step_counter import CountedSteps, count_steps, uncount_steps
from tfdist.errors import BackupError, PositionError
from tfdist.readable_numbers import counted


class InputPosition(StateProvider):
    """Saves the position of a `fit` in its input, and continues there after a restart.

    A `BalancedSharding` continues at its saved position. Any other input is read again up to the batch at which the
    backup was made. The number of batches that were read is in `FitProgress`.
    """

    name = "input"

    def __init__(self, fit: TrainedFit):
        super().__init__(fit)
        self._counted: CountedSteps | None = None
        uncount_steps(fit.model)  # after an interrupted `fit`
        self._shardings = ShardingPositions(
            getattr(fit.model.distribute_strategy, "shardings", ()),
            fit.input.sharding,
            is_other=fit.input.is_known and fit.input.sharding is None,
        )

    def capture(self) -> CapturedState:
        """Returns the positions of the strategy's `BalancedSharding`s for a commit."""
        return CapturedState(plain=self._shardings.capture())

    def check(self, saved: SavedState) -> None:
        """Checks that the saved position exists in the present data. A later `fit` may have other data."""
        if not saved.is_of_later_fit:
            self._check_batches(saved)
            try:
                self._shardings.check(saved.plain)
            except PositionError as error:
                raise BackupError(
                    f"The backup {saved.path} is of other data: {error} You can also give another backup_dir."
                ) from error

    def _check_batches(self, saved: SavedState) -> None:
        """Raises `BackupError` if an epoch of the present `fit` cannot continue after the commit's batch."""
        then, batches = saved.progress, self._fit.input.batches
        together = getattr(self._fit.model, "steps_per_execution", 1)  # Keras counts full executions.
        if then.batch % together:
            raise BackupError(
                f"With steps_per_execution={together}, `fit` cannot continue after batch {then.batch} of an epoch, as "
                f"the backup {saved.path} demands. Compile with {then.steps_per_execution}, as before."
            )
        if not then.batch or not batches:
            return
        if then.batch > -(-batches // together) * together:
            of = f" of {then.steps_per_epoch}" if then.steps_per_epoch else ""
            raise BackupError(
                f"The backup {saved.path} was made after batch {then.batch}{of} of an epoch, but an epoch has "
                f"{batches} now. Give `fit` the batch size and the steps per epoch of that run (if they depend on the "
                "number of workers, start as many workers), or another backup_dir."
            )
        if batches != then.steps_per_epoch and then.steps_per_epoch and saved.worker == 0:
            logging.warning(
                "Epochs had %s when the backup %s was made, but have %d now: the first %d of them are skipped, "
                "although they may hold other data.",
                *(counted(then.steps_per_epoch, "batch"), saved.path, batches, then.batch),
            )

    def restore(self, saved: SavedState) -> None:
        """Restores the positions of `BalancedSharding`s. One without step reports counts reread batches itself."""
        if not saved.is_of_later_fit and not saved.is_reread:
            self._shardings.restore(saved.plain)

    def count_steps(self) -> CountedSteps | None:
        """Wraps the model's train function to count steps, also a replaced one; `None` if there is none."""
        if self._fit.model.train_function is not None:
            self._counted = count_steps(self._fit.model, self._counted)
        return self._counted

    def consumed(self, *, is_within_epoch: bool) -> int:
        """Returns how many batches were read from the iterator with which a restart continues."""
        counted = self._fit.model.train_function
        if not isinstance(counted, CountedSteps) or (not is_within_epoch and self._begins_anew(counted)):
            return 0
        return counted.consumed

    def begin_epoch(
        self, random: RandomStates, saved: Mapping[str, SavedState] | None, *, lacks_variables: bool = False
    ) -> None:
        """Prepares an epoch before Keras makes its iterator. Passes over batches trained on before a restart.

        `saved` has the restored states of a commit by `StateProvider` name, if the epoch continues from it.
        `lacks_variables`: whether a step must make variables of the commit.
        """
        counted = self.count_steps()
        if counted is None or counted.iterator is None or self._begins_anew(counted):
            random.begin_input()
        own = saved[self.name] if saved else None
        self._shardings.begin_epoch(own.plain if own else None)
        if own is None or counted is None or not (own.progress.batch or own.progress.consumed):
            return
        then, reads = own.progress, not self._shardings.continues(own.plain)
        if saved and reads:
            random.begin_input_again(saved[random.name])
        counted.pass_over(
            then.batch,
            then.consumed - then.batch if reads else 0,
            functools.partial(self._end_reading_ahead, random if not then.batch else None),
            reads=reads,
            runs_last=lacks_variables and reads,
            logs=then.logs,
        )

    def _end_reading_ahead(self, random: RandomStates | None, batches: int) -> None:
        if random is not None:
            random.end_reading_again()
        if self._fit.input.epochs is not None:
            keras_internals.count_as_seen(self._fit.input.epochs, batches)

    def _begins_anew(self, counted: CountedSteps) -> bool:
        """Whether an epoch that begins now reads from a new iterator. Keras makes a new one at the end of the input."""
        epochs = self._fit.input.epochs
        return epochs is None or not keras_internals.goes_on_with(epochs, counted.iterator)
