"""One `fit` that is backed up: what a commit says of it, and how a new `fit` takes it up."""

import dataclasses
import functools
import math
import os
import secrets
import socket
import time
import weakref
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist import _tf
from tfdist.backup import leftovers, random_states, residuals, variables
from tfdist.backup.agreement import Agreement
from tfdist.backup.callbacks import CallbackStates
from tfdist.backup.files import is_remote
from tfdist.backup.loaded import Loaded, load
from tfdist.backup.plain import apart, decode, encode, with_arrays
from tfdist.backup.positions import Positions
from tfdist.backup.saver import Saver, Snapshot
from tfdist.backup.schedule import Schedule
from tfdist.backup.steps import CountedSteps, count_steps, uncount_steps
from tfdist.backup.store import LOCK, Commit, Store, probe_writing
from tfdist.errors import BackupError
from tfdist.faults import preemption
from tfdist.faults.options import options_of
from tfdist.strategies.optimizer import exchanging_optimizers


@dataclasses.dataclass(frozen=True)
class Options:
    """What `BackupAndRestore` was asked for; see there."""

    directory: str
    save_freq: Any
    keep: int
    delete: bool
    preemption: bool
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class Input:
    """What a `fit` reads.

    Attributes:
      epochs: What makes epochs of one iterator, as under `steps_per_epoch`; `None` if each has its own.
      batches: Of an epoch, if that is known.
      batches_of_pass: Of what makes the epochs, which may be longer than one or shorter; if that is known.
      sharding: The `BalancedSharding` that it is from, if it is from one.
      first_epoch: That it was told to begin with.
      validates: Whether epochs end with a validation.
      is_known: Whether a `fit` was found; in a loop of the user's nobody knows.
    """

    epochs: Any = None
    batches: int | None = None
    batches_of_pass: int | None = None
    sharding: Any = None
    first_epoch: int = 0
    validates: bool = False
    is_known: bool = False


@dataclasses.dataclass
class _Process:
    """What this process remembers of a directory from one `fit` to the next."""

    finished: int = 0
    sites: list[str] = dataclasses.field(default_factory=list)  # of the `fit`s so far, with the one that runs
    steps: int = 0
    number: int = -1
    histories: list[Any] = dataclasses.field(default_factory=list)
    saver: Saver | None = None
    store: Store | None = None
    listener: Any = None
    states: CallbackStates | None = None


class _Epoch(int):
    """An epoch that Keras takes for one also if it is the first: it asks for `_initial_epoch or initial_epoch`."""

    def __bool__(self) -> bool:
        return True


_PLACE_SECONDS = 3.0  # Storage that many hosts share may show a file a little late.
_processes: dict[str, _Process] = {}


