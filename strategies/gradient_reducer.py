"""Reduces values over all replicas: gradients of optimizers, values of the user, values of the step itself."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.errors import CompiledCollectivesError
from tfdist.strategies import batch_independent_rows
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.compression_policy import is_uncompressed
from tfdist.strategies.compression_state import CompressionState
from tfdist.strategies.eager_exchange import merged
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.sharding.part_tensors import Division, part_of, part_of_slices
from tfdist.strategies.step import Step


class GradientReducer:
    """Sums or averages gradients and other values over all replicas of a strategy.

    Gradients are encoded if the strategy has `compression`. All other values travel as they are.

    Args:
      collectives: Exchanges tensors between replicas: `Collectives`, or the `cross_device_ops` of the user.
      communication: Makes the reducers of encoded gradients; `None` if gradients are not encoded.
      devices: The devices of this worker.
      replicas: Number of replicas on all workers.
      parts: Exchanges parts of tensors, if optimizer state is sharded.

    Attributes:
      communication: As given.
    """

    def __init__(
        self,
        collectives: Any,
        communication: CompressionState | None,
        devices: Sequence[str],
        replicas: int,
        parts: Any = None,
    ):
        self._collectives, self.communication = collectives, communication
        self._devices, self._replicas, self._parts = devices, replicas, parts

    def reduce(self, request: ReductionRequest, step: Step) -> list[Gradient]:
        """Sums or averages the values of a request over all replicas, which send their requests in the same order.

        Returns the results, with the same bits on all replicas. `step` is the step that this replica runs.

        Raises:
          CompiledCollectivesError: If XLA compiles the step, and there are several replicas.
          ValueError: If gradients have a type that collectives cannot sum, or a codec that cannot encode them.
        """
        self.check_compiled()
        if any(request.partitions) and not self._encodes(request):
            return self._reduce_to_parts(request, step)
        values = _shaped(request.values, request.variables)
        encoded_reducer = self._encoded_reducer(request, values)
        values, without_heads = batch_independent_rows.with_heads(values, step)
        if encoded_reducer is not None:
            done = tf.convert_to_tensor(request.optimizer.iterations)
            if tf.executing_eagerly():
                totals = merged(step, request.what, _exchange_eagerly, encoded_reducer, values, done)
            else:
                totals = without_heads(
                    _in_one_frame(step, functools.partial(encoded_reducer, step.replica, done=done), values)
                )
            return self._own_parts(request, totals, encoded_reducer.in_parts, step)
        exchange: Callable[..., Any]
        if tf.executing_eagerly() or not isinstance(self._collectives, Collectives):
            # Replicas run one after another, or other `cross_device_ops` need the values of all: leave the step.
            all_reduce = functools.partial(_all_reduce_eagerly, request.reduce_op, request.options)
            return without_heads(merged(step, request.what, all_reduce, values))
        else:
            options = request.options or tf_internals.CommunicationOptions()
            exchange = functools.partial(
                self._collectives._all_reduce, request.reduce_op, replica_id=step.replica, options=options
            )
        return without_heads(_in_one_frame(step, exchange, values))

    def _reduce_to_parts(self, request, step):
        """Sums values of which each replica gets its part, and values that all replicas get whole.

        Dense gradients take half of an all-reduce. Others are summed as a whole first: sparse ones and those of eager
        steps.
        """
        values = _shaped(request.values, request.variables)
        in_halves = not tf.executing_eagerly()
        divided = [
            i
            for i, (value, partition) in enumerate(zip(values, request.partitions, strict=True))
            if partition is not None and in_halves and not isinstance(value, tf.IndexedSlices)
        ]
        rest = [i for i in range(len(values)) if i not in set(divided)]
        results = list(values)
        if rest:
            of_rest = dataclasses.replace(
                request,
                values=[values[i] for i in rest],
                variables=[request.variables[i] for i in rest] if request.variables else (),
                partitions=(),
            )
            for i, total in zip(rest, self.reduce(of_rest, step), strict=True):
                results[i] = _own(total, request.partitions[i], self._parts.shard_of(step.replica))
        if divided:
            partitions = [request.partitions[i] for i in divided]
            exchange = functools.partial(
                self._parts.reduce_scatter_tensors,
                partitions=partitions,
                replica=step.replica,
                options=request.options,
                cuts=request.cuts,
            )
            own = _in_one_frame(step, exchange, [values[i] for i in divided])
            results = [dict(zip(divided, own, strict=True)).get(i, result) for i, result in enumerate(results)]
        return results

    def _own_parts(self, request, totals, in_parts, step):
        """Returns this replica's part of each divided sum, if it is not a part already, as those at `in_parts`."""
        if not any(request.partitions):
            return totals
        shard = self._parts.shard_of(step.replica)
        return [
            total if i in in_parts else _own(total, partition, shard)
            for i, (total, partition) in enumerate(zip(totals, request.partitions, strict=True))
        ]

    def gather_parts(
        self,
        parts: Sequence[tf.Tensor],
        partitions: Sequence[Division],
        step: Step,
        *,
        what: str = "gather parts of an update",
        cuts: bool = True,
    ) -> list[tf.Tensor]:
        """Gathers tensors of which each replica has its part, given by `partitions`; returns the whole tensors.

        The text `what` says so in error messages. See `PartBuckets` for `cuts`.
        """
        self.check_compiled()
        if tf.executing_eagerly():
            return merged(step, what, functools.partial(_gather_eagerly, partitions), list(parts))
        gather = functools.partial(self._parts.all_gather_parts, partitions=partitions, replica=step.replica, cuts=cuts)
        return _in_one_frame(step, gather, list(parts))

    def _encodes(self, request):
        """Whether values are sums of an optimizer's gradients that leave a worker or device, and are encoded."""
        is_of_gradients = request.optimizer is not None and request.reduce_op == tf.distribute.ReduceOp.SUM
        return is_of_gradients and self.communication is not None and not is_uncompressed()

    def _encoded_reducer(self, request, values):
        """Returns the reducer of encoded gradients, or `None` if the values are not encoded."""
        if not self._encodes(request):
            return None
        # A codec encodes parts for all replicas only. With groups each replica gets whole sums, and takes its part.
        has_groups = self._parts is not None and self._parts.groups is not None
        partitions = () if has_groups else request.partitions
        return self.communication.exchange_of(
            request.optimizer, values, request.variables, partitions, request.fragment
        )

    def check_compiled(self):
        """Refuses a step of several replicas that XLA compiles: it would become a program of a single device."""
        if is_compiled() and self._replicas > 1:
            raise CompiledCollectivesError(
                "With jit_compile=True, XLA compiles the whole step to a program of one device, which cannot exchange "
                f"gradients. Got {self._replicas} replicas, here on {', '.join(self._devices)}. "
                "Pass jit_compile=False to `compile` (or `tf.function`); `predict` and single layers may stay compiled."
            )


