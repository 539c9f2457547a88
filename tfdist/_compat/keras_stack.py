"""Finds out on this thread's call stack what Keras is doing, such as `fit` or `predict`, where no hook tells it.

Each function states what breaks without it.
"""

import inspect
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._compat import call_stack, dataset_internals, keras_internals

# Keras' exchange of gradients, to find the variables of the gradients. Without it: in custom loops, replicas that trace
# batches with differently known shapes exchange different buckets, and abort or wait forever.
from keras.src.backend.tensorflow.optimizer import TFOptimizer

# Keras' loss scaler, which exchanges gradients in one of its branches. We recognize the scaler by its code. Without it:
# a custom loop in which one replica overflows waits forever instead of failing.
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

# The module of Keras' `fit`, to distinguish its calls of the strategy from a user's. Without it: each `fit` and
# `evaluate` sends a batch over the network, generators lose batches, and batch logs collapse vector metrics.
from keras.src.backend.tensorflow import trainer as keras_trainer

# The module that creates the iterators of `fit`, to distinguish them from a user's. Without it: a BalancedSharding
# treats all iterators as a user's, so shares never change, and an evaluation moves the position in the data.
from keras.src.trainers import epoch_iterator as keras_epoch_iterator

# Keras' adapters of input data, to distinguish a user's dataset from a dataset that Keras creates. Without them: `fit`
# on arrays returns a minute late, or a user's pipeline is not autotuned.
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

# Creates an optimizer on each save, to find the attributes that all optimizers have. Without it: a save inside the
# scope on the chief alone waits for the other workers, which create no such optimizer.
from keras.src.saving.saving_lib import get_attr_skipset

# The module that runs all callbacks. Without it: a callback that takes minutes, say to save, looks like a stuck step.
from keras.src.callbacks import callback_list as keras_callback_list

__all__ = [
    "KerasCall",
    "RunningFit",
    "beginning_fit",
    "call_name",
    "called_by_trainer",
    "calling_trainer",
    "deciding_loss_scaler",
    "epochs_of_beginning_fit",
    "epochs_of_iterator",
    "epochs_to_distribute",
    "fitting_models",
    "initializer_in_use",
    "is_evaluating",
    "is_keras_call",
    "is_of_py_datasets",
    "is_peeking",
    "is_predicting",
    "loop_to_distribute",
    "made_dataset",
    "makes_for_comparison",
    "model_in_compile",
    "model_in_step",
    "model_to_build",
    "place_in_fit",
    "purpose",
    "reader",
    "reads_outside_graph",
    "running_calls",
    "running_fit",
    "sharding_of_fit",
    "spec_to_predict",
    "tf_keras_exchanges_gradients",
    "trains_no_epoch",
    "variable_being_made",
    "variable_made_late",
    "variables_of_summed_gradients",
]

# The class of `fit` and of what it calls. Keras 3.16 renames it to `Trainer`.
_TRAINER: Any = getattr(keras_trainer, "TensorFlowTrainer", None) or keras_trainer.Trainer

_LOOPS = (_TRAINER.fit, _TRAINER.evaluate, _TRAINER.predict)


def _owner_of(*methods: Any) -> Any:
    """Returns the object (`self`) of the innermost running call of one of `methods` in this thread, or `None`."""
    frame = call_stack.frame_of(*methods)
    return None if frame is None else frame.f_locals["self"]


def called_by_trainer() -> bool:
    """Returns whether the module of Keras' `fit` called the caller, to tell Keras' own calls from a user's."""
    return call_stack.caller().f_globals.get("__name__") == keras_trainer.__name__


def reads_outside_graph(function: Any) -> bool:
    """Returns whether Keras' own train or test function reads the batch of a single step in Python, as from 3.16 on.

    Without it: steps are traced for a fixed number of rows, and reading takes longer.
    """
    code = getattr(function, "__code__", None)
    is_keras_own = getattr(function, "__module__", None) == keras_trainer.__name__
    return is_keras_own and code is not None and "get_next_as_optional" in code.co_names


def calling_trainer() -> keras.Model | None:
    """Returns the model whose `fit`, `evaluate` or `predict` called the caller to run a step."""
    return call_stack.owner_of_caller(keras_trainer)