class FitBackup(keras.callbacks.Callback):
    """Backs up one `fit`, as the last of its callbacks, so that the state of the others is that of the same moment.

    Args:
      options: Of the callback that the user has given.
      callbacks: The list that this one has been added to.
      given: What it is trained on.
      site: From where it is called.
    """

    def __init__(self, options: Options, callbacks: keras.callbacks.CallbackList, given: Input, site: str):
        super().__init__()
        self.has_begun = False
        self._options = options
        self._list = callbacks
        self._others: list[keras.callbacks.Callback] = []
        self._input = given
        self._site = site
        self._is_removed_later = False
        self._positions = Positions(())
        self._loaded: Loaded | None = None
        self._passing_over = False
        self._stand_in: Loaded | None = None  # A commit of a later `fit`, in the place of this one's end.
        self._is_done_before = self._is_beyond = self._has_trained = False
        self._logs: Any = None
        self._epoch = self._batch = 0
        self._counted: CountedSteps | None = None
        self._random_of_input: Any = None
        self._reads_again = False
        self._random_as_begun: Any = None  # of the input that is read again
        self._asked_to_stop = False
        self._batches = given.batches  # of an epoch, by the one before; in the first, if it is known
        self._validates_long = given.validates  # until one is timed
        self._batch_ended = 0.0
        self._has_validated = False
        self._validation_seconds: float | None = None

    # -- the beginning

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the directory, restores the newest commit; all workers, or none."""
        self.has_begun = True
        if not self.model.built:
            raise ValueError(
                f"BackupAndRestore restores the variables of a model that has them, and {self.model.name!r} is not "
                "built yet. Call it on a batch, or give it an Input, before `fit`."
            )
        self._process = _processes.setdefault(_key(self._options.directory), _Process())
        self._end_former()
        self._strategy = self.model.distribute_strategy
        self._reports = getattr(self._strategy, "reports", None) or preemption.LoneReports()
        self._agreement = Agreement(self._strategy, self._options.timeout_seconds)
        others = [callback for callback in self._list.callbacks if callback is not self]
        self._states = self._process.states = CallbackStates(others, self._process.states, self.model)
        self._positions = Positions(
            getattr(self._strategy, "shardings", ()),
            self._input.sharding,
            is_other=self._input.is_known and self._input.sharding is None,
        )
        variables.build_optimizers(self.model)
        commit = self._claim()
        if commit is not None:
            self._apply()
            self._take_position()
        self._schedule = Schedule(self._options.save_freq, self._agreement, self._process.steps)
        self._install_preemption()
        uncount_steps(self.model)  # of a `fit` that was broken off
        self._count_steps()

    def _count_steps(self) -> CountedSteps | None:
        """Counts the steps of the model's train function, also of one that was made anew; `None` if there is none."""
        if self.model.train_function is not None:
            self._counted = count_steps(self.model, self._counted)
        return self._counted

    def _end_former(self) -> None:
        """Waits for the last save of a `fit` in this process that was broken off."""
        if self._process.saver is not None:
            try:
                self._process.saver.wait()
            except Exception as error:
                logging.warning("The last backup of a former fit failed: %s", error)

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
            store = self._process.store = self._process.store or Store(self._options.directory)
            store.keep = self._options.keep
        sites = [*self._process.sites[: self._process.finished], self._site]
        chosen = self._agreement.settle("fit", None, lambda _: _choose(store, sites))
        self._process.sites, self._process.finished = chosen["sites"], len(chosen["sites"]) - 1
        self._is_done_before = chosen["is_done_before"]
        self._is_removed_later = self._options.delete and chosen["is_removed_later"]
        commit = Commit(*chosen["commit"]) if chosen["commit"] else None
        if chosen["newest"] > self._process.number:  # Of a `fit` that was skipped: it must not stay the newest.
            self._process.steps = self._process.number = chosen["newest"]
        lacking = self._process.finished - len(self._process.histories)
        self._process.histories += [{} for _ in range(lacking)]
        fault = None
        try:
            self._check_place(chosen["holder"])
            if commit is not None:
                self._loaded = load(commit, self.model, self._agreement, self._process.finished)
                self._check_batches()
        except (BackupError, OSError) as error:
            fault = f"worker {self._agreement.own} on {socket.gethostname()}: {error}"
        try:
            faults = self._agreement.settle("fit", fault, lambda said: _decide(store, said))
        except BackupError:
            self._release(store)
            raise
        if faults:
            self._release(store)
            raise BackupError("; ".join(faults) if self._agreement.workers > 1 else faults[0].partition(": ")[2])
        self._run = chosen["run"]
        self._process.saver = Saver(self._options.directory, self._run, self._agreement, store)
        return commit

    def _release(self, store: Store | None) -> None:
        if store is not None:
            store.release()

    def _check_place(self, holder: str) -> None:
        """On a worker that is not the chief: whether it can write, and to the same place."""
        directory = self._options.directory
        if self._agreement.is_chief or is_remote(directory):
            return
        deadline = time.monotonic() + _PLACE_SECONDS
        while not (same := _content(os.path.join(directory, LOCK)) == holder) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not same:
            raise BackupError(
                f"All workers write to one backup_dir, but {directory} here is not what the chief has there. Give a "
                "path on storage that all workers share."
            )
        probe_writing(directory)

    def _check_batches(self) -> None:
        """Whether the epoch in which the commit was made has as many batches as are to be passed over."""
        assert self._loaded is not None
        plain, path, steps = self._loaded.plain, self._loaded.commit.path, self._input.batches
        if plain["fit"] != self._process.finished or not plain["batch"] or not steps:
            return
        together = getattr(self.model, "steps_per_execution", 1)  # Keras counts those that the last had no data for.
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

    # -- restoring

    def _apply(self) -> None:
        assert self._loaded is not None
        self._loaded.give_back(self.model, self._agreement, self._states, self._positions)
        self._loaded.give_back_random()

    def _take_position(self) -> None:
        """Lets `fit` begin at the epoch of the commit."""
        assert self._loaded is not None
        plain = self._loaded.plain
        self._process.steps, self._process.number = plain["steps"], self._loaded.commit.step
        self._process.histories = list(plain["histories"])
        epoch = plain["epoch"]
        was_stopped = plain["stop"] and not plain["batch"]
        if self._is_done_before or was_stopped:
            epoch = max(self.params.get("epochs") or 1, 1)
            self.model.stop_training = True
        # The one name with which Keras' own callback tells `fit` where to begin.
        self.model._initial_epoch = _Epoch(epoch)
        # Not a fault, but absl shows no less by default, and nobody should wonder where the first epochs are.
        tell = logging.warning if self._agreement.is_chief else logging.info
        path, number = self._loaded.commit.path, self._process.finished
        last = self.params.get("epochs") or math.inf
        self._is_beyond = not self._is_done_before and (plain["epoch"], plain["batch"]) > (last, 0)
        if self._is_beyond:
            tell(
                "Restored %s, which was made after %d batches of epoch %d, but this fit ends with epoch %d: it trains "
                "nothing, and the backups stay.",
                *(path, plain["batch"], plain["epoch"] + 1, last),
            )
            return
        if was_stopped and not self._is_done_before:
            tell(
                "Restored %s: a callback stopped this fit at the end of epoch %d, so it is done. Without that folder "
                "it trains on, from the backup before or anew.",
                *(path, plain["epoch"]),
            )
            return
        if not self._is_done_before and not plain["batch"] and epoch >= last:
            tell(
                "Restored %s, the end of this fit: what comes after it is next. Without that folder it trains anew.",
                path,
            )
            return
        if not self._is_done_before:
            told = self._input.first_epoch
            instead = f", not with initial_epoch={told}, which it was told" if told > epoch else ""
            tell(
                "Restored %s: goes on after %d batches of epoch %d%s.",
                *(path, plain["batch"], epoch + 1, instead),
            )
            return
        self._stand_in = self._loaded if plain["fit"] > number else None
        self._loaded = None
        if self._stand_in is not None:
            tell(
                "Restored %s, of fit %d of this program, and fit %d passed over: no backup of its end was kept, so "
                "what comes before fit %d sees the weights as they were later. delete_checkpoint=False keeps them.",
                *(path, plain["fit"] + 1, number + 1, plain["fit"] + 1),
            )
        else:
            tell("Restored %s, the end of fit %d of this program, which was done before.", path, number + 1)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """In the first epoch of a restored `fit`: passes over what was trained on before."""
        self.model._initial_epoch = None
        self._has_trained = True
        self._epoch, self._batch, self._has_validated = epoch, 0, False
        counted = self._count_steps()
        # Before Keras makes an iterator: it shuffles the batches of a PyDataset by Python's random numbers.
        if counted is None or counted.iterator is None or self._begins_anew(counted):
            self._random_of_input = random_states.capture()
        if self._loaded is None:
            self._positions.begin_epoch()
            return
        plain = self._loaded.plain
        if plain["batch"]:
            self._apply()  # the other callbacks have begun the epoch a second time, `fit` has reset the metrics
        self._positions.begin_epoch(plain["shardings"])
        reads = not self._positions.continues(plain["shardings"])
        if (plain["batch"] or plain["consumed"]) and counted is not None:
            present = self._begin_input_as_before() if reads else None
            self._reads_again = present is not None
            lacking = variables.missing(variables.slots_of(self.model), plain["variables"])
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
        """Lets Keras draw the numbers that it drew for the input that is now read again.

        Returns:
          The random states of the present, if they were replaced.
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
            _tf.count_as_seen(self._input.epochs, batches)

    def _undrawn(self) -> frozenset[str]:
        """The global random numbers from which reading has not drawn, once an input was read again.

        Those that it draws are where the batches to come need them, and a thread may be drawing more. What was saved of
        them goes as far as that thread had read ahead then.
        """
        if not self._reads_again:
            return random_states.NAMES
        self._reads_again = False
        return random_states.unmoved(self._random_as_begun or self._random_of_input, self._input.batches_of_pass)

    def _end_passing_over(self, batch: int) -> None:
        assert self._loaded is not None
        self._passing_over = False
        self._list.callbacks = self._others
        # No positions: a sharding that nobody follows counts what was read of it again.
        self._loaded.give_back(self.model, self._agreement, self._states, None)
        self._loaded.give_back_random(self._undrawn())
        self._batch = batch + 1
        self._logs = decode(*apart(self._loaded.plain["logs"]))
        self.model.stop_training = self._loaded.plain["stop"]
        self._loaded = None

    # -- saving

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps, also of a train function that another callback has made anew."""
        if self._reads_again and self._random_as_begun is None:
            self._random_as_begun = random_states.capture()
        self._count_steps()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if it is time."""
        self._batch_ended = time.monotonic()
        if self._passing_over:
            counted = self._count_steps()
            if counted is None or not counted.left:
                self._end_passing_over(batch)
            return
        is_last = self._batch < (self._batches or 0) <= batch + 1
        self._process.steps += batch + 1 - self._batch
        self._batch, self._logs = batch + 1, logs
        self._make_room()
        if self._asked_to_stop or self._is_asked_alone():
            self._leave()
        if self._schedule.is_due(self._process.steps) or (is_last and self._may_validate_long()):
            self._save()
        else:
            self._saver.check()

    def _may_validate_long(self) -> bool:
        """Whether a request to leave may not be answered in time in the validation that follows."""
        if self._process.listener is None:
            return False
        if self._validation_seconds is not None:  # Asked here, after a step, as nobody waits for anybody.
            limit = options_of(self._strategy).preemption_timeout_seconds / 2
            is_long = self._validation_seconds > limit
            self._validates_long = self._agreement.settle("fit", None, lambda _: is_long)
        return self._validates_long

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes note of a validation."""
        self._has_validated = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if it is time; the last epoch always, if backups are to stay."""
        if self._has_validated:
            self._validation_seconds = time.monotonic() - self._batch_ended
        self._batches = self._batch
        self._epoch, self._batch, self._logs = epoch + 1, 0, None
        stays = not self._options.delete or self._is_removed_later
        if self._options.save_freq == "epoch" or (self._is_at_end() and stays):
            self._save()

    def _is_at_end(self) -> bool:
        is_last = self.model.stop_training or self._epoch >= (self.params.get("epochs") or math.inf)
        return bool(is_last and not self._batch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the last save; removes the backups if they are not to stay."""
        self.model._initial_epoch = None
        uncount_steps(self.model)
        self._counted = None
        self._list.callbacks.remove(self)
        self._saver.wait()
        self._make_room()
        # After it nobody writes any more, unless one was asked to go since the last step.
        if self._agreement.settle("fit", self._is_asked_now(), any):
            self._leave()
        self._process.finished += 1
        self._positions = Positions(())  # Lets go of the data.
        if self._stand_in is None:
            self._process.histories.append(self._history())
        else:  # Once more: Keras has put averages in place of weights, and of a later `fit` none are restored.
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
            if not self._is_removed_later:  # Else nobody else may take them for his own.
                store.release()
        self._uninstall_preemption()

    def _remove(self, store: Store) -> None:
        """Removes the backups, now or when the job is done."""
        try:
            if self._is_removed_later:
                leftovers.leave(store.directory)
            else:
                store.delete()
        except OSError as error:
            logging.warning("Backups stay in %s: %s", store.directory, error)

    @property
    def _saver(self) -> Saver:
        assert self._process.saver is not None
        return self._process.saver

    def _save(self) -> None:
        """Copies out what there is, and has it written; makes room, as all have the answer of the commit before."""
        self._saver.wait()
        leaves = self._saver.is_room_wanted and self._process.listener is not None
        self._schedule.saved(self._process.steps)
        slots = variables.slots_of(self.model)
        shared, own = variables.capture(slots)
        communication = getattr(self._strategy, "communication", None)
        optimizers = exchanging_optimizers(self.model)
        kept = residuals.capture(communication, optimizers)
        own_arrays: dict[str, Any] = {**own, **{f"residuals/{name}": tensor for name, tensor in kept.items()}}
        callbacks = self._states.capture()
        for callback, attributes in callbacks.items():
            for key, (_, arrays) in attributes.items():
                own_arrays.update({f"callbacks/{callback}/{key}/{i}": array for i, array in enumerate(arrays)})
        own_plain = {
            "callbacks": {
                callback: {key: [node, len(arrays)] for key, (node, arrays) in attributes.items()}
                for callback, attributes in callbacks.items()
            },
            "random": random_states.capture(),
            "random_of_input": self._random_of_input,
        }
        # By steps; an epoch's end may be saved after its last step.
        self._process.number = max(self._process.steps, self._process.number + 1)
        self._saver.save(
            Snapshot(
                self._process.number,
                {"fit": self._process.finished, "is_done": self._is_at_end(), "sites": self._process.sites},
                shared,
                own_arrays,
                {"variables": {slot.key: slot.described for slot in slots}, **self._position()},
                own_plain,
                lambda: {
                    f"pending/{name}": array
                    for name, array in residuals.pending(communication, optimizers, kept).items()
                },
            )
        )
        if leaves:
            self._saver.wait()
            preemption.leave(self._saver.refusals)

    def _begins_anew(self, counted: CountedSteps) -> bool:
        """Whether an epoch that begins now reads from a new iterator; at the end of its input Keras begins it anew."""
        return self._input.epochs is None or not _tf.goes_on_with(self._input.epochs, counted.iterator)

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
        """The history of this `fit`."""
        return {
            name: {key: with_arrays(*state) for key, state in attributes.items()}
            for name, attributes in self._states.capture().items()
            if "History:" in name
        }

    # -- preemption

    def _install_preemption(self) -> None:
        self._uninstall_preemption()  # of a `fit` that was broken off
        if not self._options.preemption:
            return
        is_under_way = functools.partial(_is_fitting, weakref.ref(self.model)) if self._input.is_known else _always
        watch = preemption.install(self._strategy, self._reports, is_under_way)
        self._process.listener = (self._reports.listeners, self._hear, watch)
        self._reports.listeners.append(self._hear)

    def _make_room(self) -> None:
        """Asks all workers to leave, as by a signal, if the supervisor wants more of them.

        It asks by a file, which is looked for at each commit: a signal may come when nobody listens any more. Where
        steps do not report, as those of loops of the user's, all leave after their next commit.
        """
        if self._saver.is_room_wanted and self._process.listener is not None:
            self._reports.ask_to_stop()

    def _hear(self, report: Any) -> None:
        if report.stop:
            self._asked_to_stop = True

    def _is_asked_alone(self) -> bool:
        """Whether this process, the only one, was asked: its step may be one that does not report."""
        return self._agreement.workers == 1 and self._is_asked_now()

    def _is_asked_now(self) -> bool:
        """Whether this worker was asked, also while a `fit` is passed over."""
        return self._process.listener is not None and self._reports.asked_here

    def _uninstall_preemption(self) -> None:
        if self._process.listener is not None:
            listeners, listener, watch = self._process.listener
            self._process.listener = None
            listeners.remove(listener)
            if watch is not None:
                preemption.uninstall(watch)  # nothing would answer a signal any more

    def _leave(self) -> None:
        """Saves what is new, then ends the process; the exit code says that it may be started again."""
        if self._has_trained:
            self._save()
            self._saver.wait()
        preemption.leave(self._saver.refusals)


