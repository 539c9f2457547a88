"""`keras.callbacks.BackupAndRestore` that gives back everything, on any number of workers."""

import contextlib
import datetime
import numbers
import operator
import os
import re
from typing import Any

import keras
import numpy as np

from tfdist.backup.backed_up_fit import BackupOptions
from tfdist.backup.fit_discovery import of_running_fit
from tfdist.backup.storage import is_remote
from tfdist.strategies.foreign_keras import ForKerasModels

_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]*:/[^/]")


class BackupAndRestore(ForKerasModels, keras.callbacks.BackupAndRestore):
    """Saves a `fit` as it goes, so that the same script, started again, continues as if nothing had happened.

        model.fit(data, epochs=10, callbacks=[tfdist.callbacks.BackupAndRestore("backup", save_freq=50)])

    Saved are weights, optimizer, loss scale, accumulated gradients, metrics in progress, states of random layers, what
    compression has left behind, the position in the data, Python's and NumPy's global random states, the attributes of
    the other callbacks that have changed, and the history. A restored `fit` that gets the same data in the same order
    ends with the bits of an unbroken one, and begins in the epoch of the backup, whatever `initial_epoch` says.

    - Data: `tfdist.data.BalancedSharding` continues at once. Of any other input, the batches of the epoch that were
      trained on (under `steps_per_epoch`: all of the fit) are read and dropped. A `tf.data` pipeline that shuffles anew
      in each epoch counts epochs from the start of the process: it is exact only within its first epoch, or if it does
      not end (`.repeat()` with `steps_per_epoch`). Arrays come in the same order if a seed is set, and so do
      the batches of a `keras.utils.PyDataset`, also with workers of its own; one that draws an order itself does so in
      its `on_epoch_begin`, by Python's or NumPy's global random numbers: what its `on_epoch_end` draws is not repeated.
      Batches that draw from these as they are read, as augmentation does, get the numbers that they would have got, if
      nobody else draws from the same meanwhile, as several readers at once, or callbacks, do.
    - Each commit is a folder `step-<n>`, whole or not at all; its files are compared with their SHA-256 before they
      count, and a damaged one is skipped, with a warning, for the one before.
    - A step that saves hands its variables over, in some 40 µs each, whatever their size; a thread copies and writes
      them, which takes the memory of one copy until `fit` ends. Training waits only where two saves would overlap, and
      at its end.
    - If the disk is full, that is logged, training goes on, and the next save tries again.
    - Workers write to one `backup_dir`, on storage that all share. Each writes what is its own, the chief what is
      alike, and commits when all have written. With another number of workers a run continues, but not to the bit.
      Where steps per epoch follow from that number, a backup made amid an epoch may be further on than an epoch is then
      long: that is refused, before training.
    - The other callbacks are told apart by class and order. Attributes are saved that are numbers, text, arrays,
      tensors, variables, metrics, layers and models (as far as the one that trains does not hold them), generators of
      random numbers, and lists, tuples, sets, dicts and deques of them (also Counters, OrderedDicts, and defaultdicts
      of built-in types); a warning tells of others that change. What is large costs a look at all of its bytes with
      each save. A callback with `get_state` and `set_state` says itself, without metrics, layers and models. What
      callbacks write to files is theirs; that of `tfdist.callbacks.CSVLogger` has each epoch once.
    - Not saved: tables, `tf.Variable`s and generators that Keras does not know, random operations of TensorFlow
      without a state.
    - Several fits in a program, with one `backup_dir` and `delete_checkpoint=False` for all but the last: those that
      are done are passed over at a restart, each with the state of its end, which code that comes between them sees
      again. That takes a commit for each, besides those of `keep`. Under `tfdist run` this is so for backups on a disk
      without being asked for. Elsewhere, without `delete_checkpoint=False`, that code sees the weights of the fit that
      was under way, for which the model may be compiled anew. For another model use another `backup_dir`.
    - A script may itself skip fits that are done, if each is called from a place of its own, and what calls them is not
      edited in between. In a loop every start must make the same fits, or give each a `backup_dir`.

    Args:
      backup_dir: A folder for this job alone (`~` is the user's own), or another path that `tf.io.gfile` knows, such as
        `gs://…`, as a string.
      save_freq: "epoch"; a whole number of steps; a `datetime.timedelta` or a float of seconds; or `False` to save
        before preemption only.
      double_checkpoint: As in Keras; what `keep` does.
      delete_checkpoint: Whether to remove the backups when `fit` is done; under `tfdist run`, if they are on a disk,
        when the job is done, so that an error in what comes after a fit does not have it trained again. A job that has
        failed for good keeps them, and started again goes on after the fit.
      keep: How many commits stay, beside the ends of fits.
      save_before_preemption: Whether a signal to end (SIGTERM, Ctrl-C) saves first, and whether a
        job with fewer workers leaves after a commit when `tfdist run` wants to try all again. On several workers whose
        steps do not report, as those of a loop of your own or of TensorFlow's own strategies, both do so with the
        second save after that: let saves be less than half of `preemption_timeout_seconds` apart. In a validation
        nobody hears a signal, so the epoch is saved before one that may be long: the first of a `fit`, if the number of
        its batches is known (not of a generator), and any after one that took half of `preemption_timeout_seconds`.
        Before an `evaluate` that a callback calls it is not.
      timeout_seconds: How long workers wait for each other's parts of a save; for each other when a `fit` begins
        no longer than `start_timeout_seconds` of `tfdist.FaultTolerance`.

    Raises:
      ValueError: If an argument is not among these, or the model is not built.
      BackupError: Before training, if `backup_dir` cannot be written, another job uses it, it has folders of others
        that are named `step-<n>`, or a backup of another model or a newer format, or one made further on in an epoch
        than epochs are now long; if a worker does not begin the fit with this callback, or was told something else.
    """

    runs_on_all_workers = True
    """Whether a `fit` needs it on all workers or on none: they are compared as it begins."""

    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: Any = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        keep: int = 2,
        save_before_preemption: bool = True,
        timeout_seconds: float = 600.0,
    ):
        directory = _checked_directory(backup_dir)
        super().__init__(directory, "epoch", double_checkpoint, delete_checkpoint)
        self.save_freq = _checked_frequency(save_freq)
        self._options: BackupOptions = BackupOptions(
            directory,
            self.save_freq,
            max(_checked_keep(keep), 1 + double_checkpoint),
            delete_checkpoint,
            save_before_preemption,
            _checked_seconds(timeout_seconds),
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Hands over to a callback at the end of the list, which sees what all others have done."""
        of_running_fit(self._options, self.model)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing; see `on_train_begin`."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing; see `on_train_begin`."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing; see `on_train_begin`."""


def _checked_frequency(save_freq: Any) -> Any:
    if save_freq is False or (isinstance(save_freq, str) and save_freq == "epoch"):
        return save_freq
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        is_seconds = isinstance(save_freq, float | np.floating)
        given = datetime.timedelta(seconds=float(save_freq)) if is_seconds else save_freq
        if isinstance(given, datetime.timedelta):
            if given > datetime.timedelta():
                return given
        elif not isinstance(given, bool) and operator.index(given) > 0:
            return operator.index(given)
    raise ValueError(
        "`save_freq` is 'epoch', a positive whole number of steps, a positive number of seconds (a float or a "
        f"datetime.timedelta), or False, not {save_freq!r}."
    )


def _checked_keep(keep: Any) -> int:
    with contextlib.suppress(TypeError):
        if operator.index(keep) >= 1:
            return operator.index(keep)
    raise ValueError(f"`keep` is how many commits stay, a whole number of at least 1, not {keep!r}.")


def _checked_seconds(timeout_seconds: Any) -> float:
    is_number = isinstance(timeout_seconds, numbers.Real) and not isinstance(timeout_seconds, bool)
    if not is_number or not timeout_seconds > 0:
        raise ValueError(f"`timeout_seconds` is a positive number, not {timeout_seconds!r}.")
    return float(timeout_seconds)


def _checked_directory(backup_dir: str | os.PathLike) -> str:
    directory = os.fsdecode(backup_dir)
    if not directory:
        raise ValueError("`backup_dir` is a folder for this job alone, and may not be empty.")
    if _LOST_SLASH.match(directory):
        raise ValueError(
            f"`backup_dir` is {directory!r}, a folder here named after a scheme: pathlib makes one slash of two. "
            "Give such a path as a string with '://', or the folder as the string './…'."
        )
    # Whole, as the working directory may change in training.
    return directory if is_remote(directory) else os.path.abspath(os.path.expanduser(directory))
