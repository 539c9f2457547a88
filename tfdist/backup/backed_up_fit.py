"""The backup of one `fit`: the content of its commits, and how a new `fit` continues from a commit."""

import dataclasses
import functools
import math
import time
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist._compat import keras_internals
from tfdist.backup import backup_cleanup, random_states, resume_policy, variable_states
from tfdist.backup.callback_states import CallbackStates
from tfdist.backup.checkpoint_state import CheckpointState, load, take
from tfdist.backup.commit_agreement import CommitAgreement
from tfdist.backup.commit_store import Commit, CommitStore
from tfdist.backup.commit_writer import CommitWriter, tell_of_untold
from tfdist.backup.preemption_request import PreemptionRequest
from tfdist.backup.save_schedule import SaveSchedule
from tfdist.backup.serialization import apart, decode, encode, with_arrays
from tfdist.backup.session import of_directory
from tfdist.backup.sharding_positions import ShardingPositions
from tfdist.backup.step_counter import CountedSteps, count_steps, uncount_steps
from tfdist.errors import BackupError, PositionError
from tfdist.failure_report import note_step
from tfdist.faults import preemption
from tfdist.run_files import RunFiles, is_restarted


@dataclasses.dataclass(frozen=True)
class BackupOptions:
    """The checked arguments of `BackupAndRestore`; see there."""

    directory: str
    save_freq: Any
    keep: int
    delete: bool
    preemption: bool
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class Input:
    """The input of a `fit`.

    Attributes:
      epochs: Keras' `EpochIterator` if all epochs share one iterator, as under `steps_per_epoch`; otherwise `None`.
      batches: Number of batches of an epoch, if known.
      batches_of_pass: Number of batches of one pass over the data, if known. An epoch may be longer or shorter.
      sharding: The `BalancedSharding` that produces the input, if there is one.
      first_epoch: The argument `initial_epoch` of `fit`.
      validates: Whether epochs end with a validation.
      is_known: Whether a `fit` was found. The input of a custom loop is unknown.
    """

    epochs: Any = None
    batches: int | None = None
    batches_of_pass: int | None = None
    sharding: Any = None
    first_epoch: int = 0
    validates: bool = False
    is_known: bool = False


class _Epoch(int):
    """An epoch that is true even if it is 0, because Keras evaluates `_initial_epoch or initial_epoch`."""

    def __bool__(self) -> bool:
        return True