def _is_fitting(model: weakref.ref[Any]) -> bool:
    """Whether a Keras `fit` of this model is under way in this thread."""
    return any(fitting is model() for fitting in _tf.keras_fitting_models())


def _always() -> bool:
    """Of a loop of the user's nobody knows whether it still runs."""
    return True


def _choose(store: Store | None, sites: list[str]) -> dict[str, Any]:
    """On the chief: owns the directory and picks the commit: the newest, or the end of a `fit` before that one's.

    Args:
      store: Where commits are.
      sites: From where the `fit`s of this process were called, and the one that begins.
    """
    assert store is not None
    store.claim()
    leftovers.take_back(store.directory)
    commit = store.newest_whole()
    if commit is None and len(sites) == 1:
        store.tell_of_keras()
    newest = -1 if commit is None else commit.step
    if commit is not None:
        sites = _with_skipped(sites, commit)
    finished = len(sites) - 1
    if commit is not None and commit.manifest["fit"] < finished:
        commit = None  # Of a `fit` before this one.
    is_done_before = commit is not None and commit.manifest["fit"] > finished
    if is_done_before:
        commit = store.end_of_fit(finished) or commit
    return {
        "run": secrets.token_hex(8),
        "holder": f"process {os.getpid()} on {socket.gethostname()}",
        "newest": newest,
        "commit": commit and [commit.step, commit.path, dict(commit.manifest)],
        "is_done_before": is_done_before,
        "is_removed_later": leftovers.are_removed_later(store.directory),
        "sites": sites,
    }


