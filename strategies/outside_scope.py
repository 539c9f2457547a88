"""Detects models that are made and compiled outside of every scope although a strategy of several replicas exists.

Such a model does not use the strategy, so each worker would train its own model and write the same files. A variable
creator notices that `compile` makes the variables of the model's loss, and gives the model a `train_step` that raises
or warns. After a model was trained with the strategy it only warns: some programs, such as TensorFlow's tutorial on
several workers, then train a loaded model on each worker.
"""

import functools
import threading
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals, keras_stack, tf_internals
from tfdist.errors import ScopeError

_GUARDED = "train_step"

_REMEDY = (
    "Make `strategy = tfdist.MultiWorkerMirroredStrategy()` first in the program (`MirroredStrategy` for the devices "
    "of one process), and make and compile the model inside `with strategy.scope():`. If each process is to train a "
    "model of its own, make and compile it inside `with tf.distribute.OneDeviceStrategy('CPU:0').scope():` (or "
    "'GPU:0')."
)


class _Guard:
    """The facts about this process' strategies by which models compiled outside of all scopes are found."""

    # The creator scope that checks models as they are compiled; never left. `None` until a strategy is made outside of
    # all such scopes.
    watching: Any = None
    # The largest number of workers of a strategy in this process. More than one makes such training an error.
    workers = 1
    thread: int | None = None  # The thread of `watching`.
    has_trained = False  # Whether a model was trained with a strategy of several replicas.


def watch_models_outside(workers: int) -> None:
    """Makes the training of models that are made and compiled outside of all scopes raise or warn.

    With several workers the training raises a `ScopeError`, unless a model was trained with a strategy before. In that
    case it warns. On several devices of one process it warns too: the result is right, but only one device trains.
    Costs a look at the stack of calls for each new variable.
    """
    _Guard.workers = max(_Guard.workers, workers)
    # TensorFlow raises if an outer scope is left first. Inside the watching scope itself this does nothing.
    if not tf_internals.is_in_creator_scope():
        _Guard.watching = tf.variable_creator_scope(_look)
        _Guard.watching.__enter__()
        _Guard.thread = threading.get_ident()


def keep_watching() -> None:
    """Renews the watch for models compiled outside of scopes, which `keras.backend.clear_session` removes."""
    # Creator scopes are kept for each thread and graph, and a new one would end the present watch.
    if _Guard.watching is not None and tf.executing_eagerly() and threading.get_ident() == _Guard.thread:
        watch_models_outside(_Guard.workers)


def note_training() -> None:
    """Records that a strategy of several replicas trains a model; models outside of scopes then only cause warnings."""
    _Guard.has_trained = True


def _look(next_creator: Any, **kwargs: Any) -> Any:
    model = keras_stack.model_in_compile()
    if model is not None and keras_internals.is_made_in_scope(model):
        # Its strategy trains it and checks its variables.
        return next_creator(**kwargs)
    if model is not None and tf.distribute.has_strategy() and isinstance(vars(model).get(_GUARDED), _Outside):
        object.__delattr__(model, _GUARDED)
    elif model is not None and not tf.distribute.has_strategy() and _GUARDED not in vars(model):
        object.__setattr__(model, _GUARDED, _Outside(model))
    return next_creator(**kwargs)


class _Outside:
    """The `train_step` of a model that was compiled outside of all scopes."""

    def __init__(self, model: keras.Model):
        self._step = functools.partial(type(model).train_step, model)
        self._name = model.name
        self._has_warned = False

    def __call__(self, data: Any) -> Any:
        if _Guard.workers > 1 and not _Guard.has_trained:
            raise ScopeError(
                f"Model {self._name!r} was compiled outside of a strategy's scope, so each of {_Guard.workers} "
                f"workers would train it by itself. {_REMEDY}"
            )
        if not self._has_warned:
            self._has_warned = True
            many = _Guard.workers > 1
            effect = "each worker trains it by itself" if many else "only one device trains it"
            logging.warning("Model %r was compiled outside of a strategy's scope: %s. %s", self._name, effect, _REMEDY)
        return self._step(data)
