"""The one file that imports private names of TensorFlow and Keras.

Each line says why the name is needed and what breaks if it goes. `setup.cfg` bounds the versions to those tested.
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

# Strategies extend these two; `tf.distribute` exports the strategies but not their `extended` halves. Without them
# there is no subclass to write.
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# The collectives of both strategies; we subclass it to choose keys and buckets. Without it: write the raw ops by hand.
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

# The options object behind the public `tf.distribute.experimental.CommunicationOptions`, with its `merge`.
from tensorflow.python.distribute.collective_util import Options as CommunicationOptions

# The variables of a mirrored strategy; we subclass them to say what an update on one replica does. Without them:
# BatchNormalization statistics and random layers are wrong on several replicas.
# `PerReplicaSpec` says what a dataset gives to each replica; without it shapes are learnt by reading a batch.
from tensorflow.python.distribute.values import MirroredVariable, PerReplicaSpec, SyncOnReadVariable

# What a strategy makes of a dataset function; Keras takes nothing else of a foreign class. Without it: `fit` refuses a
# BalancedSharding. And its iterators; see `CountingIterator`. And what it makes of a dataset. Without it: a `fit` on a
# dataset that the user distributed under AutoShardPolicy.OFF ends early.
from tensorflow.python.distribute.input_lib import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedIterator,
    DistributedIteratorSpec,
)
from tensorflow.python.distribute import input_lib

# What the replicas of a worker take their batches from; see `make_iterators_on_devices_anew`. Without it: the end of an
# epoch may wait for TensorFlow's tuner.
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

# What a dataset of the same elements is; see `CountedDataset`.
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

# Makes values of all replicas out of lists of one for each. Without it: no compression in eager steps.
from tensorflow.python.distribute.distribute_utils import regroup

# Which replica a thread is tracing; public API gives a tensor, a Python number is needed to pick a launcher.
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int

# Autograph's status must be carried over to a user's step function before we wrap it, as `strategy.run` itself does.
# Without these two: Python `if` on tensors inside a custom loop's step function is not converted.
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import tf_convert

# A method under `tf.function` is wrapped; see `python_function_of`.
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.util import tf_decorator

# `tf.function` objects given to `strategy.run` are traced again inside it. Without it: no detection of them.
from tensorflow.python.eager.def_function import Function

# Cluster registration deadline and heartbeats are set on the context before a strategy is made; the message type that
# names the jobs lives here. Without them: a worker that never starts is waited for without end.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.distribute import multi_worker_util

# Whether a graph is compiled by XLA, where the CPU has no collectives. Without it: TensorFlow's own, unclear error.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# What is traced inside a `tf.while_loop`. Without it: an exchange in a loop waits for ever on several devices.
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph, WhileCondFuncGraph

# Whether `tf.config.experimental.enable_op_determinism` was called, which bars timestamps. Without it: `fit` fails.
from tensorflow.python.framework.config import is_op_determinism_enabled

# Keras says by its name scopes which object makes a variable (an optimizer, a seed generator). Without it: optimizer
# state is taken for layer statistics and averaged needlessly, and random layers are equal on all replicas.
from keras.src.backend.common import global_state

# Keras' exchange of gradients, to know whose they are. Without it: custom loops whose replicas know unlike much of the
# shapes of their batches exchange unlike buckets, and abort or wait for ever.
from keras.src.backend.tensorflow.optimizer import TFOptimizer

# Keras' loss scaler enters the exchange of gradients from one of its branches; its code tells it from others. Without
# it: a custom loop in which one replica overflows waits for ever instead of failing.
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

# What unseeded random operations draw from. Without it: they draw anew after a restore.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

# Whether a tape records; see `is_recorded`.
from tensorflow.python.eager import record

# The module of Keras' `fit`, to know its calls of the strategy from a user's. Without it: one batch a `fit` and
# `evaluate` crosses the network, generators lose batches, and vector metrics are collapsed in the logs of batches.
from keras.src.backend.tensorflow import trainer as keras_trainer

# What makes the iterators of `fit`, to tell them from a user's. If that moves, a BalancedSharding takes all for a
# user's: shares stay as they are, and an evaluation moves the position.
from keras.src.trainers import epoch_iterator as keras_epoch_iterator

# What Keras wraps a user's dataset in, to tell it from those of its own making. Without it: `fit` on arrays returns a
# minute late, or a user's pipeline is not tuned.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

# Makes an optimizer on each save, to learn which attributes all optimizers have. Without it: a save on the chief alone
# inside the scope waits for the other workers, which have no such optimizer to make.
from keras.src.saving.saving_lib import get_attr_skipset

# The mask that layers attach to an output. Without it: masked losses are means over each replica's unmasked places.
from keras.src.backend.common.masking import get_keras_mask

# Its code runs all callbacks. Without it: a callback that takes minutes, say to save, is taken for a stuck step.
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
    """What `compile` made of metrics and losses, so far as it has not been matched with outputs yet."""
    compiled = (model._compile_metrics, model._compile_loss)
    return [each for each in compiled if each is not None and not each.built]


def match_anew(compiled: list[Any]) -> None:
    """Has Keras match metrics and losses with the outputs of the next call.

    Without it: those that Keras has tried without targets lack some in the logs, or fail.
    """
    for each in compiled:
        each.built = False
        each.metrics.clear()  # A loss has a list of its own; metrics that are not matched have none.


class ReplacedLosses:
    """Has the losses that `compile` was given called as `loss(one)`, until they are put back.

    What keeps the means of single ones for the logs is told of new ones by `update(its update_state)`. Without it:
    losses that are masked, summed or weighted, or are numbers, differ from those of one device.
    """

    def __init__(self, model: keras.Model, loss: Any, update: Any):
        self._compiled, self._loss, self._update = model._compile_loss, loss, update
        self._before: list[Any] | None = None
        if self._compiled is None:
            return
        if self._compiled.built:
            self._replace()
        else:  # Keras matches losses and outputs at the first call.
            self._build, self._compiled.build = self._compiled.build, self._build_and_replace

    def put_back(self) -> None:
        """Undoes it."""
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
    """All layers of a model, those within others too. Without it: unlike layers are not named before the first step."""
    return list(model._flatten_layers(include_self=False))


def kept_losses(model: keras_trainer.TensorFlowTrainer) -> list[tuple[Any, list]]:
    """What `add_loss` has gathered in each layer of a model. Without it: a regularizer is lost, or counted twice."""
    return [(layer, layer._losses[:]) for layer in model._flatten_layers()]


def put_losses_back(kept: list[tuple[Any, list]]) -> None:
    """Undoes what others have added and cleared since `kept_losses`."""
    for layer, losses in kept:
        layer._losses[:] = losses


def called_by_keras_trainer() -> bool:
    """Whether the function that asks was called from the module of Keras' `fit`."""
    return sys._getframe(2).f_globals.get("__name__") == keras_trainer.__name__


