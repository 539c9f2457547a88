"""The only file that imports private names of TensorFlow and Keras.

Comments state why a name is needed and what breaks without it. `setup.cfg` allows only tested versions.
"""

import gc
import inspect
import sys
import traceback
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# Base classes of our strategies' `extended` objects; `tf.distribute` exports only the strategies themselves. Without
# them: our strategies cannot extend TensorFlow's.
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# The collectives of both strategies. Our subclass chooses keys and buckets. Without it: we must call the raw ops.
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

# The class behind the public `tf.distribute.experimental.CommunicationOptions`. Only this class has `merge`.
from tensorflow.python.distribute.collective_util import Options as CommunicationOptions

# The variables of a mirrored strategy. Our subclasses define the effect of an update on one replica. Without them:
# BatchNormalization statistics and random layers are wrong on several replicas.
# `PerReplicaSpec` describes a dataset's elements on each replica. Without it: `fit` reads a batch to learn the shapes.
from tensorflow.python.distribute.values import MirroredVariable, PerReplicaSpec, SyncOnReadVariable

# Classes of distributed datasets and of their iterators; see `CountingIterator`. Keras accepts no other foreign
# dataset class. Without them: `fit` refuses a BalancedSharding, and a `fit` on a dataset that the user distributed
# under AutoShardPolicy.OFF ends early.
from tensorflow.python.distribute.input_lib import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedIterator,
    DistributedIteratorSpec,
)
from tensorflow.python.distribute import input_lib

# The source of batches for the replicas of a worker; see `make_iterators_on_devices_anew`. Without it: the end of an
# epoch may wait for TensorFlow's autotuner.
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

# Base class of datasets with the same element structure as their input; see `CountedDataset`.
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

# Combines one value per replica into a distributed value. Without it: no compression in eager steps.
from tensorflow.python.distribute.distribute_utils import regroup

# The replica that a thread is tracing, as a Python number, to select a launcher. The public API returns a tensor.
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int

# Pass AutoGraph's status on to a user's step function before we wrap it, as `strategy.run` itself does. Without them:
# AutoGraph does not convert a Python `if` on tensors in the step function of a custom loop.
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import tf_convert

# Unwrap a method under `tf.function`; see `python_function_of`.
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.util import tf_decorator

# The class of `tf.function` objects, which `strategy.run` traces again. Without it: we cannot detect such objects.
from tensorflow.python.eager.def_function import Function

# Set the registration deadline and heartbeats on the context before a strategy is created. The message type with the
# names of the jobs comes from here too. Without them: the cluster waits forever for a worker that never starts.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.distribute import multi_worker_util

# Whether XLA compiles a graph. XLA on a CPU has no collectives. Without it: TensorFlow raises its own, unclear error.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# The graphs inside a `tf.while_loop`. Without them: an exchange in a loop on several devices waits forever.
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph, WhileCondFuncGraph

# Whether `tf.config.experimental.enable_op_determinism` was called, which forbids timestamps. Without it: `fit` fails.
from tensorflow.python.framework.config import is_op_determinism_enabled

# The name scopes of Keras, which show the object that creates a variable (an optimizer, a seed generator). Without it:
# optimizer state is averaged needlessly like layer statistics, and random layers are equal on all replicas.
from keras.src.backend.common import global_state

# Keras' exchange of gradients, to find the variables of the gradients. Without it: in custom loops, replicas that trace
# batches with differently known shapes exchange different buckets, and abort or wait forever.
from keras.src.backend.tensorflow.optimizer import TFOptimizer

# Keras' loss scaler, which exchanges gradients in one of its branches. We recognize the scaler by its code. Without it:
# a custom loop in which one replica overflows waits forever instead of failing.
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

# The generator of unseeded random operations. Without it: random numbers start anew after a restore.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

# Whether a gradient tape records; see `is_recorded`.
from tensorflow.python.eager import record

# The module of Keras' `fit`, to distinguish its calls of the strategy from a user's. Without it: each `fit` and
# `evaluate` sends a batch over the network, generators lose batches, and batch logs collapse vector metrics.
from keras.src.backend.tensorflow import trainer as keras_trainer

# The module that creates the iterators of `fit`, to distinguish them from a user's. Without it: a BalancedSharding
# treats all iterators as a user's, so shares never change, and an evaluation moves the position in the data.
from keras.src.trainers import epoch_iterator as keras_epoch_iterator

# Keras' adapters of input data, to distinguish a user's dataset from a dataset that Keras creates. Without them: `fit`
# on arrays returns a minute late, or a user's pipeline is not autotuned.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

