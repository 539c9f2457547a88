"""Callbacks that only the chief runs, so that workers do not write over each other's files."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.strategies.chief_alone import on_chief_alone


class ChiefOnly:
    """Mixed into a Keras callback, before it in the bases: on workers other than the chief its hooks do nothing.

        class Uploader(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None): ...

    Who is chief says the strategy of the model. Logs are equal on all workers, so the chief's files say it all. What
    all workers compute together, such as `predict`, a hook of the chief alone cannot: it raises `ClusterError`.
    """

    _is_chief = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Guards the hooks that the class defines, and those that it inherits from a callback that knows no chief."""
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            hook = getattr(cls, name)
            if name.startswith("on_") and not hasattr(hook, "_on_chief"):
                setattr(cls, name, _on_chief(hook))

    def set_model(self, model: keras.Model) -> None:
        """Takes the model, and from its strategy whether this worker is the chief."""
        self._is_chief = model.distribute_strategy.extended.should_checkpoint
        if self._is_chief:
            super().set_model(model)  # type: ignore[misc]
        else:
            keras.callbacks.Callback.set_model(self, model)


def _on_chief(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_chief:
            return None
        with on_chief_alone(f"the callback {type(self).__name__!r}"):
            return hook(self, *args, **kwargs)

    run._on_chief = True  # type: ignore[attr-defined]
    return run


class ModelCheckpoint(ChiefOnly, keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint`, written by the chief."""


class CSVLogger(ChiefOnly, keras.callbacks.CSVLogger):
    """`keras.callbacks.CSVLogger`, written by the chief."""


class TensorBoard(ChiefOnly, keras.callbacks.TensorBoard):
    """`keras.callbacks.TensorBoard`, written by the chief."""
