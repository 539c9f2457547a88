"""Private names of TensorFlow that tfdist uses, except those of datasets.

Comments state why a name is needed and what breaks without it.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

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
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable

# The module of distributed iterators; see `called_by_iterator`.
from tensorflow.python.distribute import input_lib

# Combines one value per replica into a distributed value. Without it: no compression in eager steps.
from tensorflow.python.distribute.distribute_utils import regroup

# The replica that a thread is tracing, as a Python number, to select a transport. The public API returns a tensor.
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int

# Whether TensorFlow writes a SavedModel, which has one copy of each variable. Without it: the export of a model with
# divided weights fails with an unclear error.
from tensorflow.python.distribute.values_util import is_saving_non_distributed

# Pass AutoGraph's status on to a user's step function before we wrap it, as `strategy.run` itself does. Without them:
# AutoGraph does not convert a Python `if` on tensors in the step function of a custom loop.
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import tf_convert

# Unwrap a method under `tf.function`; see `python_function_of` and `unconverted`.
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.util import tf_decorator

# The class of `tf.function` objects, which `strategy.run` traces again. Without it: we cannot detect such objects.
from tensorflow.python.eager.def_function import Function

# Set the registration deadline and heartbeats on the context before a strategy is created. The message type with the
# names of the jobs comes from here too. Without them: the cluster waits forever for a worker that never starts.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.distribute import multi_worker_util

# Whether XLA compiles a graph. It cannot compile a step of several replicas. Without it: TensorFlow raises its own,
# unclear error.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Makes the operations of a branch part of the graph around it. Without it: a step with a failed exchange raises the
# error of another operation, which was cancelled.
from tensorflow.python.ops.control_flow_util_v2 import maybe_set_lowering_attr

# The graphs inside a `tf.while_loop`. Without them: an exchange in a loop on several devices waits forever. The graph
# of a branch of `tf.cond`. Without it: no error says that a branch cannot read a divided weight.
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)

# Whether `tf.config.experimental.enable_op_determinism` was called, which forbids timestamps. Without it: `fit` fails.
from tensorflow.python.framework.config import is_op_determinism_enabled

# Whether a gradient tape records; see `is_recorded`.
from tensorflow.python.eager import record

# The module of `tf.recompute_grad`; see `is_recomputed`.
from tensorflow.python.ops import custom_gradient

from tfdist._compat import call_stack

# The types of eager tensors and of the graphs of functions. Without them: only the names of attributes tell them.
EagerTensor = tf.__internal__.EagerTensor
FuncGraph = tf.__internal__.FuncGraph

__all__ = [
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CollectiveReplicaLauncher",
    "CommunicationOptions",
    "CondBranchFuncGraph",
    "EagerTensor",
    "FuncGraph",
    "Function",
    "GraphOrParentsInXlaContext",
    "MirroredExtended",
    "MirroredVariable",
    "SyncOnReadVariable",
    "WhileBodyFuncGraph",
    "WhileCondFuncGraph",
    "bodies_of_call",
    "called_by_iterator",
    "clone_function",
    "container_of",
    "context",
    "control_status_ctx",
    "coordination_config_pb2",
    "copied",
    "get_current_replica_id_as_int",
    "is_in_creator_scope",
    "is_of_gradients",
    "is_op_determinism_enabled",
    "is_recomputed",
    "is_recorded",
    "is_saving_non_distributed",
    "is_watched",
    "maybe_set_lowering_attr",
    "multi_worker_util",
    "not_inlined",
    "number_of_workers",
    "python_function_of",
    "regroup",
    "replace_input",
    "runtime_has_started",
    "tf_convert",
    "unconverted",
]


def called_by_iterator() -> bool:
    """Returns whether the caller was called from the module of distributed iterators.

    Without it: a worker that waits for a peer's input is reported as waiting for its own input.
    """
    return call_stack.caller().f_globals.get("__name__") == input_lib.__name__


def number_of_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers of any strategy; 1 if the strategy knows no workers.

    Without it: callbacks would wait for peers that a strategy of TensorFlow's does not have.
    """
    return getattr(strategy.extended, "_num_workers", 1)


def runtime_has_started() -> bool:
    """Returns whether TensorFlow has initialized its devices, after which it can join no cluster.

    Without it: a strategy created too late raises a RuntimeError that names neither the strategy nor a remedy.
    """
    return context.context()._context_handle is not None