# Creates an optimizer on each save, to find the attributes that all optimizers have. Without it: a save inside the
# scope on the chief alone waits for the other workers, which create no such optimizer.
from keras.src.saving.saving_lib import get_attr_skipset

# The mask that layers attach to an output. Without it: a masked loss is a mean over one replica's unmasked positions.
from keras.src.backend.common.masking import get_keras_mask

# The module that runs all callbacks. Without it: a callback that takes minutes, say to save, looks like a stuck step.
from keras.src.callbacks import callback_list as keras_callback_list

__all__ = [
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CollectiveReplicaLauncher",
    "CommunicationOptions",
    "CountedDataset",
    "CountingIterator",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "Function",
    "GraphOrParentsInXlaContext",
    "KerasCall",
    "MirroredExtended",
    "MirroredVariable",
    "NotedIterator",
    "ReplacedLosses",
    "SyncOnReadVariable",
    "WhileBodyFuncGraph",
    "WhileCondFuncGraph",
    "beginning_fit",
    "bodies_of_call",
    "call_in_step",
    "called_by_iterator",
    "called_by_keras_trainer",
    "calling_trainer",
    "calls_of_threads",
    "clone_function",
    "context",
    "control_status_ctx",
    "coordination_config_pb2",
    "count_as_seen",
    "count_steps_of",
    "counter_of",
    "dataset_of",
    "datasets_of_worker",
    "datasets_read_by",
    "deciding_loss_scaler",
    "end_together",
    "end_when_all_have_ended",
    "epochs_of_beginning_fit",
    "get_current_replica_id_as_int",
    "get_keras_mask",
    "global_seed_generator",
    "goes_on_with",
    "graphs_of_dataset_functions",
    "has_global_seed_generator",
    "is_call_of_keras",
    "is_called_by_library",
    "is_in_creator_scope",
    "is_made_in_scope",
    "is_op_determinism_enabled",
    "is_recorded",
    "kept_losses",
    "keras_call_name",
    "keras_callers",
    "keras_calls",
    "keras_epochs_of_iterator",
    "keras_epochs_to_distribute",
    "keras_fitting_models",
    "keras_is_evaluating",
    "keras_is_peeking",
    "keras_is_predicting",
    "keras_loop_to_distribute",
    "keras_made_dataset",
    "keras_makes_for_comparison",
    "keras_model_in_compile",
    "keras_model_in_step",
    "keras_model_to_build",
    "keras_purpose",
    "keras_reader",
    "keras_source",
    "keras_spec_to_predict",
    "keras_variable_being_made",
    "keras_variable_made_late",
    "layers_of",
    "make_iterators_on_devices_anew",
    "maps_elements",
    "match_anew",
    "multi_worker_util",
    "places_in_optimizer",
    "put_losses_back",
    "python_function_of",
    "regroup",
    "runtime_has_started",
    "set_cardinality",
    "set_datasets_of_worker",
    "set_global_seed_generator",
    "spec_on_a_replica",
    "tf_convert",
    "tf_keras_exchanges_gradients",
    "unmatched_compiled",
    "variables_of_summed_gradients",
]


def unmatched_compiled(model: keras_trainer.TensorFlowTrainer) -> list[Any]:
    """Returns the compiled metrics and losses that Keras has not matched with outputs yet."""
    compiled = (model._compile_metrics, model._compile_loss)
    return [each for each in compiled if each is not None and not each.built]


def match_anew(compiled: list[Any]) -> None:
    """Makes Keras match metrics and losses with the outputs of the next call.

    Without it: metrics and losses that Keras has tried without targets are missing in the logs, or fail.
    """
    for each in compiled:
        each.built = False
        each.metrics.clear()  # A loss has its own list; unmatched metrics have an empty list.