def called_by_iterator() -> bool:
    """Whether the function that asks was called from the module of distributed iterators.

    Without it: a worker that waits for the input of another is taken for one that waits for its own.
    """
    return sys._getframe(2).f_globals.get("__name__") == input_lib.__name__


def calling_trainer() -> keras_trainer.TensorFlowTrainer | None:
    """The model whose step the module of Keras' `fit` calls, if that called the function that asks."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_globals.get("__name__") == keras_trainer.__name__ else None


def keras_callers() -> list:
    """The Keras objects whose name scopes are open, innermost first."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in reversed(stack) if scope.caller is not None]


def counter_of(optimizer: Any) -> Any:
    """The variable in which an optimizer counts its calls; views of an optimizer share it.

    Without it: of one that accumulates gradients each look gives another tensor, and residuals are lost.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    counter = optimizer.iterations
    return counter if isinstance(counter, keras.Variable | tf.Variable) else optimizer._iterations


def keras_variable_made_late() -> keras.Variable | None:
    """The Keras variable whose `tf.Variable` is made only now, as its maker asked for it while shapes were traced.

    Without it: layers of models that `fit` builds are not told from each other, so statistics are not averaged.
    """
    frame = _frame_of(keras.Variable._deferred_initialize)
    return None if frame is None else frame.f_locals["self"]


def keras_variable_being_made() -> keras.Variable | None:
    """The Keras variable whose `tf.Variable` is being made. Without it: shapes of unlike variables are not named."""
    frame = _frame_of(keras.Variable._initialize)
    return None if frame is None else frame.f_locals["self"]


def has_global_seed_generator() -> bool:
    """Whether an unseeded random operation of Keras has been called; it makes the generator."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None