def variable_made_late() -> keras.Variable | None:
    """Returns the Keras variable that is creating its `tf.Variable` late, since it was requested while tracing shapes.

    Without it: we cannot tell the layers of models that `fit` builds apart, so statistics are not averaged.
    """
    return _owner_of(keras.Variable._deferred_initialize)


def variable_being_made() -> keras.Variable | None:
    """Returns the Keras variable that is creating its `tf.Variable`. Without it: no error names unequal shapes."""
    return _owner_of(keras.Variable._initialize)


def initializer_in_use() -> Any:
    """Returns the initializer of the Keras variable that is creating its `tf.Variable`; `None` for a given value.

    Without it: the initial value of a variable whose parts are divided among replicas is made whole on each replica.
    """
    frame = call_stack.frame_of(keras.Variable._initialize_with_initializer)
    return None if frame is None else frame.f_locals["initializer"]


def is_peeking() -> bool:
    """Returns whether Keras is building a model from the first batch, which must stay available for training."""
    return call_stack.frame_of(_TRAINER._maybe_symbolic_build) is not None


def epochs_to_distribute() -> keras_epoch_iterator.EpochIterator | None:
    """Returns the Keras `EpochIterator` that is being created and distributes its dataset, for `fit` or another loop.

    Without it: workers with unequal numbers of batches fail within an epoch, with an error of TensorFlow's collectives.
    """
    return _owner_of(keras_trainer.TFEpochIterator.__init__)


def loop_to_distribute() -> str | None:
    """Returns the Keras loop that distributes a dataset: "fit", "evaluate" or "predict".

    Without it: `predict` on data that workers do not share returns rows in an unknown order.
    """
    frame = call_stack.frame_of(keras_trainer.TFEpochIterator.__init__)
    return frame.f_back.f_code.co_name if frame and frame.f_back else None


def made_dataset() -> bool:
    """Returns whether Keras distributes a dataset that it made from arrays or a generator, which needs no tuning."""
    adapter = getattr(epochs_to_distribute(), "data_adapter", None)
    return adapter is not None and not isinstance(adapter, TFDatasetAdapter)


def epochs_of_iterator() -> keras_epoch_iterator.EpochIterator | None:
    """Returns the Keras `EpochIterator` that called the calling `__iter__`; `None` if a user did, as in a callback."""
    return call_stack.owner_of_caller(keras_epoch_iterator)


def model_to_build() -> keras.Model | None:
    """Returns the model that Keras builds before its first step, if Keras called the caller to get the scope for that.

    Keras does this under strategies only. Without it: models without a `call`, and losses that get their targets only
    in a step, train on one device but fail here.
    """
    frame = call_stack.caller()
    builds = frame.f_code is _TRAINER._maybe_symbolic_build.__code__
    return frame.f_locals["self"] if builds else None


class BeginningFit(NamedTuple):
    """Arguments of a `fit` that is starting, to compare them between workers.

    Attributes:
      callbacks: List of its callbacks.
      arguments: Arguments that set its length and its validation, each as "name=value".
    """

    callbacks: list[keras.callbacks.Callback]
    arguments: list[str]


_LENGTHS = ("epochs", "initial_epoch", "steps_per_epoch", "validation_freq", "validation_steps")


def beginning_fit() -> BeginningFit | None:
    """Returns the arguments of a starting `fit`, if Keras asks for the scope to build a model in; else `None`.

    Without it: workers with models that diverged between two fits train different models. Workers with unequal numbers
    of epochs wait for each other. And no warning names callbacks that overwrite each other's files.
    """
    frame = call_stack.frame_of(_TRAINER._maybe_symbolic_build)
    caller = frame and frame.f_back
    if caller is None or caller.f_code is not inspect.unwrap(_TRAINER.fit).__code__:
        return None
    given = caller.f_locals
    callbacks = tf.nest.flatten(getattr(given.get("callbacks"), "callbacks", given.get("callbacks")) or [])
    validates = "no validation_data" if given.get("validation_data") is None else "validation_data"
    return BeginningFit(list(callbacks), [*(f"{name}={given.get(name)}" for name in _LENGTHS), validates])


def epochs_of_beginning_fit() -> keras_epoch_iterator.EpochIterator | None:
    """Returns the `EpochIterator` of a starting `fit`, to compare positions in the data between workers.

    Without it: workers at different positions in the data train on, and read examples twice or never.
    """
    frame = call_stack.frame_of(_TRAINER._maybe_symbolic_build)
    return frame.f_locals.get("iterator") if frame else None