class ReplacedLosses:
    """Replaces each loss `one` given to `compile` by `loss(one)`, until `put_back`.

    Each metric that logs the mean of a single loss gets `update(metric.update_state)` as its `update_state`. Without
    it: losses that are masked, summed, weighted or scalar differ from the losses on one device.
    """

    def __init__(self, model: keras.Model, loss: Any, update: Any):
        self._compiled, self._loss, self._update = model._compile_loss, loss, update
        self._before: list[Any] | None = None
        if self._compiled is None:
            return
        if self._compiled.built:
            self._replace()
        else:  # Keras matches losses with outputs at the first call.
            self._build, self._compiled.build = self._compiled.build, self._build_and_replace

    def put_back(self) -> None:
        """Puts the original losses back."""
        if self._compiled is not None:
            vars(self._compiled).pop("build", None)
        if self._before is not None:
            self._compiled._flat_losses = self._before
            for metric in self._compiled.metrics:
                object.__delattr__(metric, "update_state")

    def _build_and_replace(self, *args: Any) -> None:
        self._build(*args)
        self._replace()

    def _replace(self) -> None:
        self._before = self._compiled._flat_losses
        self._compiled._flat_losses = [each._replace(loss=self._loss(each.loss)) for each in self._before]
        for metric in self._compiled.metrics:
            object.__setattr__(metric, "update_state", self._update(metric.update_state))


def layers_of(model: keras.Model) -> list[Any]:
    """Returns all layers, also nested layers. Without it: unequal layers are not named before the first step."""
    return list(model._flatten_layers(include_self=False))


def kept_losses(model: keras_trainer.TensorFlowTrainer) -> list[tuple[Any, list]]:
    """Returns each layer with its `add_loss` losses. Without it: a regularizer is lost, or counted twice."""
    return [(layer, layer._losses[:]) for layer in model._flatten_layers()]


def put_losses_back(kept: list[tuple[Any, list]]) -> None:
    """Restores the losses that `kept_losses` returned, without later additions and removals."""
    for layer, losses in kept:
        layer._losses[:] = losses


def called_by_keras_trainer() -> bool:
    """Returns whether the caller was called from the module of Keras' `fit`."""
    return sys._getframe(2).f_globals.get("__name__") == keras_trainer.__name__


def called_by_iterator() -> bool:
    """Returns whether the caller was called from the module of distributed iterators.

    Without it: a worker that waits for a peer's input is reported as waiting for its own input.
    """
    return sys._getframe(2).f_globals.get("__name__") == input_lib.__name__


def calling_trainer() -> keras_trainer.TensorFlowTrainer | None:
    """Returns the model that runs a step, if the module of Keras' `fit` called the caller."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_globals.get("__name__") == keras_trainer.__name__ else None


def keras_callers() -> list:
    """Returns the Keras objects that have open name scopes, innermost first."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in reversed(stack) if scope.caller is not None]


def counter_of(optimizer: Any) -> Any:
    """Returns the variable in which an optimizer counts its calls. Wrappers share the inner optimizer's variable.

    Without it: `iterations` of an optimizer that accumulates gradients is a new tensor each time; residuals are lost.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    counter = optimizer.iterations
    return counter if isinstance(counter, keras.Variable | tf.Variable) else optimizer._iterations


def keras_variable_made_late() -> keras.Variable | None:
    """Returns the Keras variable that is creating its `tf.Variable` late, since it was requested while tracing shapes.

    Without it: we cannot tell the layers of models that `fit` builds apart, so statistics are not averaged.
    """
    frame = _frame_of(keras.Variable._deferred_initialize)
    return None if frame is None else frame.f_locals["self"]


def keras_variable_being_made() -> keras.Variable | None:
    """Returns the Keras variable that is creating its `tf.Variable`. Without it: no error names unequal shapes."""
    frame = _frame_of(keras.Variable._initialize)
    return None if frame is None else frame.f_locals["self"]


def has_global_seed_generator() -> bool:
    """Returns whether an unseeded random operation of Keras has been called, which creates the generator."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None


def set_global_seed_generator(generator) -> None:
    """Sets the generator of unseeded random operations in this thread. Keras has one generator per thread."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def keras_is_peeking() -> bool:
    """Returns whether Keras is building a model from the first batch."""
    return _frame_of(keras_trainer.TensorFlowTrainer._maybe_symbolic_build) is not None


def keras_epochs_to_distribute() -> keras_epoch_iterator.EpochIterator | None:
    """Returns the Keras `EpochIterator` that is being created and distributes its dataset, for `fit` or another loop.

    Without it: workers with unequal numbers of batches fail within an epoch, with an error of TensorFlow's collectives.
    """
    frame = _frame_of(keras_trainer.TFEpochIterator.__init__)
    return frame.f_locals.get("self") if frame else None


def keras_loop_to_distribute() -> str | None:
    """Returns the Keras loop that distributes a dataset: "fit", "evaluate" or "predict".

    Without it: `predict` on data that workers do not share returns rows in an unknown order.
    """
    frame = _frame_of(keras_trainer.TFEpochIterator.__init__)
    return frame.f_back.f_code.co_name if frame and frame.f_back else None


def count_steps_of(epochs: keras_epoch_iterator.EpochIterator, dataset: Any) -> None:
    """Makes a Keras `EpochIterator` take as many steps as a distributed dataset has batches.

    Keras counts the batches before the strategy distributes them. Without it: if each worker reads its own data, an
    epoch ends before the data ends.
    """
    epochs.data_adapter = TFDatasetAdapter(dataset)
    epochs._num_batches = epochs.data_adapter.num_batches


def end_when_all_have_ended(dataset: Any) -> None:
    """Makes a distributed dataset end when no worker has data left.

    TensorFlow treats the cardinality of `shard(SHARD_HINT, SHARD_HINT)` as infinite, so it does not check for the end.
    Without it: a worker with more data waits for its peers forever.
    """
    dataset._enable_get_next_as_optional = True


def keras_made_dataset() -> bool:
    """Returns whether Keras distributes a dataset that it created from arrays or a generator, not a user's dataset."""
    adapter = getattr(keras_epochs_to_distribute(), "data_adapter", None)
    return adapter is not None and not isinstance(adapter, TFDatasetAdapter)


