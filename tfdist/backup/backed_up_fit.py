"""The callback behind `BackupAndRestore`: where a `fit` continues, when it saves, and when its process leaves."""

import math
import time
from typing import Any

import keras
from absl import logging

from tfdist._compat import keras_internals
from tfdist.backup import backup_cleanup, resume_agreement
from tfdist.backup.between_fits import BackupOptions, of_directory
from tfdist.backup.callback_states import CallbackStates
from tfdist.backup.chief_decision import ChiefDecision
from tfdist.backup.commit_store import CommitStore
from tfdist.backup.commit_writer import CommitWriter
from tfdist.backup.fit_progress import FitProgress
from tfdist.backup.input_position import InputPosition
from tfdist.backup.preemption_request import PreemptionRequest
from tfdist.backup.random_states import RandomStates
from tfdist.backup.residual_states import ResidualStates
from tfdist.backup.resume_message import resume_message
from tfdist.backup.save_schedule import SaveSchedule
from tfdist.backup.snapshot import Checkpoint, FitStates
from tfdist.backup.state_provider import FitInput, TrainedFit
from tfdist.backup.step_counter import uncount_steps
from tfdist.backup.variable_states import VariableStates
from tfdist.events.event_buffer import EVENTS
from tfdist.events.phase_names import RESTORE, SAVE
from tfdist.events.phase_times import TIMES
from tfdist.failure_report import note_step
from tfdist.faults import preemption