def makes_for_comparison() -> bool:
    """Returns whether Keras makes a temporary object to compare while it saves a model on one worker only."""
    return call_stack.frame_of(get_attr_skipset) is not None


def model_in_compile() -> keras.Model | None:
    """Returns the model that runs Keras' `compile` in this thread.

    Without it: workers train different models, created outside the scope, and no error appears before the end.
    """
    return _owner_of(_TRAINER.compile)


def model_in_step() -> keras.Model | None:
    """Returns the model that `fit` trains in this thread, if not in callbacks or validation; else `None`."""
    fit, *others = (inspect.unwrap(method).__code__ for method in _LOOPS)
    for frame in call_stack.frames():
        if frame.f_code is fit:
            return frame.f_locals["self"]
        if frame.f_code in others or frame.f_globals.get("__name__") == keras_callback_list.__name__:
            break
    return None


class KerasCall(NamedTuple):
    """A running `fit`, `evaluate` or `predict`.

    Attributes:
      name: Name of the method.
      model: Model that runs the method.
      epochs: `EpochIterator` that the call reads. Only the call keeps a reference to it.
      callbacks: Callback list of the call, once it exists.
    """

    name: str
    model: keras.Model
    epochs: keras_epoch_iterator.EpochIterator
    callbacks: keras.callbacks.CallbackList | None


def running_calls() -> list[KerasCall]:
    """Returns the running calls of Keras in this thread, innermost first. A `fit` includes its validation.

    Without it: the watchdog does not know which call a worker is in.
    """
    codes = {inspect.unwrap(method).__code__: method.__name__ for method in _LOOPS}
    calls: list[KerasCall] = []
    made = epochs_to_distribute()
    for frame in call_stack.frames():
        name, given = codes.get(frame.f_code), frame.f_locals if frame.f_code in codes else {}
        epochs = given.get("epoch_iterator", made)
        if name is not None and epochs is not None and not given.get("use_cached_eval_dataset"):
            callbacks = given.get("callbacks")
            has_list = isinstance(callbacks, keras.callbacks.CallbackList)
            calls.append(KerasCall(name, given["self"], epochs, callbacks if has_list else None))
    return calls


def is_evaluating() -> bool:
    """Returns whether Keras' `evaluate` or `predict` runs in this thread, so that data is not for training."""
    return call_stack.frame_of(*_LOOPS[1:]) is not None


def is_predicting() -> bool:
    """Returns whether Keras' `predict` runs in this thread, to refuse data that each worker has for itself."""
    return call_stack.frame_of(_TRAINER.predict) is not None


def spec_to_predict() -> Any:
    """Returns the element spec on one replica of the dataset of Keras' `predict`; `None` if there is no dataset.

    Without it: workers trace `predict` on batches of different lengths, and only some workers exchange the lengths.
    """
    frame = call_stack.frame_of(_TRAINER.predict)
    dataset = keras_internals.dataset_of(frame and frame.f_locals.get("epoch_iterator"))
    return tf.nest.map_structure(dataset_internals.spec_on_a_replica, getattr(dataset, "element_spec", None))


def call_name() -> str | None:
    """Returns the name of the innermost call of Keras in this thread that runs a model.

    Without it: a worker that waits for peers in `train_on_batch`, outside its step, seems to be in no call.
    """
    codes = (frame.f_code for frame in call_stack.frames())
    return next((code.co_name for code in codes if is_keras_call(code.co_filename, code.co_name)), None)


def is_keras_call(file: str, function: str) -> bool:
    """Returns whether a function in a file is Keras' `fit` or another method that runs a model, to report the call."""
    return file == keras_trainer.__file__ and function in _KERAS_CALLS


def is_of_py_datasets(file: str) -> bool:
    """Returns whether a file is the one in which Keras' threads call the user's `PyDataset`, to report its line."""
    return file == _PY_DATASETS


_PY_DATASETS = inspect.getfile(keras.utils.PyDataset)
_KERAS_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def fitting_models() -> list[keras.Model]:
    """Returns the models that run Keras' `fit` in this thread, innermost first, to see whose steps train on data."""
    code = inspect.unwrap(_TRAINER.fit).__code__
    return [frame.f_locals["self"] for frame in call_stack.frames() if frame.f_code is code]