def keras_epochs_of_iterator() -> keras_epoch_iterator.EpochIterator | None:
    """Returns the Keras `EpochIterator` that called the calling `__iter__`; `None` if a user did, as in a callback."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_globals.get("__name__") == keras_epoch_iterator.__name__ else None


def keras_model_to_build() -> keras_trainer.TensorFlowTrainer | None:
    """Returns the model that Keras builds before its first step, if Keras called the caller to get the scope for that.

    Keras does this under strategies only. Without it: models without a `call`, and losses that get their targets only
    in a step, train on one device but fail here.
    """
    frame = sys._getframe(2)
    builds = frame.f_code is keras_trainer.TensorFlowTrainer._maybe_symbolic_build.__code__
    return frame.f_locals["self"] if builds else None


def runtime_has_started() -> bool:
    """Returns whether TensorFlow has initialized its devices, after which it can join no cluster.

    Without it: a strategy created too late raises a RuntimeError that names neither the strategy nor a remedy.
    """
    return context.context()._context_handle is not None


class BeginningFit(NamedTuple):
    """Arguments of a `fit`.

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
    frame = _frame_of(keras_trainer.TensorFlowTrainer._maybe_symbolic_build)
    caller = frame and frame.f_back
    if caller is None or caller.f_code is not inspect.unwrap(keras_trainer.TensorFlowTrainer.fit).__code__:
        return None
    given = caller.f_locals
    callbacks = tf.nest.flatten(getattr(given.get("callbacks"), "callbacks", given.get("callbacks")) or [])
    validates = "no validation_data" if given.get("validation_data") is None else "validation_data"
    return BeginningFit(list(callbacks), [*(f"{name}={given.get(name)}" for name in _LENGTHS), validates])


def epochs_of_beginning_fit() -> keras_epoch_iterator.EpochIterator | None:
    """Returns the `EpochIterator` of a starting `fit`; see `beginning_fit`.

    Without it: workers at different positions in the data train on, and read examples twice or never.
    """
    frame = _frame_of(keras_trainer.TensorFlowTrainer._maybe_symbolic_build)
    return frame.f_locals.get("iterator") if frame else None


def keras_makes_for_comparison() -> bool:
    """Returns whether Keras creates an object only to list its attributes, while Keras saves another object."""
    return _frame_of(get_attr_skipset) is not None


def make_iterators_on_devices_anew(iterator: Any, change: Callable[[Any], Any]) -> None:
    """Replaces the iterators on the devices of a distributed iterator that has not been read yet.

    For each device TensorFlow creates a dataset that reads from the host's dataset, but without the host's options.

    Args:
      iterator: An eager iterator of a distributed dataset.
      change: Function that converts the dataset of a device.
    """
    for of_worker in iterator._iterators:
        shared = of_worker._iterator
        if isinstance(shared, OwnedMultiDeviceIterator):
            for place, device in enumerate(shared._devices):
                with context.device(device):
                    shared._device_iterators[place] = iter(change(shared._device_iterators[place]._dataset))


def end_together(dataset: DistributedDatasetsFromFunction) -> DistributedDatasetsFromFunction:
    """Lets workers read a distributed dataset that ends in the same step on all workers without an exchange per step.

    By default its iterators sum up, before each step, the number of workers that have data left. They still do so in
    `get_next_as_optional`, for several steps in one call or loops in a graph. Without it: that exchange comes back.
    """
    dataset._enable_get_next_as_optional = False
    return dataset


