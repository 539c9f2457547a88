"""Weights of which each replica keeps its own part, and gathers the whole when a step reads it."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals, tf_internals
from tfdist.strategies.graph_analysis import may_differ
from tfdist.strategies.loss_weight import weighted_for_sum
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.sharding.part_tensors import Division
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.sharded_state import ShardedState
from tfdist.strategies.sharding.weight_uses import Uses
from tfdist.strategies.step import Step, current_step


class ShardedWeight(ShardedState):
    """A weight of a layer, divided among all replicas.

    In a step a read gathers the parts of all replicas, and the gradient through it is summed over all replicas, of
    which this replica gets its part. Outside of steps it behaves like all sharded state.

    Each read is an exchange of the weight, and so is the gradient of each read.

    Attributes:
      weight: This variable.
      path: Path of the weight in Keras, for error messages.
    """

    path: str

    @classmethod
    def of_parts(cls, values: Sequence[tf.Variable], strategy: Any, partition: Partition, path: str) -> "ShardedWeight":
        """Makes a weight of the parts `values` of this worker's replicas."""
        weight = cls(strategy, values, tf.VariableAggregation.NONE)
        weight.weight, weight.partition, weight.path = weight, partition, path
        return weight

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole weight."""
        return tf.TensorShape(self.partition.shape)

    def get_shape(self) -> tf.TensorShape:
        """Returns the shape of the whole weight."""
        return self.shape

    @property
    def own_part(self) -> tf.Variable:
        """The variable of the replica that runs now, with the shape of a part."""
        return self._get_on_device_or_primary()

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns rows of the whole weight."""
        return tf.gather(self._get(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns slices of the whole weight."""
        return tf.gather_nd(self._get(), indices, name=name)

    def _get(self) -> Any:
        if tf_internals.is_saving_non_distributed():
            raise ValueError(_EXPORTED.format(name=self.path))
        if keras_internals.in_symbolic_scope():
            return tf.zeros(self.shape, self.dtype)
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
            return _read_in_step(self)
        return super()._get()

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        step = current_step()
        alike = step.exchanges.results if step is not None else ()
        if isinstance(value, tf.IndexedSlices) or (tf.is_symbolic_tensor(value) and may_differ(value, alike=alike)):
            raise ValueError(
                f"With model_sharding='parameters' all replicas must assign the same value to {self.path!r}, but a "
                "step assigns rows of it, or a value that may differ between replicas. Average the value by "
                "`all_reduce`."
            )
        self.note_assigned()
        return super()._update_replica(update_fn, value, **kwargs)

    def note_assigned(self) -> None:
        """Notes that the step of this replica assigns the weight."""
        step = current_step()
        if step is not None:
            step.gathers.note_assigned(self)


_IN_BRANCH = (
    "With model_sharding='parameters' all replicas must read the weight {name!r} together, but a branch of `tf.cond` "
    "reads it, which some replicas may not take. Call the layer outside of the branch, and choose a result by "
    "`keras.ops.where`."
)
_EXPORTED = (
    "The weight {name!r} is divided among replicas, so a SavedModel of this model cannot be written. Save it by "
    "`model.save`, load it outside of the strategy's scope, and export it there."
)


def is_sharded_weight(variable: Any) -> bool:
    """Whether a variable, of Keras or TensorFlow, is a weight that is divided among replicas."""
    return isinstance(getattr(variable, "value", variable), ShardedWeight) or isinstance(variable, ShardedWeight)


def _read_in_step(weight: ShardedWeight) -> tf.Tensor:
    """Gathers a weight in a replica's step."""
    step = _step()
    if step.in_branch and not any(isinstance(each, keras.Optimizer) for each in keras_internals.open_scopes()):
        raise ValueError(_IN_BRANCH.format(name=weight.path))
    partition, name, key = weight.partition, weight.path, object()  # TensorFlow never releases gradient functions.

    @tf.custom_gradient
    def gathered(part: tf.Tensor) -> Any:
        return _gathered(part, partition, name), lambda upstream: _summed_part(upstream, partition, name, key)

    with _outside_of_time_steps(step), tf.control_dependencies(step.gathers.before_first()):
        whole = gathered(tf.identity(weight.own_part.read_value()))
        step.gathers.note(None if tf_internals.is_recomputed() else key, whole, weight)
    _note(whole)
    return whole


def _outside_of_time_steps(step: Step) -> Any:
    """Returns a context in which a recurrent layer gathers a weight once, before its loop over time steps."""
    is_recurrent = any(isinstance(caller, keras.layers.RNN) for caller in keras_internals.open_scopes())
    if not is_recurrent or not step.in_loop:
        return contextlib.nullcontext()
    graph: Any = tf.compat.v1.get_default_graph()
    while not isinstance(graph, tf_internals.WhileBodyFuncGraph | tf_internals.WhileCondFuncGraph):
        graph = graph.outer_graph
    return graph.outer_graph.as_default()


def _summed_part(upstream: Any, partition: Division, name: str, key: object) -> Any:
    """Sums the gradient of a gathered weight over all replicas, weighted by their rows. Returns this replica's part.

    If the gradient is sparse, the result has the rows of all replicas that lie in this part.
    """
    step = _step()
    if tf_internals.is_watched(upstream):
        raise ValueError(
            f"With model_sharding='parameters' the gradient of {name!r} is a part of the sum over all replicas, but a "
            "tape records it, as if to differentiate it once more. Call `tape.gradient` outside of `with tape:`. "
            "Gradients of gradients by weights need a strategy without model_sharding."
        )
    _gather_again(step, key)
    (gradient,) = step.or_zeros([weighted_for_sum(step, upstream, name)])
    what = f"sum the gradient of {name!r}"
    request = ReductionRequest(tf.distribute.ReduceOp.SUM, [gradient], partitions=[partition], cuts=False, what=what)
    (part,) = _reducer().reduce(request, step)
    values = part.values if isinstance(part, tf.IndexedSlices) else part
    _note(values)
    step.gathers.note_summed(values, math.prod(partition.shape) * values.dtype.size)
    return part


def _gather_again(step: Step, key: object) -> None:
    """Gathers a weight once more for the backward pass, so that it need not stay in memory since the forward pass.

    TensorFlow has traced all of its uses in the backward pass when it asks for the gradient of the weight.
    """
    known = step.gathers.taken(key)
    if known is None:
        return
    uses = Uses(known.whole)
    if not uses.backward:
        return
    weight: Any = known.weight()
    with tf.control_dependencies(step.gathers.before_second(uses)):
        part = tf.identity(weight.own_part.read_value())
    again = _gathered(part, weight.partition, weight.path)
    _note(again)
    uses.replace_in_backward(again)


def _gathered(part: tf.Tensor, partition: Division, name: str) -> tf.Tensor:
    (whole,) = _reducer().gather_parts([part], [partition], _step(), what=f"gather the weight {name!r}", cuts=False)
    return whole


def _step() -> Step:
    return current_step() or Step(None)


def _reducer() -> Any:
    return tf.distribute.get_strategy().extended.reducer


def _note(exchanged: tf.Tensor) -> None:
    """Notes in the step that a tensor is equal on all replicas, or part of one."""
    step = current_step()
    if step is not None and tf.is_symbolic_tensor(exchanged):
        step.exchanges.results.add(exchanged.ref())
