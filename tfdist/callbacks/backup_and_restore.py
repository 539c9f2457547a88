"""`keras.callbacks.BackupAndRestore` that restores the whole training state, on any number of workers."""

import contextlib
import datetime
import numbers
import operator
import os
import re
from typing import Any

import keras
import numpy as np

from tfdist.backup.between_fits import BackupOptions
from tfdist.backup.fit_discovery import of_running_fit
from tfdist.backup.storage import is_remote
from tfdist.strategies.foreign_keras import ForKerasModels

_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]*:/[^/]")


class BackupAndRestore(ForKerasModels, keras.callbacks.BackupAndRestore):
    """Backs up a running `fit`, so that the same script, started again, continues as if nothing had happened.

        model.fit(data, epochs=10, callbacks=[tfdist.callbacks.BackupAndRestore("backup", save_freq=50)])

    A backup holds weights, optimizer, loss scale, accumulated gradients and metrics in progress. It also holds states
    of random layers, residuals of compression, the position in the data and Python's and NumPy's global random states.
    The history and changed attributes of the other callbacks complete it. A restored `fit` that gets the same data in
    the same order ends with the same bits as an uninterrupted one. It ignores `initial_epoch` and begins in the epoch
    of the backup.

    - `tfdist.data.BalancedSharding` continues at once. From any other input, `fit` reads and drops the batches that the
      epoch has trained on; under `steps_per_epoch`, all such batches of the fit. A `tf.data` pipeline that reshuffles
      in each epoch counts epochs from the start of the process. It is exact only within its first epoch or if it never
      ends (`.repeat()` with `steps_per_epoch`). With a seed, arrays and the batches of a `keras.utils.PyDataset` come
      in the same order, also if the PyDataset has several workers. A PyDataset that draws an order itself must do so in
      `on_epoch_begin`, from Python's or NumPy's global random state; draws in `on_epoch_end` are not repeated. Batches
      that draw random numbers while being read (augmentation) repeat them only if no callback or second reader draws.
    - A commit is one folder `step-<n>`, which exists completely or not at all. Each file is checked against its SHA-256
      before use. A damaged commit is skipped with a warning, and the commit before it is used.
    - Saving delays a step by about 40 µs per variable of any size. A thread then copies and writes the variables, and
      the memory of one copy stays in use until `fit` ends. Training waits for a save before the next save and at the
      end.
    - If the disk is full, an error is logged, training continues, and the next save tries again.
    - All workers write to one `backup_dir` on shared storage. Each writes its own state; the chief also writes the
      common state and commits when all have written. A run continues on another number of workers, but not with the
      same bits. If steps per epoch depend on the number of workers, an epoch may now be too short for the position of
      a backup that was made within an epoch. `fit` then raises before training.
    - Other callbacks are identified by class and order. Saved attributes are numbers, text, arrays, tensors, variables
      and random generators. Metrics, layers and models are saved without the variables of the trained model. Lists,
      tuples, sets, dicts and deques of these are saved too (also Counters, OrderedDicts, and defaultdicts of built-in
      types). A warning names a callback with another changing attribute. Each save reads all bytes of large attributes.
      A callback with `get_state` and `set_state` defines its own state, without metrics, layers and models. Files that
      callbacks write are not saved, except that the file of `tfdist.callbacks.CSVLogger` holds each epoch once.
    - Not saved: tables, `tf.Variable`s and generators that Keras does not track, stateless random operations of
      TensorFlow.
    - A program may call several fits with one `backup_dir` and `delete_checkpoint=False` for all but the last. After a
      restart, finished fits are skipped and the state at the end of each is restored for the code between the fits.
      This keeps one commit per fit, in addition to `keep`. Under `tfdist run`, backups on a disk need no
      `delete_checkpoint=False` for this. Elsewhere, without it, the code between the fits sees the weights of the
      interrupted fit. The model may be compiled again between fits. Use another `backup_dir` for another model.
    - A script may itself skip finished fits if each has its own call site and the calling code is not edited between
      starts. In a loop, every start must run the same fits, or each fit needs its own `backup_dir`.

    Args:
      backup_dir: A folder for this job alone (`~` is the user's home), or another path that `tf.io.gfile` supports,
        such as `gs://…`, as a string.
      save_freq: "epoch"; a whole number of steps; a `datetime.timedelta` or a float of seconds; or `False` to save
        before preemption only.
      double_checkpoint: As in Keras; keeps at least two commits.
      delete_checkpoint: Whether to remove the backups when `fit` is done. Under `tfdist run`, backups on a disk are
        removed when the job is done, so that an error after a fit does not cause that fit to be trained again. A job
        that failed for good keeps its backups; started again, it continues after the fit.
      keep: Number of commits to keep, in addition to the ends of fits.
      save_before_preemption: Whether SIGTERM or Ctrl-C saves before the process ends, and whether a job with fewer
        workers leaves after a commit when `tfdist run` wants to restart all workers. On several workers without step
        reports (custom loops, TensorFlow's own strategies), workers leave at the second save after the request; save
        more often than every half of `preemption_timeout_seconds`. A validation does not react to signals, so the epoch
        is saved before each validation that may be long. This is the first of a `fit`, if the number of training
        batches is known (not for a generator), and any after one that took half of `preemption_timeout_seconds`. No
        save precedes an `evaluate` called by a callback.
      timeout_seconds: How long workers wait for each other's parts of a save. When a `fit` begins, they wait for each
        other no longer than `start_timeout_seconds` of `tfdist.FaultTolerance`.

    Raises:
      ValueError: If an argument is invalid, or the model is not built.
      BackupError: If `backup_dir` cannot be written, is used by another job, or has foreign folders named `step-<n>`.
        If the backup is of another model or format, or lies beyond the end of an epoch that is now shorter. If a worker
        begins the fit without this callback or with other arguments. All are raised before training.
    """

    runs_on_all_workers = True
    """Whether a `fit` needs this callback on all workers or on none. The workers compare this when a `fit` begins."""

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
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
        """Appends a `FitBackup` to the list of callbacks, so that it sees the changes of all other callbacks."""
        strategy = self.model.distribute_strategy
        if getattr(strategy, "elastic", None) is not None and not strategy.extended.should_checkpoint:
            return  # Worker 0 backs up for all, and gives its state to the workers that join.
        of_running_fit(self._options, self.model)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing, unlike Keras' callback: the appended `FitBackup` saves."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing, unlike Keras' callback: the appended `FitBackup` saves."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends a `fit` that was done before, also for members of local steps. `FitBackup` removes the backups."""
        elastic = getattr(self.model.distribute_strategy, "elastic", None)
        if elastic is not None:  # Without an epoch, no other callback of the strategy has ended it.
            elastic.end_fit()


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
        "`save_freq` must be 'epoch', a positive whole number of steps, a positive number of seconds (a float or a "
        f"datetime.timedelta), or False, got {save_freq!r}."
    )


def _checked_keep(keep: Any) -> int:
    with contextlib.suppress(TypeError):
        if operator.index(keep) >= 1:
            return operator.index(keep)
    raise ValueError(f"`keep` must be a number of commits, a whole number of at least 1, got {keep!r}.")


def _checked_seconds(timeout_seconds: Any) -> float:
    is_number = isinstance(timeout_seconds, numbers.Real) and not isinstance(timeout_seconds, bool)
    if not is_number or not timeout_seconds > 0:
        raise ValueError(f"`timeout_seconds` must be a positive number, got {timeout_seconds!r}.")
    return float(timeout_seconds)


def _checked_directory(backup_dir: str | os.PathLike[str]) -> str:
    directory = os.fsdecode(backup_dir)
    if not directory:
        raise ValueError("`backup_dir` must be a folder for this job alone, got an empty path.")
    if _LOST_SLASH.match(directory):
        raise ValueError(
            f"`backup_dir` must not look like a URL that pathlib has shortened to one slash, got {directory!r}. "
            "Give a URL as a string with '://', or a local folder as the string './…'."
        )
    # An absolute path, because the working directory may change during training.
    return directory if is_remote(directory) else os.path.abspath(os.path.expanduser(directory))