class FitBackup(keras.callbacks.Callback):
    """Backs up one `fit` for `BackupAndRestore`. It is the last callback, so all callbacks are saved at one moment.

    Args:
      options: Options of the user's `BackupAndRestore`.
      callbacks: The list of callbacks that contains this callback.
      given: The input of the `fit`.
      site: The call site of the `fit`.
    """

    def __init__(self, options: BackupOptions, callbacks: keras.callbacks.CallbackList, given: FitInput, site: str):
        super().__init__()
        self.has_begun = False
        self._options = options
        self._list = callbacks
        self._others: list[keras.callbacks.Callback] = []
        self._input = given
        self._site = site
        self._loaded: Checkpoint | None = None  # until the `fit` has come to its position
        self._stand_in: Checkpoint | None = None  # A later `fit`'s commit, if this `fit`'s end has none.
        self._passing_over = self._is_beyond = self._has_trained = self._has_validated = False
        self._logs: Any = None
        self._epoch = self._batch = 0
        self._batches = given.batches  # of the previous epoch; at first, those of the input if known
        self._batch_ended = 0.0

    # -- the beginning

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Claims the backup directory and restores the commit to continue from, on all workers or on none."""
        self.has_begun = True
        session = self._session = of_directory(self._options.directory)
        session.end_former()
        strategy = self.model.distribute_strategy
        self._agreement = ChiefDecision(strategy, self._options.timeout_seconds)
        self._request = session.request = PreemptionRequest(strategy, self._agreement, self._input.validates)
        others = [callback for callback in self._list.callbacks if callback is not self]
        self._states = FitStates(TrainedFit(self.model, others, self._input, session.starts, session.histories))
        self._position, self._random = self._states.of_kind(InputPosition), self._states.of_kind(RandomStates)
        self._start, checkpoint = resume_agreement.agree(
            session, self._options, self._agreement, self._site, self._states
        )
        self._writer = session.writer = CommitWriter(
            self._options.directory,
            self._start.run,
            self._agreement,
            session.store,
            self._options.keep,
            self._request.is_here,
        )
        if checkpoint is not None:
            since = time.monotonic_ns()
            with TIMES.within(RESTORE):
                self._states.restore(checkpoint)
            self._continue_from(checkpoint)
            EVENTS.note("restore", since=since, commit=checkpoint.commit.step)
        note_step(session.steps)
        EVENTS.count_from(session.steps)
        TIMES.resumed(checkpoint.commit.step if checkpoint is not None else None, session.steps)
        self._schedule = SaveSchedule(self._options.save_freq, self._agreement, session.steps)
        if self._options.save_before_preemption:
            self._request.begin(self.model if self._input.is_known else None)
        self._position.count_steps()

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        """Makes Keras begin the `fit` at the epoch of a commit, or end it at once if it was finished before."""
        then, session = checkpoint.progress, self._session
        session.steps, session.number = then.steps, checkpoint.commit.step
        epoch, last, is_done_before = then.epoch, self._last_epoch, self._start.is_done_before
        if is_done_before or (then.stops and not then.batch):
            epoch = max(self.params.get("epochs") or 1, 1)
            self.model.stop_training = True
        keras_internals.begin_with_epoch(self.model, epoch)
        self._is_beyond = not is_done_before and then.is_beyond(last)
        # A warning, because absl hides lower levels by default and the user would miss the first epochs.
        tell = logging.warning if self._agreement.is_chief else logging.info
        first = self._input.first_epoch
        tell("%s", resume_message(checkpoint, session.finished, last, first, is_done_before=is_done_before))
        if not is_done_before:
            self._loaded = checkpoint
        elif then.fit > session.finished:
            self._stand_in = checkpoint

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Skips the batches that were trained on before the restart, in the first epoch of a restored `fit`."""
        keras_internals.begin_with_epoch(self.model, None)
        self._has_trained = True
        self._epoch, self._batch, self._has_validated = epoch, 0, False
        loaded = self._loaded
        if loaded is None:
            self._position.begin_epoch(self._random, None)
            return
        self._passing_over = loaded.progress.batch > 0
        if self._passing_over:
            # Again: other callbacks' `on_epoch_begin` and `fit`'s reset of metrics changed the state.
            self._states.restore(loaded)
        lacks_variables = self._states.of_kind(VariableStates).lacks(loaded.states[VariableStates.name])
        self._position.begin_epoch(self._random, loaded.states, lacks_variables=lacks_variables)
        if self._passing_over:
            self._others, self._list.callbacks = self._list.callbacks, [self]
        else:
            self._loaded = None

    def _end_passing_over(self, batch: int) -> None:
        assert self._loaded is not None
        self._passing_over = False
        self._list.callbacks = self._with_others()
        self._states.restore(self._loaded, is_reread=True)
        self._batch = batch + 1
        self._logs = self._loaded.progress.logs
        self.model.stop_training = self._loaded.progress.stops
        self._loaded = None

    def _with_others(self) -> list[keras.callbacks.Callback]:
        """Returns all callbacks, those among them that strategies have added since in their places: first or last."""
        added, place = self._list.callbacks, self._list.callbacks.index(self)
        kinds = {type(each) for each in added if each is not self}
        others = [each for each in self._others if type(each) not in kinds]
        return [*added[:place], *others, *added[place + 1 :]]

    # -- saving

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Wraps the train function to count its steps, again if another callback has replaced it."""
        self._random.note_begun()
        self._position.count_steps()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves a commit if one is due, and leaves if all workers were asked to save and leave."""
        self._batch_ended = time.monotonic()
        if self._passing_over:
            counted = self._position.count_steps()
            if counted is None or not counted.left:
                self._end_passing_over(batch)
            return
        is_last = self._batch < (self._batches or 0) <= batch + 1
        self._session.steps += batch + 1 - self._batch
        note_step(self._session.steps)
        TIMES.count_steps(self._session.steps)
        self._batch, self._logs = batch + 1, logs
        self._request.tell(self._writer)
        if self._request.by_all:
            self._leave()
        if self._schedule.is_due(self._session.steps) or (is_last and self._request.may_validate_long()):
            self._save()
        else:
            self._writer.check()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes that this epoch has a validation, whose duration decides whether to save before the next one."""
        self._has_validated = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves a commit if one is due each epoch, and after the last epoch if the backups outlive the `fit`."""
        if self._has_validated:
            self._request.validation_seconds = time.monotonic() - self._batch_ended
        self._batches = self._batch
        self._epoch, self._batch, self._logs = epoch + 1, 0, None
        stays = not self._options.delete_checkpoint or self._start.is_removed_later
        if self._options.save_freq == "epoch" or (self._is_at_end() and stays):
            self._save()

    @property
    def _last_epoch(self) -> float:
        return self.params.get("epochs") or math.inf

    def _is_at_end(self) -> bool:
        return bool((self.model.stop_training or self._epoch >= self._last_epoch) and not self._batch)

    def _save(self) -> None:
        """Starts to write a commit of the present state. Leaves after it if the last commit told all workers to."""
        with TIMES.within(SAVE):
            self._save_now()

    def _save_now(self) -> None:
        self._writer.wait()
        leaves = self._writer.are_asked and self._request.listens
        session = self._session
        self._schedule.saved(session.steps)
        # A commit is numbered by its step. The end of an epoch, saved after its last step, takes the next number.
        session.number = max(session.steps, session.number + 1)
        described = {"fit": session.finished, "is_done": self._is_at_end(), "sites": session.sites}
        snapshot = self._states.capture(session.number, described, self._progress())
        TIMES.saved(session.number, session.steps)
        self._writer.save(snapshot)
        if leaves:
            self._writer.wait()
            preemption.leave(self._writer.refusals, self._options.directory)

    def _progress(self) -> FitProgress:
        return FitProgress(
            fit=self._session.finished,
            steps=self._session.steps,
            epoch=self._epoch,
            batch=self._batch,
            consumed=self._position.consumed(is_within_epoch=self._batch > 0),
            stops=bool(self.model.stop_training),
            logs=self._logs,
            steps_per_epoch=self._input.batches,
            steps_per_execution=self.model.steps_per_execution,
            replicas=self.model.distribute_strategy.num_replicas_in_sync,
        )

    # -- the end

    def _leave(self) -> None:
        """Saves a commit if it has trained, and ends the process with the exit code of a preemption, to restart."""
        if self._has_trained:
            self._save()
            self._writer.wait()
        preemption.leave(self._writer.refusals, self._options.directory)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the last save and removes the backups if they are not to stay. Leaves if a worker must."""
        session = self._session
        keras_internals.begin_with_epoch(self.model, None)
        uncount_steps(self.model)
        # A new list: Keras is iterating over the old one and would skip the next callback.
        self._list.callbacks = [callback for callback in self._list.callbacks if callback is not self]
        with TIMES.within(SAVE):
            self._writer.wait()
        self._request.tell(self._writer)
        # After this agreement no worker writes, unless a worker was asked to leave since the last step.
        if self._agreement.settle("fit", self._request.is_here(), any):
            self._leave()
        session.finished += 1
        if self._stand_in is None:
            self._states.of_kind(CallbackStates).add_history()
        else:  # Again: Keras has replaced weights by averages, and a later `fit`'s averages are not restored.
            self._states.restore(self._stand_in)
            self._stand_in = None
        if self._has_trained:
            self._states.of_kind(ResidualStates).drop_awaited()
        if session.store is not None:
            if self._options.delete_checkpoint and not self._start.is_done_before and not self._is_beyond:
                self._remove(session.store)
            if not self._start.is_removed_later:  # Otherwise keep the lock, so that no other job claims them.
                session.store.release()
        self._request.end()
        session.writer = session.request = None
        self._input = FitInput()
        del (
            self._states,
            self._random,
            self._position,
            self._writer,
        )  # They hold the data and a copy of the model's state.

    def _remove(self, store: CommitStore) -> None:
        """Removes the backups, or leaves a note so that `tfdist run` removes them when the job is done."""
        try:
            if self._start.is_removed_later:
                backup_cleanup.leave(store.directory)
            else:
                store.delete()
        except OSError as error:
            logging.warning("Backups stay in %s: %s", store.directory, error)
