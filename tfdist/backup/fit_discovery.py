"""Finds the running `fit`, which Keras does not pass to callbacks, and appends the backup to its callbacks."""

from typing import Any

import keras

from tfdist._compat import keras_internals, keras_stack
from tfdist.backup.backed_up_fit import FitBackup
from tfdist.backup.between_fits import BackupOptions
from tfdist.backup.state_provider import FitInput
from tfdist.errors import BackupError


def of_running_fit(options: BackupOptions, model: keras.Model) -> FitBackup:
    """Appends a `FitBackup` to the callbacks of the `fit` that is calling `on_train_begin`, and returns it.

    Raises:
      BackupError: If no `keras.callbacks.CallbackList` is calling, or the list has two `BackupAndRestore`.
    """
    running = keras_stack.running_fit(model)
    if running is None:
        raise BackupError(
            "BackupAndRestore needs a list of callbacks, since it saves the state of all of them, but was called "
            "without one. Use `fit`, or, in a custom loop, keras.callbacks.CallbackList."
        )
    callbacks = running.callbacks
    former = [callback for callback in callbacks.callbacks if isinstance(callback, FitBackup)]
    if any(not one.has_begun for one in former):
        raise BackupError("A `fit` takes one BackupAndRestore, but its callbacks have two. Leave one out.")
    for one in former:  # left by an interrupted `fit` with the same list
        callbacks.callbacks.remove(one)
    keras_internals.call_in_step(callbacks)
    backup = FitBackup(options, callbacks, _input_of(running), running.site)
    backup.set_params(callbacks.params)
    backup.set_model(model)
    callbacks.callbacks.append(backup)  # Keras is iterating over the list, so its `on_train_begin` comes last
    return backup


def _input_of(running: keras_stack.RunningFit) -> FitInput:
    given, epochs = running.arguments, running.epochs
    if not given:
        return FitInput()
    return FitInput(
        epochs if given["steps_per_epoch"] is not None else None,
        _batches(epochs),
        _batches(getattr(epochs, "data_adapter", None)),
        getattr(keras_internals.dataset_of(epochs), "sharding", None),
        first_epoch=int(given.get("initial_epoch") or 0),
        validates=given.get("validation_data") is not None,
        is_known=True,
    )


def _batches(given: Any) -> int | None:
    batches = getattr(given, "num_batches", None)
    return None if batches is None else int(batches)