def _counted(name: str) -> Callable[..., "CountedDataset"]:
    def method(self: "CountedDataset", *args: Any, **options: Any) -> "CountedDataset":
        return CountedDataset(getattr(tf.data.Dataset, name)(self, *args, **options), self._batches)

    return method


class CountedDataset(UnaryUnchangedStructureDataset):
    """A dataset with a declared number of elements, which `map` and similar methods keep.

    TensorFlow's `assert_cardinality` would raise for fewer elements. Without it: when Keras maps a dataset for
    `class_weight`, Keras loses the length of an epoch and takes a step too many.

    Args:
      dataset: A dataset of unknown cardinality.
      batches: Largest number of elements of the dataset.
    """

    def __init__(self, dataset: tf.data.Dataset, batches: int):
        super().__init__(dataset, dataset._variant_tensor)
        self._batches = batches

    def cardinality(self) -> tf.Tensor:
        """Returns the declared number of elements."""
        return tf.constant(self._batches, tf.int64)

    map, prefetch, with_options = _counted("map"), _counted("prefetch"), _counted("with_options")
    cache, enumerate, scan, shuffle = _counted("cache"), _counted("enumerate"), _counted("scan"), _counted("shuffle")


class CountingIterator(DistributedIterator):
    """A distributed iterator that reports each batch read. Without it: a look at the data counts as a whole epoch.

    Args:
      iterator: The iterator to replace.
      on_batch: Called after each batch that Python code has read.
      on_graph: Called when a graph receives the iterator. The batches that a graph reads are not reported.
    """

    def __init__(self, iterator: DistributedIterator, on_batch: Callable[[], None], on_graph: Callable[[], None]):
        self._on_batch, self._on_graph = on_batch, on_graph
        super().__init__(
            iterator._input_workers,
            strategy=iterator._strategy,
            components=iterator._iterators,
            element_spec=iterator._element_spec,
            cardinality=iterator._cardinality,
            enable_get_next_as_optional=iterator._enable_get_next_as_optional,
            options=iterator._options,
            replica_order=iterator._replica_order,
        )

    def get_next(self, name: str | None = None) -> Any:
        """Returns the next batches, one for each replica."""
        if not context.executing_eagerly():
            self._on_graph()
            return super().get_next(name)
        batch = super().get_next(name)
        self._on_batch()
        return batch

    def get_next_as_optional(self) -> Any:
        """Returns the next batches as an Optional."""
        self._on_graph()
        return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:
        self._on_graph()  # Requested only if the iterator is in an argument of a function.
        return super()._type_spec


class NotedIterator(DistributedIterator):
    """A distributed iterator that tells its strategy when a batch is requested, in Python or in a graph.

    Without it: a worker that waits for its input looks like a worker that traces its step.

    Args:
      iterator: The iterator to replace.
    """

    def __init__(self, iterator: DistributedIterator):
        super().__init__(
            iterator._input_workers,
            strategy=iterator._strategy,
            components=iterator._iterators,
            element_spec=iterator._element_spec,
            cardinality=iterator._cardinality,
            enable_get_next_as_optional=iterator._enable_get_next_as_optional,
            options=iterator._options,
            replica_order=iterator._replica_order,
        )

    def get_next(self, name: str | None = None) -> Any:
        """Returns the next batches, one for each replica."""
        with self._strategy.reports.reading():
            return super().get_next(name)

    def get_next_as_optional(self) -> Any:
        """Returns the next batches as an Optional."""
        with self._strategy.reports.reading():
            return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:
        return _NotedIteratorSpec(
            *(self._input_workers, self._element_spec, self._strategy, self._options, self._cardinality),
            *(self._enable_get_next_as_optional, self._replica_order),
        )


class _NotedIteratorSpec(DistributedIteratorSpec):
    """The spec that creates a `NotedIterator` in a graph."""

    @property
    def value_type(self) -> Any:
        return NotedIterator

    def _from_components(self, components: Any) -> Any:
        return NotedIterator(super()._from_components(components))


def keras_model_in_compile() -> keras_trainer.TensorFlowTrainer | None:
    """Returns the model that runs Keras' `compile` in this thread.

    Without it: workers train different models, created outside the scope, and no error appears before the end.
    """
    frame = _frame_of(inspect.unwrap(keras_trainer.TensorFlowTrainer.compile))
    return frame and frame.f_locals["self"]