def is_in_creator_scope() -> bool:
    """Returns whether this thread is inside a `tf.variable_creator_scope`, as in the scope of a strategy.

    Without it: a strategy created in such a scope enters another scope that is never left, and TensorFlow raises.
    """
    return bool(tf.compat.v1.get_default_graph()._variable_creator_stack)


def is_recorded() -> bool:
    """Returns whether a `tf.GradientTape` records this thread, so that it may differentiate gradients taken now again.

    Without it: a gradient penalty on exchanged values is weighted twice if replicas have unequal numbers of rows.
    """
    return record.could_possibly_record()


def is_watched(tensor: tf.Tensor | tf.IndexedSlices) -> bool:
    """Returns whether a `tf.GradientTape` records operations on a tensor. Without it: wrong gradients of gradients."""
    return bool(record.should_record_backprop(tf.nest.flatten(tensor, expand_composites=True)))


def is_of_gradients(operation: tf.Operation) -> bool:
    """Returns whether a `tf.GradientTape` has made an operation, to compute gradients.

    Without it: each weight that is divided among replicas stays whole in memory from the forward pass to its gradient.
    """
    return operation.name.startswith("gradient_tape/")  # The name scope that TensorFlow opens for them.


def is_recomputed() -> bool:
    """Returns whether the caller runs in the backward pass of `tf.recompute_grad`, as under `keras.RematScope`.

    Without it: weights that are divided among replicas are gathered three times where twice suffices.
    """
    inside = (frame for frame in call_stack.frames() if frame.f_code.co_name == "grad_wrapper")
    return any(frame.f_globals.get("__name__") == custom_gradient.__name__ for frame in inside)


def not_inlined(function: Callable[..., Any]) -> Any:
    """Makes a `tf.function` that stays one operation of the graph, by an attribute that TensorFlow does not document.

    Without it, collectives of replicas in loops do not match, and steps visit all operations of codecs that were not
    chosen.
    """
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def replace_input(operation: tf.Operation, tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Replaces an input of an operation of a graph by another tensor. Without it: as `is_of_gradients`."""
    for place, each in enumerate(operation.inputs):
        if each.ref() == tensor.ref():
            operation._update_input(place, other)


def copied(operation: tf.Operation, first: tf.Tensor) -> tf.Operation:
    """Returns a copy of an operation of a graph, with another first input. Without it: as `is_of_gradients`."""
    attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    kinds = [output.dtype for output in operation.outputs]
    inputs = [first, *operation.inputs[1:]]
    return operation.graph.create_op(operation.type, inputs, kinds, attrs=attributes, op_def=operation.op_def)


def container_of(variable: Any) -> Any:
    """Returns the distributed variable that has `variable` as its value on a replica; else `variable`.

    Without it: an optimizer cannot update the part of a table that a replica has.
    """
    if isinstance(variable, tf.distribute.DistributedValues) or not isinstance(variable, tf.Variable):
        return variable
    container = getattr(getattr(variable, "handle", None), "_distributed_container", None)
    return variable if container is None else container()


def bodies_of_call(operation: tf.Operation) -> list[Any]:
    """Returns the graph of the function that an operation calls, or the graphs of its two branches.

    Without it: losses and layers that are a `tf.function` are treated as means.
    """
    names = ("then_branch", "else_branch") if "If" in operation.type else ("f",)
    functions = [operation.graph._get_function(operation.get_attr(name).name) for name in names]
    graphs = [getattr(function, "graph", None) for function in functions]
    return [] if any(graph is None for graph in graphs) else graphs


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


def unconverted(function: Any) -> Any:
    """Marks a function that AutoGraph runs as it is, like functions of TensorFlow.

    `do_not_convert` would also keep AutoGraph from converting the user's function that `strategy.run` gets. Without it:
    the first step of a custom loop spends a second of processor time on converting code of tfdist.
    """
    return autograph.autograph_artifact(function)


def clone_function(function: Function, python_function) -> Function:
    """Returns a `tf.function` of another Python function, with the options of `function`.

    Without it: a step that is a `tf.function` is traced with TensorFlow's own replica code, outside of ours.
    """
    return function._clone(python_function=python_function)
