"""The `tf.distribute.ReplicaContext` in a step of a Keras model, right also if replicas have unequal rows."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._compat import call_stack, tf_internals
from tfdist.strategies.loss_weight import times
from tfdist.strategies.step import Step


class StepContext(tf.distribute.ReplicaContext):
    """The result of `tf.distribute.get_replica_context()` in a step of a Keras model on several replicas.

    It differs from TensorFlow's context in three ways.

    - Gradients through `all_reduce` and `all_gather` are gradients of the loss over the global batch, also if replicas
      have unequal rows. TensorFlow sums the gradients of all replicas' losses; this class weights them by rows.
    - `all_gather` leaves out what a replica without rows has computed on its stand-in row.
    - In a step of the user's own `num_replicas_in_sync` is 1, since its losses are those of one device.
    """

    def __init__(self, around: tf.distribute.ReplicaContext, step: Step):
        super().__init__(around.strategy, int(tf.get_static_value(around.replica_id_in_sync_group)))
        self._around = around
        # TensorFlow never releases the gradient functions of a graph, and the functions below refer to this context. A
        # strong reference would keep the step's model in memory.
        self._weak_step = weakref.ref(step)

    @property
    def _step(self) -> Step:
        step = self._weak_step()
        if step is None:
            raise RuntimeError("The replica context of a training step was used after the step had ended.")
        return step

    @property
    def num_replicas_in_sync(self):
        """The number of replicas; 1 in a step of the user's own, whose losses are those of one device."""
        return self._step.shown_replicas(self.strategy, by_user=not call_stack.is_called_by_library())

    @tf_internals.unconverted
    def all_reduce(self, reduce_op, value, options=None):
        """Reduces `value` over all replicas, as in TensorFlow. Gradients through it are those of the global batch."""
        if not call_stack.is_called_by_library():
            self._step.note_user_exchange()
        leaves, reduce_all = tf.nest.flatten(value), super().all_reduce
        if not self._weighs or any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
            return self._noted(reduce_all(reduce_op, value, options))

        @tf.custom_gradient
        def reduced(*own):
            def gradient(*upstream):
                return self._of_global_loss(upstream, lambda values: self.all_reduce(reduce_op, values, options))

            return reduce_all(reduce_op, own, options), gradient

        return self._noted(tf.nest.pack_sequence_as(value, tf.nest.flatten(reduced(*leaves))))

    @tf_internals.unconverted
    def all_gather(self, value, axis, options=None):
        """Concatenates `value` of all replicas, as in TensorFlow. A replica without rows adds no rows along axis 0."""
        if not call_stack.is_called_by_library():
            self._step.note_user_exchange()
        gather_all = super().all_gather

        @tf.custom_gradient
        def gathered(*own):
            def gradient(*upstream):
                totals = self._of_global_loss(upstream, lambda values: self.all_reduce("SUM", values, options))
                return [self._own_part(*each, axis, gather_all) for each in zip(totals, own, strict=True)]

            return gather_all(list(own), axis, options), gradient

        own = [self._without_stand_in(tf.convert_to_tensor(leaf), axis) for leaf in tf.nest.flatten(value)]
        return self._noted(tf.nest.pack_sequence_as(value, tf.nest.flatten(gathered(*own))))

    def _merge_call(self, merge_fn, args, kwargs):
        return self._around._merge_call(merge_fn, args, kwargs)

    @property
    def _weighs(self) -> bool:
        """Whether gradients are weighted by rows once a tape has computed them, as in a user's own step."""
        step = self._step
        return step.share is not None and not step.weights_loss

    def _of_global_loss(self, upstream: Sequence[Any], exchange: Callable[[list[Any]], Any]) -> list[Any]:
        """Returns gradients of the loss over the global batch, divided by the weight that multiplies them later."""
        upstream = [tf.convert_to_tensor(leaf) for leaf in upstream]
        if not self._weighs or tf_internals.is_recorded():  # An inner gradient has no weight.
            return tf.nest.flatten(exchange(upstream))
        share = self._step.share
        totals = tf.nest.flatten(exchange([times(leaf, share) for leaf in upstream]))
        return [tf.math.divide_no_nan(total, tf.cast(share, total.dtype)) for total in totals]

    def _own_part(self, total, own, axis, gather_all):
        """Returns the part of `total` that this replica contributed to `all_gather` along `axis`."""
        lengths = gather_all(tf.shape(own)[axis][None], 0)
        first = tf.reduce_sum(lengths[: self.replica_id_in_sync_group])
        places = tf.range(first, first + tf.shape(own)[axis])
        return tf.gather(total, places, axis=axis)

    def _without_stand_in(self, leaf, axis):
        has_rows = self._step.has_rows
        if has_rows is True or tf.get_static_value(axis) != 0:
            return leaf
        return tf.cond(has_rows, lambda: leaf, lambda: leaf[:0])

    def _noted(self, exchanged):
        """Records in the step that `exchanged` is equal on all replicas, for later checks of its graph."""
        leaves = tf.nest.flatten(exchanged, expand_composites=True)
        self._step.exchanges.results |= {leaf.ref() for leaf in leaves if tf.is_symbolic_tensor(leaf)}
        return exchanged