def is_made_in_scope(model: keras_trainer.TensorFlowTrainer) -> bool:
    """Returns whether a model was created in a strategy's scope. That strategy trains it, wherever it is compiled.

    Without it: a model created in a `OneDeviceStrategy` scope and compiled outside that scope is refused.
    """
    return model._distribute_strategy is not None


def is_in_creator_scope() -> bool:
    """Returns whether this thread is inside a `tf.variable_creator_scope`, as in the scope of a strategy.

    Without it: a strategy created in such a scope enters another scope that is never left, and TensorFlow raises.
    """
    return bool(tf.compat.v1.get_default_graph()._variable_creator_stack)


def keras_model_in_step() -> keras_trainer.TensorFlowTrainer | None:
    """Returns the model that `fit` trains in this thread; `None` in its callbacks and validation."""
    trainer = keras_trainer.TensorFlowTrainer
    fit, *others = (inspect.unwrap(method).__code__ for method in (trainer.fit, trainer.evaluate, trainer.predict))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not fit:
        if frame.f_code in others or frame.f_globals.get("__name__") == keras_callback_list.__name__:
            return None
        frame = frame.f_back
    return frame and frame.f_locals["self"]


class KerasCall(NamedTuple):
    """A running `fit`, `evaluate` or `predict`.

    Attributes:
      name: Name of the method.
      model: Model that runs the method.
      epochs: `EpochIterator` that the call reads. Only the call keeps a reference to it.
      callbacks: Callback list of the call, once it exists.
    """

    name: str
    model: keras_trainer.TensorFlowTrainer
    epochs: keras_epoch_iterator.EpochIterator
    callbacks: keras.callbacks.CallbackList | None


def keras_calls() -> list[KerasCall]:
    """Returns the running calls of Keras in this thread, innermost first. A `fit` includes its validation.

    Without it: the watchdog does not know which call a worker is in.
    """
    trainer = keras_trainer.TensorFlowTrainer
    codes = {inspect.unwrap(getattr(trainer, name)).__code__: name for name in ("fit", "evaluate", "predict")}
    calls: list[KerasCall] = []
    made = keras_epochs_to_distribute()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = codes.get(frame.f_code)
        if name is not None and not frame.f_locals.get("use_cached_eval_dataset"):
            epochs = frame.f_locals.get("epoch_iterator", made)
            if epochs is not None:
                callbacks = frame.f_locals.get("callbacks")
                has_list = isinstance(callbacks, keras.callbacks.CallbackList)
                calls.append(KerasCall(name, frame.f_locals["self"], epochs, callbacks if has_list else None))
        frame = frame.f_back
    return calls


def keras_is_evaluating() -> bool:
    """Returns whether Keras' `evaluate` or `predict` runs in this thread, also inside a `fit`."""
    trainer = keras_trainer.TensorFlowTrainer
    return any(_frame_of(inspect.unwrap(method)) for method in (trainer.evaluate, trainer.predict))


def keras_is_predicting() -> bool:
    """Returns whether Keras' `predict` runs in this thread."""
    return _frame_of(inspect.unwrap(keras_trainer.TensorFlowTrainer.predict)) is not None


def keras_spec_to_predict() -> Any:
    """Returns the element spec on one replica of the dataset of Keras' `predict`; `None` if there is no dataset.

    Without it: workers trace `predict` on batches of different lengths, and only some workers exchange the lengths.
    """
    frame = _frame_of(inspect.unwrap(keras_trainer.TensorFlowTrainer.predict))
    dataset = dataset_of(frame and frame.f_locals.get("epoch_iterator"))
    return tf.nest.map_structure(spec_on_a_replica, getattr(dataset, "element_spec", None))


def spec_on_a_replica(spec: Any) -> Any:
    """Converts the spec of a distributed dataset to the spec on the first replica.

    Without it: `fit` on several devices reads a batch to learn its shapes.
    """
    return spec._component_specs[0] if isinstance(spec, PerReplicaSpec) else spec


def calls_of_threads() -> dict[int, list[tuple[str, int, str]]]:
    """Returns the stack of each thread, innermost call first: file, line, function. For a process about to end.

    Reading the frames of a running thread is unsafe: creating a frame object can start a garbage collection. There, a
    finalizer may let the other thread run on, and its frame is gone. So the garbage collector is off meanwhile.
    faulthandler is no alternative: in CPython 3.11 it reads the list of threads without its lock, while threads of
    TensorFlow enter Python.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return {
            ident: [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(innermost)]
            for ident, innermost in sys._current_frames().items()
        }
    finally:
        if was_enabled:
            gc.enable()


def keras_call_name() -> str | None:
    """Returns the name of the innermost call of Keras in this thread that runs a model.

    Without it: a worker that waits for peers in `train_on_batch`, outside its step, seems to be in no call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_call_of_keras(frame.f_code.co_filename, frame.f_code.co_name):
            return frame.f_code.co_name
        frame = frame.f_back
    return None


