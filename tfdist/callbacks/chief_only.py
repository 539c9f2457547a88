"""Callbacks that only the chief runs, so that workers do not overwrite each other's files."""

import contextlib
import functools
import os
import tempfile
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.errors import ClusterError
from tfdist.faults.peer_probe import PeerProbe
from tfdist.strategies.chief_only_guard import is_on_chief_alone, on_chief_alone
from tfdist.strategies.foreign_keras import check_is_keras_model
from tfdist.strategies.sharding.table_update import table_of


class ChiefOnly:
    """Mixin, listed before a Keras callback in the bases, that disables the hooks on all workers but the chief.

        class Uploader(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None): ...

    The strategy of the model determines the chief. Logs are equal on all workers, so the chief's files are complete.
    The files exist when `fit` returns: at its end, the other workers wait for the chief's `on_train_end` and raise
    `ClusterError` if it fails. A hook that needs all workers, such as one that calls `predict`, raises `ClusterError`,
    and so does a hook that stops training. A hook must not change common state, such as the learning rate.
    """

    _is_chief = True
    _needs_all = False  # Whether hooks run on all workers, since the chief cannot do its work alone.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes only the chief run the hooks that the class defines or inherits from an unguarded callback."""
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            hook = getattr(cls, name)
            if name.startswith("on_") and not hasattr(hook, "_on_chief"):
                setattr(cls, name, _on_chief(name, hook))

    def set_model(self, model: keras.Model) -> None:
        """Sets the model and whether this worker is the chief. Guards hooks stored on the instance, as by lambdas."""
        check_is_keras_model(self, model)
        self._is_chief = model.distribute_strategy.extended.should_checkpoint
        if self._is_chief:
            super().set_model(model)  # type: ignore[misc]
        else:
            keras.callbacks.Callback.set_model(self, model)
        for name, hook in list(vars(self).items()):  # A LambdaCallback stores its hooks here.
            if name.startswith("on_") and callable(hook) and not hasattr(hook, "_on_chief"):
                setattr(self, name, types.MethodType(_on_chief(name, _without_self(hook)), self))


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def _on_chief(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_on_chief_alone():  # Another hook calls this one, for example by `super()`.
            return hook(self, *args, **kwargs)
        if self._needs_all and name != "on_train_end":
            return self._with_all(functools.partial(hook, self, *args, **kwargs))
        agreement = _agreement_of(self) if name == "on_train_end" else None
        what = f"the callback {type(self).__name__!r}"
        if not self._is_chief:
            if agreement is not None:
                agreement.wait_for_chief(what, PeerProbe.of(self.model.distribute_strategy).check)
            return None
        with _telling(agreement, what), _training_on(self), on_chief_alone(what):
            return hook(self, *args, **kwargs)

    run._on_chief = True  # type: ignore[attr-defined]
    return run


def _agreement_of(callback: Any) -> Any:
    """Returns what lets the model's workers wait for the chief; `None` for one worker or another strategy."""
    strategy = callback.model.distribute_strategy
    return getattr(strategy.extended, "agreement", None) if tf_internals.number_of_workers(strategy) > 1 else None


@contextlib.contextmanager
def _telling(agreement: Any, what: str) -> Iterator[None]:
    """Tells the workers that wait for the chief that a hook (the block) is done, or how it failed."""
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
    """Checks that a hook (the block) does not stop training on the chief alone, since other workers would wait for it.

    Raises:
      ClusterError: If the block stops training and there are other workers.
    """
    before = getattr(callback.model, "stop_training", False)
    yield
    if not before and getattr(callback.model, "stop_training", False) and _agreement_of(callback) is not None:
        raise ClusterError(
            f"A fit must end after the same step on all workers, but the callback {type(callback).__name__!r}, which "
            "runs on the chief alone, set `model.stop_training`. Set it in a callback that is not `ChiefOnly`, by "
            "values that all workers know, such as the logs."
        )


class ModelCheckpoint(ChiefOnly, keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint`, written by the chief. The files exist on all workers when `fit` returns.

    All workers take part if variables are divided among them, by `model_sharding` or a `ShardedEmbedding`. The others
    write a file of their own to a temporary folder, since Keras decides in which order the state is read.
    """

    @property
    def _needs_all(self) -> bool:  # type: ignore[override]
        strategy = self.model.distribute_strategy
        sharding = getattr(strategy, "model_sharding", None)
        is_sharded = sharding == "parameters" or (sharding is not None and not self.save_weights_only)
        is_sharded = is_sharded or any(map(table_of, self.model.weights))
        return is_sharded and tf_internals.number_of_workers(strategy) > 1

    def _with_all(self, hook: Callable[[], Any]) -> Any:
        if self._is_chief:
            return hook()
        path: str = self.filepath  # type: ignore[has-type]
        with tempfile.TemporaryDirectory() as folder:
            self.filepath = os.path.join(folder, os.path.basename(path))
            try:
                return hook()
            finally:
                self.filepath = path


class CSVLogger(ChiefOnly, keras.callbacks.CSVLogger):
    """`keras.callbacks.CSVLogger`, written by the chief.

    With `BackupAndRestore`, the file holds each epoch once, also after restarts: each backup has a copy of the text.
    Without `append`, the first epoch of a `fit` that ends replaces the text of an earlier `fit`. A skipped `fit`, which
    trains no epoch, leaves the file unchanged.
    """

    _is_old = False  # Whether the next row replaces the text in the file.

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the file. The text in it stays until an epoch ends, since `BackupAndRestore` may skip this `fit`."""
        self._is_old = not self.append
        self._open(append=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes a row, after a header if the file is new."""
        if self._is_old:
            self._is_old = False
            self._open(append=False)
        super().on_epoch_end(epoch, logs)

    def _open(self, *, append: bool) -> None:
        self.append_header = True  # An earlier `fit` may have appended to a file with a header.
        given: bool = vars(self)["append"]
        self.append = append
        try:
            keras.callbacks.CSVLogger.on_train_begin(self)
        finally:
            self.append = given

    def get_state(self) -> dict[str, str | None]:
        """Returns the text of the CSV file for a backup; `None` on workers that do not write the file."""
        if not self._is_chief or self.csv_file is None:
            return {"text": None}
        if self._is_old:
            return {"text": ""}
        with tf.io.gfile.GFile(self.filename) as file:  # Keras flushes each row.
            return {"text": file.read()}

    def set_state(self, state: dict[str, str | None]) -> None:
        """Replaces the content of the CSV file with the text from a backup."""
        text = state["text"]
        if not self._is_chief or text is None:
            return
        partial = f"{self.filename}.{uuid.uuid4().hex}"
        with tf.io.gfile.GFile(partial, "w") as file:
            file.write(text)
        tf.io.gfile.rename(partial, self.filename, overwrite=True)
        self._is_old = False
        self._open(append=True)


class TensorBoard(ChiefOnly, keras.callbacks.TensorBoard):
    """`keras.callbacks.TensorBoard`, written by the chief."""