def is_compiled() -> bool:
    """Whether XLA compiles the operations traced now."""
    return not tf.executing_eagerly() and tf_internals.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _shaped(gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
    """Gives `gradients` the static shapes of their variables, if these are known.

    The static shapes of gradients may differ between replicas: Keras may trace one replica for a known number of rows
    and another replica for any number. Buckets and codecs must be the same on all replicas.
    """
    if not variables:
        return list(gradients)
    return [_of_shape(grad, variable.shape) for grad, variable in zip(gradients, variables, strict=True)]


def _of_shape(gradient, shape):
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
        return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, shape)
    values = tf.ensure_shape(gradient.values, [None, *shape[1:]])
    return tf.IndexedSlices(values, gradient.indices, tf.constant(list(shape), gradient.indices.dtype))


def _in_one_frame(step: Step, exchange, values):
    """Calls `exchange` so that TensorFlow matches its collectives with the collectives of other replicas.

    TensorFlow identifies a collective of a process also by the loop that it runs in, and each replica has its own
    loop. Inside a function that is not inlined, a collective belongs to no loop.
    """
    if not step.in_loop:
        return exchange(values)
    return tf_internals.not_inlined(lambda own: exchange(own))(values)


def _all_reduce_eagerly(reduce_op, options, strategy, values):
    of_each = [strategy.extended.of_each_replica(value) for value in values]
    return strategy.extended.batch_reduce_to(reduce_op, [(value, value) for value in of_each], options)


def _own(total, partition, shard):
    """Returns a shard's part of a sum; the sum itself if it is not divided."""
    if partition is None:
        return total
    return (part_of_slices if isinstance(total, tf.IndexedSlices) else part_of)(partition, total, shard)


def _gather_eagerly(partitions, strategy, parts):
    local = strategy.experimental_local_results
    own = [list(each) for each in zip(*(local(strategy.extended.of_each_replica(part)) for part in parts), strict=True)]
    return tf_internals.regroup(strategy.extended.parts.gather_eagerly(own, partitions))


def _exchange_eagerly(strategy, encoded_reducer, gradients, done):
    of_each = strategy.extended.of_each_replica
    local = [strategy.experimental_local_results(of_each(gradient)) for gradient in gradients]
    done = strategy.experimental_local_results(done)[0]
    return tf_internals.regroup(encoded_reducer.eagerly([list(own) for own in zip(*local, strict=True)], done))