def is_call_of_keras(file: str, function: str) -> bool:
    """Returns whether a function is Keras' `fit` or another call that runs a model; see `calls_of_threads`."""
    return file == keras_trainer.__file__ and function in _KERAS_CALLS


_KERAS_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def keras_fitting_models() -> list[keras_trainer.TensorFlowTrainer]:
    """Returns the models that run Keras' `fit` in this thread, innermost first."""
    code, models = inspect.unwrap(keras_trainer.TensorFlowTrainer.fit).__code__, []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            models.append(frame.f_locals["self"])
        frame = frame.f_back
    return models


def datasets_of_worker(distributed: Any) -> list[Any]:
    """Returns the datasets that a distributed dataset reads on this worker.

    Without it: in a `fit` on a dataset that the user distributed, a replica without rows computes on zeros.
    """
    return list(getattr(distributed, _place_of_datasets(distributed)))


def set_datasets_of_worker(distributed: Any, datasets: list[Any]) -> None:
    """Replaces the datasets of a distributed dataset by `datasets` with equal specs; see `datasets_of_worker`."""
    setattr(distributed, _place_of_datasets(distributed), datasets)


def _place_of_datasets(distributed):
    return "_cloned_datasets" if isinstance(distributed, DistributedDataset) else "_datasets"


def call_in_step(callbacks) -> None:
    """Makes a Keras `CallbackList` call its callbacks within the step.

    If `fit` gets a single callback and no list, Keras does not see that the callback needs this, and calls the callback
    in another thread. Without it: such a BackupAndRestore saves variables of a later step, or of half a step.
    """
    callbacks._async_train = False


def goes_on_with(epochs, iterator) -> bool:
    """Returns whether the next epoch of a Keras `EpochIterator` continues `iterator`, not a new iterator.

    Without it: a backup made at the end of the input records that all input was read, and a new `fit` finds none left.
    """
    return epochs._current_iterator is iterator


def dataset_of(epochs):
    """Returns the distributed dataset of a Keras `EpochIterator`, or `None`.

    Without it: two shardings with equal global batches in one `fit` may receive each other's position.
    """
    return getattr(epochs, "_distributed_dataset", None)


