"""Callbacks that only the chief runs, so that workers do not write over each other's files."""

import contextlib
import functools
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.faults.peer_health import PeerHealth
from tfdist.strategies.chief_only_guard import is_on_chief_alone, on_chief_alone
from tfdist.strategies.foreign_keras import check_is_keras_model


class ChiefOnly:
    """Mixed into a Keras callback, before it in the bases: on workers other than the chief its hooks do nothing.

        class Uploader(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None): ...

    Who is chief says the strategy of the model. Logs are equal on all workers, so the chief's files say it all. When
    `fit` returns they are there: at its end the others wait for the chief's `on_train_end`, and raise `ClusterError` if
    that fails. What all workers compute together, such as `predict`, a hook of the chief alone cannot: it raises
    `ClusterError`, and so does one that stops training. Nor may it change what all have alike, as the learning rate.
    """

    _is_chief = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Guards the hooks that the class defines, and those that it inherits from a callback that knows no chief."""
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            hook = getattr(cls, name)
            if name.startswith("on_") and not hasattr(hook, "_on_chief"):
                setattr(cls, name, _on_chief(name, hook))

    def set_model(self, model: keras.Model) -> None:
        """Takes the model, and from its strategy whether this worker is the chief. Guards hooks of the object's own."""
        check_is_keras_model(self, model)
        self._is_chief = model.distribute_strategy.extended.should_checkpoint
        if self._is_chief:
            super().set_model(model)  # type: ignore[misc]
        else:
            keras.callbacks.Callback.set_model(self, model)
        for name, hook in list(vars(self).items()):  # As a LambdaCallback has them.
            if name.startswith("on_") and callable(hook) and not hasattr(hook, "_on_chief"):
                setattr(self, name, types.MethodType(_on_chief(name, _without_self(hook)), self))


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def _on_chief(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_on_chief_alone():  # One that another calls, as by `super()`.
            return hook(self, *args, **kwargs)
        agreement = _agreement_of(self) if name == "on_train_end" else None
        what = f"the callback {type(self).__name__!r}"
        if not self._is_chief:
            if agreement is not None:
                agreement.wait_for_chief(what, PeerHealth.of(self.model.distribute_strategy).check)
            return None
        with _telling(agreement, what), _training_on(self), on_chief_alone(what):
            return hook(self, *args, **kwargs)

    run._on_chief = True  # type: ignore[attr-defined]
    return run


def _agreement_of(callback: Any) -> Any:
    """Through which the workers that a callback's model is trained on agree; `None` for one, and other strategies."""
    extended = callback.model.distribute_strategy.extended
    return getattr(extended, "agreement", None) if getattr(extended, "_num_workers", 1) > 1 else None


@contextlib.contextmanager
def _telling(agreement: Any, what: str) -> Iterator[None]:
    """Tells those that wait, if any, that the block is done, or how it failed."""
    failure = None
    try:
        yield
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        if agreement is not None:
            agreement.tell_done(what, failure)


@contextlib.contextmanager
def _training_on(callback: Any) -> Iterator[None]:
    """Refuses that the block stops training, in which the other workers would wait for this one.

    Raises:
      ClusterError: If it does, and there are others.
    """
    before = getattr(callback.model, "stop_training", False)
    yield
    if not before and getattr(callback.model, "stop_training", False) and _agreement_of(callback) is not None:
        raise ClusterError(
            f"A fit ends after the same step on all workers, but the callback {type(callback).__name__!r}, which runs "
            "on the chief alone, set `model.stop_training`. Set it in a callback that is not `ChiefOnly`, by what all "
            "know: logs are equal on all."
        )


class ModelCheckpoint(ChiefOnly, keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint`, written by the chief; what it has written is there when `fit` returns."""


class CSVLogger(ChiefOnly, keras.callbacks.CSVLogger):
    """`keras.callbacks.CSVLogger`, written by the chief.

    Beside `BackupAndRestore` its file has each epoch once, whatever was restarted: each backup holds what it says.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the file, with a header if it is new: also in a `fit` after one that went on with a file."""
        self.append_header = True
        super().on_train_begin(logs)

    def get_state(self) -> dict[str, str | None]:
        """What the file says; `None` where it is not written."""
        if not self._is_chief or self.csv_file is None:
            return {"text": None}
        with tf.io.gfile.GFile(self.filename) as file:  # After each row it is flushed.
            return {"text": file.read()}

    def set_state(self, state: dict[str, str | None]) -> None:
        """Has the file say what it said when `get_state` was called."""
        text = state["text"]
        if not self._is_chief or text is None:
            return
        partial = f"{self.filename}.{uuid.uuid4().hex}"
        with tf.io.gfile.GFile(partial, "w") as file:
            file.write(text)
        tf.io.gfile.rename(partial, self.filename, overwrite=True)
        appends: bool = vars(self)["append"]
        self.append = True
        keras.callbacks.CSVLogger.on_train_begin(self)  # Opens it anew.
        self.append = appends


class TensorBoard(ChiefOnly, keras.callbacks.TensorBoard):
    """`keras.callbacks.TensorBoard`, written by the chief."""