def purpose() -> str:
    """Returns the purpose of a dataset that Keras distributes: "fit", "validation", "evaluate" or "predict".

    Without it: errors about unequal data do not name the call, and validation data is compared in each epoch.
    """
    frame = call_stack.frame_of(*_LOOPS)
    if frame is None:
        return "fit"
    name = frame.f_code.co_name
    return "validation" if name == "fit" and "epoch_iterator" in frame.f_locals else name


def reader() -> keras.Model | None:
    """Returns the model that runs the `fit`, `evaluate` or `predict` that distributes a dataset.

    Without it: for unequal models on workers, `predict` raises an error of TensorFlow, or no error at all.
    """
    return _owner_of(*_LOOPS)


def deciding_loss_scaler():
    """Returns the loss scaler that now applies this replica's gradients, to check that all decide alike; or `None`."""
    return _owner_of(LossScaleOptimizer._stateful_handle_finite_grads)


def variables_of_summed_gradients() -> list[Any]:
    """Returns the variables of the gradients that a plain Keras optimizer exchanges now, in order, or an empty list."""
    frame = call_stack.frame_of(TFOptimizer._all_reduce_sum_gradients)
    return [] if frame is None else [variable for _, variable in frame.f_locals["filtered_grads_and_vars"]]


def tf_keras_exchanges_gradients() -> bool:
    """Returns whether an optimizer of tf_keras sums up its gradients now.

    Without it: `compression` has no effect on models of tf_keras, and no error says so.
    """
    return any(
        frame.f_code.co_name == "all_reduce_sum_gradients" and frame.f_globals["__name__"].startswith("tf_keras.")
        for frame in call_stack.frames()
    )


def place_in_fit() -> tuple[int, int]:
    """Returns the epoch of the innermost running `fit` in this thread, and its present batch; (0, 0) outside of one.

    Without it: a worker that joins late does not know where the others are.
    """
    frame = call_stack.frame_of(_TRAINER.fit)
    given = {} if frame is None else frame.f_locals
    return int(given.get("epoch", 0)), int(given.get("begin_step", 0))


def trains_no_epoch() -> bool:
    """Returns whether the arguments of the innermost running `fit` in this thread leave no epoch to train.

    Without it: other workers wait for a `fit` of no epochs, of which worker 0 does not notice the end.
    """
    frame = call_stack.frame_of(_TRAINER.fit)
    return frame is not None and frame.f_locals["initial_epoch"] >= frame.f_locals["epochs"]


def sharding_of_fit() -> Any:
    """Returns the `BalancedSharding` that the innermost running `fit` in this thread reads; `None` for other input.

    Without it: a worker that joins late does not know which batches of it the others have trained on.
    """
    frame = call_stack.frame_of(_TRAINER.fit)
    epochs = None if frame is None else frame.f_locals.get("epoch_iterator")
    return getattr(keras_internals.dataset_of(epochs), "sharding", None)


class RunningFit(NamedTuple):
    """The call that runs a list of callbacks.

    Attributes:
      callbacks: List of callbacks that calls the caller.
      site: Call site: hash of the code and instruction offset of each caller, outermost first. Line numbers would be
        ambiguous: after a line is inserted, another `fit` may be at the line of this one.
      epochs: `EpochIterator` of the `fit`; `None` in a loop of the user's own.
      arguments: Arguments of the `fit`; empty in a loop of the user's own.
    """

    callbacks: keras.callbacks.CallbackList
    site: str
    epochs: keras_epoch_iterator.EpochIterator | None
    arguments: dict[str, Any]


def running_fit(model: keras.Model) -> RunningFit | None:
    """Returns the call whose list of callbacks calls the caller, or `None` if there is no such list.

    Without it: a callback cannot save the state of the other callbacks, nor tell two calls of `fit` apart.
    """
    callbacks, site = None, ""
    for frame in call_stack.frames():
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if callbacks is None and isinstance(owner, keras.callbacks.CallbackList):
            callbacks, site = owner, call_stack.site_of(frame)
        elif callbacks is not None and owner is model and "steps_per_epoch" in frame.f_code.co_varnames:
            return RunningFit(callbacks, site, frame.f_locals.get("epoch_iterator"), dict(frame.f_locals))
    return None if callbacks is None else RunningFit(callbacks, site, None, {})