def set_global_seed_generator(generator) -> None:
    """Lets this thread's unseeded random operations draw from `generator`; Keras has one for each thread."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def keras_is_peeking() -> bool:
    """Whether Keras asks on its way to build a model from the first batch."""
    return _frame_of(keras_trainer.TensorFlowTrainer._maybe_symbolic_build) is not None


def keras_epochs_to_distribute() -> keras_epoch_iterator.EpochIterator | None:
    """What of Keras asks for the distribution of a dataset, as a `fit` begins or another of its loops.

    Without it: workers that read unlike numbers of batches fail amid an epoch, in words of TensorFlow's collectives.
    """
    frame = _frame_of(keras_trainer.TFEpochIterator.__init__)
    return frame.f_locals.get("self") if frame else None


def keras_loop_to_distribute() -> str | None:
    """Which loop of Keras asks for the distribution of a dataset: "fit", "evaluate" or "predict".

    Without it: `predict` on data that workers do not share returns rows in an order that nobody knows.
    """
    frame = _frame_of(keras_trainer.TFEpochIterator.__init__)
    return frame.f_back.f_code.co_name if frame and frame.f_back else None


def count_steps_of(epochs: keras_epoch_iterator.EpochIterator, dataset: Any) -> None:
    """Lets a Keras `EpochIterator` take as many steps as a distributed dataset has batches.

    Keras counts the batches before the strategy distributes them. Without it: where each worker reads its own data,
    an epoch ends before these end.
    """
    epochs.data_adapter = TFDatasetAdapter(dataset)
    epochs._num_batches = epochs.data_adapter.num_batches


def end_when_all_have_ended(dataset: Any) -> None:
    """Lets a distributed dataset end when no worker has data left.

    TensorFlow takes the cardinality of `shard(SHARD_HINT, SHARD_HINT)` for infinite, and then does not ask. Without it:
    a worker with more data waits for the others without end.
    """
    dataset._enable_get_next_as_optional = True


def keras_made_dataset() -> bool:
    """Whether Keras is handing over a dataset of its own making, of arrays or a generator, and not the user's."""
    adapter = getattr(keras_epochs_to_distribute(), "data_adapter", None)
    return adapter is not None and not isinstance(adapter, TFDatasetAdapter)


def keras_epochs_of_iterator() -> keras_epoch_iterator.EpochIterator | None:
    """What of Keras makes the iterator that `__iter__`, which asks, gives; `None` if a user does within a callback."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_globals.get("__name__") == keras_epoch_iterator.__name__ else None


def keras_model_to_build() -> keras_trainer.TensorFlowTrainer | None:
    """The model that Keras builds before its first step, if it does so in what the function that asks gives.

    Keras does this under strategies only. Without it: models without a `call`, and losses of which only a step knows
    the targets, train on one device and fail here.
    """
    frame = sys._getframe(2)
    builds = frame.f_code is keras_trainer.TensorFlowTrainer._maybe_symbolic_build.__code__
    return frame.f_locals["self"] if builds else None


def runtime_has_started() -> bool:
    """Whether TensorFlow has its devices, and can join no cluster any more.

    Without it: a strategy that is made too late raises a RuntimeError that names neither it nor what to do.
    """
    return context.context()._context_handle is not None


class BeginningFit(NamedTuple):
    """What a `fit` was given.

    Attributes:
      callbacks: As a list.
      arguments: How long it is, and when it validates: each as "name=value".
    """

    callbacks: list[keras.callbacks.Callback]
    arguments: list[str]


_LENGTHS = ("epochs", "initial_epoch", "steps_per_epoch", "validation_freq", "validation_steps")


def beginning_fit() -> BeginningFit | None:
    """What a `fit` was given, if Keras asks for the scope in which it builds a model on its way into one; else `None`.

    Without it: workers whose models have come apart between two fits train on, each its own; those that have unlike
    numbers of epochs wait for each other; and nobody is told of callbacks that write over each other.
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
    """What a `fit` reads, if Keras asks for the scope in which it builds a model; see `beginning_fit`.

    Without it: workers at other positions in their data train on, and take examples twice or never.
    """
    frame = _frame_of(keras_trainer.TensorFlowTrainer._maybe_symbolic_build)
    return frame.f_locals.get("iterator") if frame else None


