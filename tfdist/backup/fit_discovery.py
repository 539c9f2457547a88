"""Finds the running `fit` on the call stack, because Keras does not pass it to callbacks."""

import hashlib
import inspect
from types import FrameType
from typing import Any

import keras

from tfdist import _tf
from tfdist.backup.backed_up_fit import BackupOptions, FitBackup, Input
from tfdist.errors import BackupError


def of_running_fit(options: BackupOptions, model: keras.Model) -> FitBackup:
    """Appends a `FitBackup` to the list of callbacks that is calling `on_train_begin`.

    Finds the list on the call stack, because Keras does not pass it to callbacks.

    Raises:
      BackupError: If no `keras.callbacks.CallbackList` is calling, or the list has two `BackupAndRestore`.
    """
    frame = inspect.currentframe()
    callbacks, given, site = None, Input(), ""
    while frame is not None:
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if callbacks is None and isinstance(caller, keras.callbacks.CallbackList):
            callbacks, site = caller, _site(frame)
        elif callbacks is not None and caller is model and "steps_per_epoch" in frame.f_code.co_varnames:
            made = frame.f_locals.get("epoch_iterator")
            epochs = made if frame.f_locals["steps_per_epoch"] is not None else None
            sharding = getattr(_tf.dataset_of(made), "sharding", None)
            given = Input(
                epochs,
                _batches(made),
                _batches(getattr(made, "data_adapter", None)),
                sharding,
                first_epoch=int(frame.f_locals.get("initial_epoch") or 0),
                validates=frame.f_locals.get("validation_data") is not None,
                is_known=True,
            )
            break
        frame = frame.f_back
    if callbacks is None:
        raise BackupError(
            "BackupAndRestore saves the state of all callbacks, and is called by none that holds them. Use `fit`, or, "
            "in a loop of your own, keras.callbacks.CallbackList."
        )
    former = [callback for callback in callbacks.callbacks if isinstance(callback, FitBackup)]
    if any(not one.has_begun for one in former):
        raise BackupError("A `fit` takes one BackupAndRestore, but its callbacks have two. Leave one out.")
    for one in former:  # left by an interrupted `fit` with the same list
        callbacks.callbacks.remove(one)
    _tf.call_in_step(callbacks)
    backup = FitBackup(options, callbacks, given, site)
    backup.set_params(callbacks.params)
    backup.set_model(model)
    callbacks.callbacks.append(backup)  # Keras is iterating over the list, so its `on_train_begin` comes last
    return backup


def _batches(given: Any) -> int | None:
    batches = getattr(given, "num_batches", None)
    return None if batches is None else int(batches)


def _site(frame: FrameType | None) -> str:
    """Returns the call site of a `fit`: hash of the code and instruction offset of each caller, outermost first.

    Line numbers would be ambiguous: after a line is inserted, another `fit` may be at the line of this one.
    """
    callers = []
    while frame is not None:
        code = hashlib.sha256(frame.f_code.co_qualname.encode() + frame.f_code.co_code).hexdigest()[:12]
        callers.append(f"{code}:{frame.f_lasti}")
        frame = frame.f_back
    return "/".join(reversed(callers))