class FitBackup(keras.callbacks.Callback):
    """Backs up one `fit`, as the last of its callbacks, so that the states of all callbacks are of the same moment.

    Args:
      options: Options of the user's `BackupAndRestore`.
      callbacks: The list of callbacks that contains this callback.
      given: The input of the `fit`.
      site: The call site of the `fit`.
    """

    def __init__(self, options: BackupOptions, callbacks: keras.callbacks.CallbackList, given: Input, site: str):
        super().__init__()
        self.has_begun = False
        self._options = options
        self._list = callbacks
        self._others: list[keras.callbacks.Callback] = []
        self._input = given
        self._site = site
        self._is_removed_later = False
        self._positions = ShardingPositions(())
        self._loaded: CheckpointState | None = None
        self._passing_over = False
        self._stand_in: CheckpointState | None = None  # A later `fit`'s commit, if this `fit`'s end has none.
        self._is_done_before = self._is_beyond = self._has_trained = False
        self._logs: Any = None
        self._epoch = self._batch = 0
        self._counted: CountedSteps | None = None
        self._random_of_input: Any = None
        self._reads_again = False
        self._random_as_begun: Any = None  # captured when a repeated input has begun
        self._batches = given.batches  # of the previous epoch; at first, those of the input if known
        self._batch_ended = 0.0
        self._has_validated = False

    # -- the beginning

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Claims the directory and restores the newest commit, on all workers or on none."""
        self.has_begun = True
        if not self.model.built:
            raise ValueError(
                f"BackupAndRestore restores the variables of a model that has them, and {self.model.name!r} is not "
                "built yet. Call it on a batch, or give it an Input, before `fit`."
            )
        self._process = of_directory(self._options.directory)
        self._process.end_former()
        self._strategy = self.model.distribute_strategy
        self._agreement = CommitAgreement(self._strategy, self._options.timeout_seconds)
        self._asked = self._process.asked = PreemptionRequest(self._strategy, self._agreement, self._input.validates)
        others = [callback for callback in self._list.callbacks if callback is not self]
        self._states = CallbackStates(others, self._process.starts, self.model)
        self._process.starts = self._states.starts
        self._positions = ShardingPositions(
            getattr(self._strategy, "shardings", ()),
            self._input.sharding,
            is_other=self._input.is_known and self._input.sharding is None,
        )
        variable_states.build_optimizers(self.model)
        commit = self._claim()
        if commit is not None:
            self._apply()
            self._take_position()
        note_step(self._process.steps)
        self._schedule = SaveSchedule(self._options.save_freq, self._agreement, self._process.steps)
        if self._options.preemption:
            self._asked.begin(self.model if self._input.is_known else None)
        uncount_steps(self.model)  # after an interrupted `fit`
        self._count_steps()

    def _count_steps(self) -> CountedSteps | None:
        """Counts the steps of the model's train function, also of a replaced one; returns `None` if there is none."""
        if self.model.train_function is not None:
            self._counted = count_steps(self.model, self._counted)
        return self._counted

    def _claim(self) -> Commit | None:
        self._agreement.begin(
            {
                "save_freq": repr(self._options.save_freq),
                "keep": repr(self._options.keep),
                "delete_checkpoint": repr(self._options.delete),
                "save_before_preemption": repr(self._options.preemption),
            }
        )
        store = None
        if self._agreement.is_chief:
            store = self._process.store = self._process.store or CommitStore(self._options.directory)
        sites = [*self._process.sites[: self._process.finished], self._site]
        chosen = self._agreement.settle("fit", None, lambda _: resume_policy.choose(store, sites))
        self._process.sites, self._process.finished = chosen["sites"], len(chosen["sites"]) - 1
        self._is_done_before = chosen["is_done_before"]
        self._is_removed_later = self._options.delete and chosen["is_removed_later"]
        commit = Commit(*chosen["commit"]) if chosen["commit"] else None
        tell_of_untold(self._options.directory, chosen["newest"])
        files = RunFiles.of_worker()
        if commit is not None and files is not None:
            files.tell_of_restored()
        if chosen["newest"] > self._process.number:  # A skipped `fit`'s commit must not stay newest.
            self._process.steps = self._process.number = chosen["newest"]
        lacking = self._process.finished - len(self._process.histories)
        self._process.histories += [{} for _ in range(lacking)]
        fault = None
        try:
            if not self._agreement.is_chief:
                goes_on = is_restarted() and chosen["newest"] >= 0
                resume_policy.check_place(self._options.directory, chosen["holder"], goes_on=goes_on)
            if commit is not None:
                self._loaded = load(commit, self.model, self._agreement, self._process.finished)
                self._check_batches()
                self._check_positions()
        except (BackupError, OSError) as error:
            fault = f"{self._agreement.who}: {error}"
        try:
            faults = self._agreement.settle("fit", fault, lambda said: resume_policy.decide(store, said))
            if faults:
                alone = self._agreement.workers == 1
                raise BackupError(faults[0].partition(": ")[2] if alone else "; ".join(faults))
        except BackupError:
            if store is not None:
                store.release()
            raise
        self._process.saver = CommitWriter(
            *(self._options.directory, chosen["run"], self._agreement, store, self._options.keep, self._asked.is_here)
        )
        return commit

    def _check_batches(self) -> None:
        """Raises `BackupError` if the epoch of the commit now has fewer batches than are to be skipped."""
        assert self._loaded is not None
        plain, path, steps = self._loaded.plain, self._loaded.commit.path, self._input.batches
        if plain["fit"] != self._process.finished or not plain["batch"] or not steps:
            return
        together = getattr(self.model, "steps_per_execution", 1)  # Keras counts full executions.
        if plain["batch"] > -(-steps // together) * together:
            of = f" of {plain['steps_per_epoch']}" if plain["steps_per_epoch"] else ""
            raise BackupError(
                f"The backup {path} was made after batch {plain['batch']}{of} of an epoch, but an epoch has {steps} "
                "now. Give `fit` the batch size and the steps per epoch of then (where they follow from the number "
                "of workers: on as many workers), or another backup_dir."
            )
        if steps != plain["steps_per_epoch"] and plain["steps_per_epoch"] and self._agreement.is_chief:
            logging.warning(
                "Epochs had %d batches when the backup %s was made, and have %d now: %d of them are passed over, "
                "whatever is in them.",
                *(plain["steps_per_epoch"], path, steps, plain["batch"]),
            )

    def _check_positions(self) -> None:
        """Checks that the commit's position in the data belongs to the present data."""
        assert self._loaded is not None
        if self._loaded.plain["fit"] > self._loaded.finished:  # A later `fit` may have other data.
            return
        try:
            self._positions.check(self._loaded.plain["shardings"])
        except PositionError as error:
            raise BackupError(
                f"The backup {self._loaded.commit.path} is of other data: {error} Or give another backup_dir."
            ) from error

    # -- restoring

    def _apply(self) -> None:
        assert self._loaded is not None
        self._loaded.give_back(self.model, self._agreement, self._states, self._positions)
        self._loaded.give_back_random()

    def _take_position(self) -> None:
        """Makes `fit` begin at the epoch of the commit."""
        assert self._loaded is not None
        plain = self._loaded.plain
        self._process.steps, self._process.number = plain["steps"], self._loaded.commit.step
        self._process.histories = list(plain["histories"])
        epoch, last = plain["epoch"], self.params.get("epochs") or math.inf
        if self._is_done_before or (plain["stop"] and not plain["batch"]):
            epoch = max(self.params.get("epochs") or 1, 1)
            self.model.stop_training = True
        # Keras' own callback sets this attribute to tell `fit` the first epoch.
        self.model._initial_epoch = _Epoch(epoch)
        self._is_beyond = not self._is_done_before and resume_policy.is_beyond(self._loaded, last)
        # A warning, because absl hides lower levels by default and the user would miss the first epochs.
        tell = logging.warning if self._agreement.is_chief else logging.info
        tell("%s", resume_policy.told(self._loaded, last, self._input.first_epoch, is_done_before=self._is_done_before))
        if self._is_done_before:
            self._stand_in = self._loaded if plain["fit"] > self._process.finished else None
            self._loaded = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Skips the batches that were trained on before, in the first epoch of a restored `fit`."""
        self.model._initial_epoch = None
        self._has_trained = True
        self._epoch, self._batch, self._has_validated = epoch, 0, False
        counted = self._count_steps()
        # Capture before Keras makes an iterator and shuffles the batches of a PyDataset by Python's random numbers.
        if counted is None or counted.iterator is None or self._begins_anew(counted):
            self._random_of_input = random_states.capture()
        if self._loaded is None:
            self._positions.begin_epoch()
            return
        plain = self._loaded.plain
        if plain["batch"]:
            self._apply()  # again: other callbacks' `on_epoch_begin` and `fit`'s reset of metrics changed the state
        self._positions.begin_epoch(plain["shardings"])
        reads = not self._positions.continues(plain["shardings"])
        if (plain["batch"] or plain["consumed"]) and counted is not None:
            present = self._begin_input_as_before() if reads else None
            self._reads_again = present is not None
            lacking = variable_states.missing(variable_states.slots_of(self.model), plain["variables"])
            counted.pass_over(
                plain["batch"],
                plain["consumed"] - plain["batch"] if reads else 0,
                functools.partial(self._end_reading_ahead, present),
                reads=reads,
                runs_last=bool(lacking) and reads,
                logs=decode(*apart(plain["logs"])),
            )
        self._passing_over = plain["batch"] > 0
        if self._passing_over:
            self._others, self._list.callbacks = self._list.callbacks, [self]
        else:
            self._loaded = None

    def _begin_input_as_before(self) -> Any:
        """Restores the random states with which the repeated input began, so that Keras draws the same numbers.

        Returns:
          The random states before the call if they were replaced, otherwise `None`.
        """
        assert self._loaded is not None
        if self._loaded.random_of_input is None:
            return None
        present, self._random_of_input = random_states.capture(), self._loaded.random_of_input
        random_states.restore(self._random_of_input)
        return present

    def _end_reading_ahead(self, present: Any, batches: int) -> None:
        if present is not None and not self._passing_over:
            random_states.restore(present, self._undrawn())
        if self._input.epochs is not None:
            keras_internals.count_as_seen(self._input.epochs, batches)

    def _undrawn(self) -> frozenset[str]:
        """Returns the names of the global random states from which the repeated reading of the input has not drawn.

        The other states must not be restored: reading has moved them to where the next batches need them, and a thread
        may be drawing more. Their saved values include the draws of the batches that the thread had then read ahead.
        """
        if not self._reads_again:
            return random_states.NAMES
        self._reads_again = False
        return random_states.unmoved(self._random_as_begun or self._random_of_input, self._input.batches_of_pass)

    def _end_passing_over(self, batch: int) -> None:
        assert self._loaded is not None
        self._passing_over = False
        self._list.callbacks = self._others
        # Without positions: a sharding without step reports has counted the repeated reads itself.
        self._loaded.give_back(self.model, self._agreement, self._states, None)
        self._loaded.give_back_random(self._undrawn())
        self._batch = batch + 1
        self._logs = decode(*apart(self._loaded.plain["logs"]))
        self.model.stop_training = self._loaded.plain["stop"]
        self._loaded = None

    # -- saving

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps, also of a train function that another callback has replaced."""
        if self._reads_again and self._random_as_begun is None:
            self._random_as_begun = random_states.capture()
        self._count_steps()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if a save is due, and leaves if all workers were asked to leave."""
        self._batch_ended = time.monotonic()
        if self._passing_over:
            counted = self._count_steps()
            if counted is None or not counted.left:
                self._end_passing_over(batch)
            return
        is_last = self._batch < (self._batches or 0) <= batch + 1
        self._process.steps += batch + 1 - self._batch
        note_step(self._process.steps)
        self._batch, self._logs = batch + 1, logs
        self._asked.tell(self._saver)
        if self._asked.by_all:
            self._leave()
        if self._schedule.is_due(self._process.steps) or (is_last and self._asked.may_validate_long()):
            self._save()
        else:
            self._saver.check()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes that this epoch has a validation."""
        self._has_validated = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if a save is due, and after the last epoch if the backups outlive the `fit`."""
        if self._has_validated:
            self._asked.validation_seconds = time.monotonic() - self._batch_ended
        self._batches = self._batch
        self._epoch, self._batch, self._logs = epoch + 1, 0, None
        stays = not self._options.delete or self._is_removed_later
        if self._options.save_freq == "epoch" or (self._is_at_end() and stays):
            self._save()

    def _is_at_end(self) -> bool:
        is_last = self.model.stop_training or self._epoch >= (self.params.get("epochs") or math.inf)
        return bool(is_last and not self._batch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the last save and removes the backups if they are not to stay."""
        self.model._initial_epoch = None
        uncount_steps(self.model)
        self._counted = None
        # A new list: Keras is iterating over the old one and would skip the next callback.
        self._list.callbacks = [callback for callback in self._list.callbacks if callback is not self]
        self._saver.wait()
        self._asked.tell(self._saver)
        # After this agreement no worker writes, unless a worker was asked to leave since the last step.
        if self._agreement.settle("fit", self._asked.is_here(), any):
            self._leave()
        self._process.finished += 1
        self._positions = ShardingPositions(())  # Releases the data.
        if self._stand_in is None:
            self._process.histories.append(self._history())
        else:  # Again: Keras has replaced weights by averages, and a later `fit`'s averages are not restored.
            self._stand_in.give_back(self.model, self._agreement, self._states, None)
            self._stand_in.give_back_random()
            self._stand_in = None
        communication = getattr(self._strategy, "communication", None)
        if communication is not None and self._has_trained and communication.drop_awaited():
            logging.warning("What compression had kept of gradients that are not exchanged any more is left out.")
        store = self._process.store
        if store is not None:
            if self._options.delete and not self._is_done_before and not self._is_beyond:
                self._remove(store)
            if not self._is_removed_later:  # Otherwise keep the lock, so that no other job claims them.
                store.release()
        self._asked.end()
        self._process.saver = self._process.asked = None  # Releases a copy of the model's state.

    def _remove(self, store: CommitStore) -> None:
        """Removes the backups, now or when the job is done."""
        try:
            if self._is_removed_later:
                backup_cleanup.leave(store.directory)
            else:
                store.delete()
        except OSError as error:
            logging.warning("Backups stay in %s: %s", store.directory, error)

    @property
    def _saver(self) -> CommitWriter:
        assert self._process.saver is not None
        return self._process.saver

    def _save(self) -> None:
        """Captures the state and starts to write it. Leaves after that if the previous commit told all workers to."""
        self._saver.wait()
        leaves = self._saver.are_asked and self._asked.listens
        self._schedule.saved(self._process.steps)
        # A commit is numbered by its step. The end of an epoch, saved after its last step, takes the next number.
        self._process.number = max(self._process.steps, self._process.number + 1)
        described = {"fit": self._process.finished, "is_done": self._is_at_end(), "sites": self._process.sites}
        self._saver.save(
            take(self._process.number, described, self._position(), self.model, self._states, self._random_of_input)
        )
        if leaves:
            self._saver.wait()
            preemption.leave(self._saver.refusals, self._options.directory)

    def _begins_anew(self, counted: CountedSteps) -> bool:
        """Whether an epoch that begins now reads from a new iterator. Keras makes a new one at the end of the input."""
        return self._input.epochs is None or not keras_internals.goes_on_with(self._input.epochs, counted.iterator)

    def _position(self) -> dict[str, Any]:
        function, consumed = self.model.train_function, 0
        if isinstance(function, CountedSteps):
            consumed = 0 if not self._batch and self._begins_anew(function) else function.consumed
        return {
            "fit": self._process.finished,
            "steps": self._process.steps,
            "epoch": self._epoch,
            "batch": self._batch,
            "consumed": consumed,
            "stop": bool(self.model.stop_training),
            "logs": _encoded_logs(self._logs),
            "steps_per_epoch": self._input.batches,
            "steps_per_execution": self.model.steps_per_execution,
            "replicas": self._strategy.num_replicas_in_sync,
            "shardings": self._positions.capture(),
            "histories": self._process.histories,
        }

    def _history(self) -> Any:
        """Returns the history of this `fit`."""
        return {
            name: {key: with_arrays(*state) for key, state in attributes.items()}
            for name, attributes in self._states.capture_history().items()
        }

    # -- leaving

    def _leave(self) -> None:
        """Saves new progress and ends the process with the exit code of a preemption, which permits a restart."""
        if self._has_trained:
            self._save()
            self._saver.wait()
        preemption.leave(self._saver.refusals, self._options.directory)


def _encoded_logs(logs: Any) -> Any:
    """Returns the logs of a step for `json.dump`; values that cannot be saved become `None`, as logs are only shown."""
    arrays: list[np.ndarray] = []
    known = dict(logs) if logs else logs
    for name in known or ():
        try:
            encode(known[name], [])
        except TypeError:
            known[name] = None
    return with_arrays(encode(known, arrays), arrays)