def keras_makes_for_comparison() -> bool:
    """Whether Keras makes an object only to see what attributes its kind has, as it does to save another."""
    return _frame_of(get_attr_skipset) is not None


def make_iterators_on_devices_anew(iterator: Any, change: Callable[[Any], Any]) -> None:
    """Gives a distributed iterator, from which nobody has read, other parts on its devices.

    TensorFlow makes a dataset for each device that takes from the one on the host, without its options.

    Args:
      iterator: Of a distributed dataset, made eagerly.
      change: What makes another dataset of a device's.
    """
    for of_worker in iterator._iterators:
        shared = of_worker._iterator
        if isinstance(shared, OwnedMultiDeviceIterator):
            for place, device in enumerate(shared._devices):
                with context.device(device):
                    shared._device_iterators[place] = iter(change(shared._device_iterators[place]._dataset))


def end_together(dataset: DistributedDatasetsFromFunction) -> DistributedDatasetsFromFunction:
    """Lets a distributed dataset, which ends in the same step on all workers, be read without asking them.

    By itself its iterators sum up over all workers, before each step, how many have data left, and still do for
    `get_next_as_optional`: several steps in one call, loops in a graph. If the name goes, that exchange comes back.
    """
    dataset._enable_get_next_as_optional = False
    return dataset


def _counted(name: str) -> Callable[..., "CountedDataset"]:
    def method(self: "CountedDataset", *args: Any, **options: Any) -> "CountedDataset":
        return CountedDataset(getattr(tf.data.Dataset, name)(self, *args, **options), self._batches)

    return method


class CountedDataset(UnaryUnchangedStructureDataset):
    """A dataset that says how many elements it has, as does what `map` and its like make of it.

    `assert_cardinality` raises where there are fewer. Without it: Keras, which maps a dataset for `class_weight`, does
    not know the length of an epoch and takes a step too many.

    Args:
      dataset: Of unknown cardinality.
      batches: How many elements it has, at most.
    """

    def __init__(self, dataset: tf.data.Dataset, batches: int):
        super().__init__(dataset, dataset._variant_tensor)
        self._batches = batches

    def cardinality(self) -> tf.Tensor:
        """As given."""
        return tf.constant(self._batches, tf.int64)

    map, prefetch, with_options = _counted("map"), _counted("prefetch"), _counted("with_options")
    cache, enumerate, scan, shuffle = _counted("cache"), _counted("enumerate"), _counted("scan"), _counted("shuffle")


class CountingIterator(DistributedIterator):
    """A distributed iterator that says when a batch is taken from it. Without it: a look at the data is an epoch of it.

    Args:
      iterator: Another, which it takes the place of.
      on_batch: Called after each batch that Python has taken.
      on_graph: Called when a graph is given the iterator, and takes batches that nobody sees.
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
        """The next batches, one for each replica."""
        if not context.executing_eagerly():
            self._on_graph()
            return super().get_next(name)
        batch = super().get_next(name)
        self._on_batch()
        return batch

    def get_next_as_optional(self) -> Any:
        """The same as an Optional."""
        self._on_graph()
        return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:
        self._on_graph()  # Only asked for where it is an argument of a function, or a part of one.
        return super()._type_spec


class NotedIterator(DistributedIterator):
    """A distributed iterator that tells its strategy when a batch is asked of it, in Python or in a graph.

    Without it: a worker that waits for its input cannot be told from one that traces its step.

    Args:
      iterator: Another, which it takes the place of.
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
        """The next batches, one for each replica."""
        with self._strategy.reports.reading():
            return super().get_next(name)

    def get_next_as_optional(self) -> Any:
        """The same as an Optional."""
        with self._strategy.reports.reading():
            return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:
        return _NotedIteratorSpec(
            *(self._input_workers, self._element_spec, self._strategy, self._options, self._cardinality),
            *(self._enable_get_next_as_optional, self._replica_order),
        )