def datasets_read_by(dataset: Any) -> list[Any]:
    """Returns a dataset and its direct and indirect inputs, except datasets that only its functions use.

    Without it: workers that each read a whole sharding train on the same rows without any error.
    """
    found, waiting = {}, [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += each._inputs() if isinstance(each, tf.data.Dataset) else []
    return list(found.values())


def graphs_of_dataset_functions(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the graphs of the functions that one stage of a dataset calls.

    Without it: workers cannot tell whether rows differ because of random operations or because of other data.
    """
    return [wrapper.function.graph for wrapper in dataset._functions()]


def maps_elements(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset stage maps each element to one element; see `graphs_of_dataset_functions`."""
    return type(dataset).__name__ in ("_MapDataset", "_ParallelMapDataset")


def keras_purpose() -> str:
    """Returns the purpose of a dataset that Keras distributes: "fit", "validation", "evaluate" or "predict".

    Without it: errors about unequal data do not name the call, and validation data is compared in each epoch.
    """
    trainer = keras_trainer.TensorFlowTrainer
    codes = {inspect.unwrap(getattr(trainer, name)).__code__: name for name in ("fit", "evaluate", "predict")}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    if frame is None:
        return "fit"
    name = codes[frame.f_code]
    return "validation" if name == "fit" and "epoch_iterator" in frame.f_locals else name


def keras_reader() -> keras_trainer.TensorFlowTrainer | None:
    """Returns the model that runs the `fit`, `evaluate` or `predict` that distributes a dataset.

    Without it: for unequal models on workers, `predict` raises an error of TensorFlow, or no error at all.
    """
    trainer = keras_trainer.TensorFlowTrainer
    codes = {inspect.unwrap(method).__code__ for method in (trainer.fit, trainer.evaluate, trainer.predict)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame and frame.f_locals["self"]


def keras_source(epochs: keras_epoch_iterator.EpochIterator) -> str:
    """Returns the source of a Keras `EpochIterator`: "arrays", a user's "dataset", or a user's "python" code.

    Without it: see `graphs_of_dataset_functions`.
    """
    if isinstance(epochs.data_adapter, TFDatasetAdapter):
        return "dataset"
    return "arrays" if isinstance(epochs.data_adapter, ArrayDataAdapter) else "python"


def count_as_seen(epochs, batches: int) -> None:
    """Adds batches that other code read from a Keras `EpochIterator`'s iterator to its count.

    Without it: a `fit` that resumes in the middle of its input does not start the input again at its end.
    """
    epochs._steps_seen += batches


def deciding_loss_scaler():
    """Returns the loss scaler that found this replica's gradients finite and now applies them, or `None`."""
    frame = _frame_of(LossScaleOptimizer._stateful_handle_finite_grads)
    return None if frame is None else frame.f_locals["self"]


def variables_of_summed_gradients() -> list[Any]:
    """Returns the variables of the gradients that a plain Keras optimizer exchanges now, in order, or an empty list."""
    frame = _frame_of(TFOptimizer._all_reduce_sum_gradients)
    return [] if frame is None else [variable for _, variable in frame.f_locals["filtered_grads_and_vars"]]


def is_called_by_library() -> bool:
    """Returns whether the caller was called from TensorFlow, Keras or tfdist, and not from a user's code.

    Without it: a user's step that divides a sum over replicas by the number of replicas is not refused.
    """
    module = sys._getframe(2).f_globals.get("__name__", "")
    if module.startswith("tensorflow.python.autograph"):  # Runs a user's code.
        return False
    return module.split(".")[0] in ("keras", "tensorflow", "tfdist")


def is_recorded() -> bool:
    """Returns whether a `tf.GradientTape` records this thread, so that it may differentiate gradients taken now again.

    Without it: a gradient penalty on exchanged values is weighted twice if replicas have unequal numbers of rows.
    """
    return record.could_possibly_record()


def bodies_of_call(operation: tf.Operation) -> list[Any]:
    """Returns the graph of the function that an operation calls, or the graphs of its two branches.

    Without it: losses and layers that are a `tf.function` are treated as means.
    """
    names = ("then_branch", "else_branch") if "If" in operation.type else ("f",)
    functions = [operation.graph._get_function(operation.get_attr(name).name) for name in names]
    graphs = [getattr(function, "graph", None) for function in functions]
    return [] if any(graph is None for graph in graphs) else graphs


def tf_keras_exchanges_gradients() -> bool:
    """Returns whether an optimizer of tf_keras sums up its gradients now.

    Without it: `compression` has no effect on models of tf_keras, and no error says so.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "all_reduce_sum_gradients" and frame.f_globals["__name__"].startswith("tf_keras."):
            return True
        frame = frame.f_back
    return False


def places_in_optimizer(optimizer: Any, variables: Any) -> list[int]:
    """Returns the indices of variables in an optimizer, or an empty list if it only wraps the optimizer that owns them.

    Without it: lists of variables with equal shapes would share residuals.
    """
    try:
        return [optimizer._get_variable_index(variable) for variable in variables]
    except KeyError:
        return []


def _frame_of(function: Any) -> FrameType | None:
    """Returns the innermost running call of `function` in this thread, or `None`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


def python_function_of(function: Function, owner: Any) -> Any:
    """Returns the Python function of a `tf.function` or method of `owner`, with `if`s and loops converted by AutoGraph.

    TensorFlow wraps a method in decorators that call a stand-in for the method's object. Without it: a `train_step`
    under `tf.function` is traced once for all replicas.
    """
    _, original = tf_decorator.unwrap(function.python_function)
    plain = getattr(original, "__func__", original)
    try:
        converted = autograph.to_graph(plain)
    except autograph.ConversionError:  # No source, as in a Python prompt. `tf.function` does not convert it either.
        converted = plain
    return MethodType(converted, owner) if inspect.ismethod(original) else converted


def clone_function(function: Function, python_function) -> Function:
    """Returns a `tf.function` of another Python function, with the options of `function`.

    Without it: a step that is a `tf.function` is traced with TensorFlow's own replica code, outside of ours.
    """
    return function._clone(python_function=python_function)


def set_cardinality(dataset, batches: int) -> None:
    """Corrects the number of batches of a distributed dataset, which is also the number of steps of Keras' `fit`.

    A dataset made from a function knows only the batches of its own worker. Without it: a worker with fewer batches
    leaves `fit` before its peers.
    """
    dataset._cardinality = batches