def _with_skipped(sites: list[str], commit: Commit) -> list[str]:
    """The sites of all `fit`s up to now, with those that a script skips in this start, say since their model is there.

    Skipped are those before the only one that was called from here when the commit was made; and those up to its end,
    if all were called from elsewhere.
    """
    first, before = len(sites) - 1, commit.manifest.get("sites", [])
    same = [number for number in range(first, len(before)) if before[number] == sites[first]]
    number = same[0] if len(same) == 1 else first
    if commit.manifest.get("is_done") and all(_is_elsewhere(sites[first], each) for each in before[first:]):
        number = max(first, len(before))
    if number > first:
        logging.warning(
            "This is fit %d of the program that made %s, by where it is called; those before are skipped.",
            *(number + 1, commit.path),
        )
    return [*sites[:first], *before[first:number], sites[first]]


def _is_elsewhere(site: str, former: str) -> bool:
    """Whether two sites are in the same code, at two places of it. Where code was edited nobody can tell."""
    for mine, other in zip(site.split("/"), former.split("/"), strict=False):
        if mine != other:
            return mine.partition(":")[0] == other.partition(":")[0]
    return False


def _decide(store: Store | None, said: list[Any]) -> list[str]:
    """On the chief: what hinders a worker; else makes room for new commits."""
    assert store is not None
    faults = [one for one in said if one]
    if not faults:
        store.set_faulty_aside()
    return faults


def _content(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _key(directory: str) -> str:
    return directory if is_remote(directory) else os.path.realpath(directory)


def _encoded_logs(logs: Any) -> Any:
    """The logs of a step; `None` for what cannot be saved, as they are only shown."""
    arrays: list[np.ndarray] = []
    known = dict(logs) if logs else logs
    for name in known or ():
        try:
            encode(known[name], [])
        except TypeError:
            known[name] = None
    return with_arrays(encode(known, arrays), arrays)