class _NotedIteratorSpec(DistributedIteratorSpec):
    """Makes a `NotedIterator` of the iterator in a graph."""

    @property
    def value_type(self) -> Any:
        return NotedIterator

    def _from_components(self, components: Any) -> Any:
        return NotedIterator(super()._from_components(components))


def keras_model_in_compile() -> keras_trainer.TensorFlowTrainer | None:
    """The model whose Keras `compile` is under way in this thread.

    Without it: workers train models of their own, made outside of the scope, and nobody is told before the end.
    """
    frame = _frame_of(inspect.unwrap(keras_trainer.TensorFlowTrainer.compile))
    return frame and frame.f_locals["self"]


def is_made_in_scope(model: keras_trainer.TensorFlowTrainer) -> bool:
    """Whether a Keras model was made inside the scope of a strategy, which then trains it wherever it is compiled.

    Without it: a model that was made in a `OneDeviceStrategy` scope and compiled after it is refused.
    """
    return model._distribute_strategy is not None


def is_in_creator_scope() -> bool:
    """Whether this thread is inside a `tf.variable_creator_scope`, as in the scope of a strategy.

    Without it: a strategy that is made in such a scope enters one more that is not left, and TensorFlow raises.
    """
    return bool(tf.compat.v1.get_default_graph()._variable_creator_stack)


def keras_model_in_step() -> keras_trainer.TensorFlowTrainer | None:
    """The model whose `fit` is under way in this thread, but for its callbacks and validation."""
    trainer = keras_trainer.TensorFlowTrainer
    fit, *others = (inspect.unwrap(method).__code__ for method in (trainer.fit, trainer.evaluate, trainer.predict))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not fit:
        if frame.f_code in others or frame.f_globals.get("__name__") == keras_callback_list.__name__:
            return None
        frame = frame.f_back
    return frame and frame.f_locals["self"]


class KerasCall(NamedTuple):
    """A `fit`, `evaluate` or `predict` that is under way.

    Attributes:
      name: Which of these.
      model: Whose.
      epochs: What it reads. Nothing else keeps it.
      callbacks: Its list of callbacks, once it has one.
    """

    name: str
    model: keras_trainer.TensorFlowTrainer
    epochs: keras_epoch_iterator.EpochIterator
    callbacks: keras.callbacks.CallbackList | None


def keras_calls() -> list[KerasCall]:
    """The calls of Keras under way in this thread, innermost first. The validation of a `fit` is a part of it.

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
    """Whether Keras' `evaluate` or `predict` is under way in this thread, also inside a `fit`."""
    trainer = keras_trainer.TensorFlowTrainer
    return any(_frame_of(inspect.unwrap(method)) for method in (trainer.evaluate, trainer.predict))


def keras_is_predicting() -> bool:
    """Whether Keras' `predict` is under way in this thread."""
    return _frame_of(inspect.unwrap(keras_trainer.TensorFlowTrainer.predict)) is not None


def keras_spec_to_predict() -> Any:
    """The specs, on one replica, of what Keras' `predict` reads in this thread; `None` if it reads no dataset.

    Without it: workers trace `predict` on batches of other lengths, and only some of them exchange the lengths.
    """
    frame = _frame_of(inspect.unwrap(keras_trainer.TensorFlowTrainer.predict))
    dataset = dataset_of(frame and frame.f_locals.get("epoch_iterator"))
    return tf.nest.map_structure(spec_on_a_replica, getattr(dataset, "element_spec", None))


def spec_on_a_replica(spec: Any) -> Any:
    """What a spec of the dataset of all replicas is on the first of them.

    Without it: `fit` on several devices reads a batch to learn its shapes.
    """
    return spec._component_specs[0] if isinstance(spec, PerReplicaSpec) else spec


def calls_of_threads() -> dict[int, list[tuple[str, int, str]]]:
    """The calls of each thread, the innermost first: file, line and function. For a process that is about to end.

    A look at the frames of a running thread is not safe: to make an object for a frame can start a collection of
    garbage, in which a finalizer lets the other thread run on, and the frame is gone. So none is collected meanwhile.
    faulthandler is no way out: it follows CPython 3.11's list of threads without its lock, while TensorFlow's enter
    Python.
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
    """The innermost call of Keras in this thread in which a model is run, by name.

    Without it: who waits for others in `train_on_batch`, but outside of its step, is not known to be in a call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_call_of_keras(frame.f_code.co_filename, frame.f_code.co_name):
            return frame.f_code.co_name
        frame = frame.f_back
    return None


def is_call_of_keras(file: str, function: str) -> bool:
    """Whether that is Keras' `fit`, `evaluate` or another call in which a model is run. See `calls_of_threads`."""
    return file == keras_trainer.__file__ and function in _KERAS_CALLS


_KERAS_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def keras_fitting_models() -> list[keras_trainer.TensorFlowTrainer]:
    """The models whose Keras `fit` is under way in this thread, innermost first."""
    code, models = inspect.unwrap(keras_trainer.TensorFlowTrainer.fit).__code__, []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            models.append(frame.f_locals["self"])
        frame = frame.f_back
    return models


def datasets_of_worker(distributed: Any) -> list[Any]:
    """The datasets that a distributed dataset reads on this worker.

    Without it: what the user distributed and gives to `fit` leaves a replica without rows on zeros.
    """
    return list(getattr(distributed, _place_of_datasets(distributed)))


def set_datasets_of_worker(distributed: Any, datasets: list[Any]) -> None:
    """Lets a distributed dataset read `datasets`, of the same elements; see `datasets_of_worker`."""
    setattr(distributed, _place_of_datasets(distributed), datasets)


def _place_of_datasets(distributed):
    return "_cloned_datasets" if isinstance(distributed, DistributedDataset) else "_datasets"


def call_in_step(callbacks) -> None:
    """Has a Keras list of callbacks call them within a step.

    A callback that is given to `fit` alone, in no list, is taken for none that needs it, and called in another thread.
    Without it: such a BackupAndRestore saves variables of a later step, or of half a step.
    """
    callbacks._async_train = False


def goes_on_with(epochs, iterator) -> bool:
    """Whether the next epoch of a Keras `EpochIterator` begins where `iterator` stands, and not with a new one.

    Without it: a backup made at the end of the input says that all of it was read, and a new `fit` finds nothing left.
    """
    return epochs._current_iterator is iterator


def dataset_of(epochs):
    """What a Keras `EpochIterator` reads from, if it is one and says so.

    Without it: two shardings of equal global batches in one `fit` may be given each other's position.
    """
    return getattr(epochs, "_distributed_dataset", None)


def datasets_read_by(dataset: Any) -> list[Any]:
    """A dataset, and each that it reads from, also through others; but for those that only its functions know.

    Without it: workers that each read a whole sharding train on the same rows, and nobody is told.
    """
    found, waiting = {}, [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += each._inputs() if isinstance(each, tf.data.Dataset) else []
    return list(found.values())


def graphs_of_dataset_functions(dataset: tf.data.Dataset) -> list[Any]:
    """The graphs of the functions that one stage of a dataset calls.

    Without it: workers cannot tell rows that random operations make unlike from rows of other data.
    """
    return [wrapper.function.graph for wrapper in dataset._functions()]


def maps_elements(dataset: tf.data.Dataset) -> bool:
    """Whether a stage of a dataset is a `map`: each element is what its function gives of one. See above."""
    return type(dataset).__name__ in ("_MapDataset", "_ParallelMapDataset")


def keras_purpose() -> str:
    """Which of Keras' methods reads a dataset that is being distributed: "fit", "validation", "evaluate" or "predict".

    Without it: errors about unlike data do not name the call, and validation data is compared in each epoch.
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
    """The model whose `fit`, `evaluate` or `predict` reads a dataset that is being distributed.

    Without it: workers whose models are unlike learn of it in `predict` by an error of TensorFlow's, or never.
    """
    trainer = keras_trainer.TensorFlowTrainer
    codes = {inspect.unwrap(method).__code__ for method in (trainer.fit, trainer.evaluate, trainer.predict)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame and frame.f_locals["self"]


def keras_source(epochs: keras_epoch_iterator.EpochIterator) -> str:
    """What a Keras `EpochIterator` reads: "arrays", a "dataset" of the user, or "python" code of theirs.

    Without it: see `graphs_of_dataset_functions`.
    """
    if isinstance(epochs.data_adapter, TFDatasetAdapter):
        return "dataset"
    return "arrays" if isinstance(epochs.data_adapter, ArrayDataAdapter) else "python"


def count_as_seen(epochs, batches: int) -> None:
    """Tells a Keras `EpochIterator` of batches that were taken from its iterator beside it.

    Without it: a `fit` that goes on in the middle of its input does not begin it anew at its end.
    """
    epochs._steps_seen += batches


def deciding_loss_scaler():
    """The loss scaler that has found this replica's gradients finite and now applies them, or `None`."""
    frame = _frame_of(LossScaleOptimizer._stateful_handle_finite_grads)
    return None if frame is None else frame.f_locals["self"]


def variables_of_summed_gradients() -> list[Any]:
    """The variables whose gradients a plain Keras optimizer exchanges now, in their order; none if it does not."""
    frame = _frame_of(TFOptimizer._all_reduce_sum_gradients)
    return [] if frame is None else [variable for _, variable in frame.f_locals["filtered_grads_and_vars"]]


def is_called_by_library() -> bool:
    """Whether the function that asks was called from TensorFlow, Keras or tfdist, and not from a user's code.

    Without it: a step in which a user divides by the number of replicas what he has summed over them is not refused.
    """
    module = sys._getframe(2).f_globals.get("__name__", "")
    if module.startswith("tensorflow.python.autograph"):  # which runs a user's code
        return False
    return module.split(".")[0] in ("keras", "tensorflow", "tfdist")


def is_recorded() -> bool:
    """Whether a `tf.GradientTape` records what this thread computes: then a gradient taken now is not the last one.

    Without it: a gradient penalty on what replicas exchange is weighted twice where their rows are unequal.
    """
    return record.could_possibly_record()


def bodies_of_call(operation: tf.Operation) -> list[Any]:
    """The graphs of the function that an operation calls, or of the branches of which it takes one.

    Without them: losses and layers that are a `tf.function` are taken for means.
    """
    names = ("then_branch", "else_branch") if "If" in operation.type else ("f",)
    functions = [operation.graph._get_function(operation.get_attr(name).name) for name in names]
    graphs = [getattr(function, "graph", None) for function in functions]
    return [] if any(graph is None for graph in graphs) else graphs


def tf_keras_exchanges_gradients() -> bool:
    """Whether an optimizer of tf_keras sums up its gradients now.

    Without it: `compression` does nothing for models of tf_keras, and nobody is told.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "all_reduce_sum_gradients" and frame.f_globals["__name__"].startswith("tf_keras."):
            return True
        frame = frame.f_back
    return False


def places_in_optimizer(optimizer: Any, variables: Any) -> list[int]:
    """Which of its variables these are; none if they are of another that it stands for.

    Without it: lists of variables of equal shapes would share residuals.
    """
    try:
        return [optimizer._get_variable_index(variable) for variable in variables]
    except KeyError:
        return []


def _frame_of(function: Any) -> FrameType | None:
    """The innermost call of `function` that is under way in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


def python_function_of(function: Function, owner: Any) -> Any:
    """What a `tf.function`, maybe a method of `owner`, does, with its `if`s and loops on tensors turned into graphs.

    TensorFlow wraps a method in decorators that call a stand-in of its object. Without it: a `train_step` under
    `tf.function` is traced once for all replicas.
    """
    _, original = tf_decorator.unwrap(function.python_function)
    plain = getattr(original, "__func__", original)
    try:
        converted = autograph.to_graph(plain)
    except autograph.ConversionError:  # it has no source, as what is typed in; `tf.function` runs it as it is, too
        converted = plain
    return MethodType(converted, owner) if inspect.ismethod(original) else converted


def clone_function(function: Function, python_function) -> Function:
    """A `tf.function` with the options of `function` around another Python function.

    Without it: a step that is a `tf.function` is traced with TensorFlow's own replica code, outside of ours.
    """
    return function._clone(python_function=python_function)


def set_cardinality(dataset, batches: int) -> None:
    """Corrects how many batches a distributed dataset says it has; Keras' `fit` runs as many steps.

    A dataset made from a function knows its own worker's batches only. Without it: a worker with fewer leaves `fit`
    before the others.
    """
    dataset._cardinality = batches
