"""The inboxes from which the operations of a graph take the results of exchanges."""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.abort_probe import raise_if_aborted
from tfdist.strategies.collectives.pending_exchange import FAILED, MESSAGE, ExchangeForm
from tfdist.strategies.collectives.received_bytes import like, shape_of_elements


class ExchangeInboxes:
    """Adds exchanges to graphs, and has one inbox (queue) for the result of each.

    Args:
      worker: Index of this worker.
      begin: Begins an exchange while the graph runs, from its labels (number of its inbox, group, value of its form),
        its key and the rows to send. Returns the key.
    """

    def __init__(self, worker: int, begin: Callable[[Any, Any, Any], Any]):
        self._worker, self._begin = worker, begin
        self._queues: dict[int, tf.queue.FIFOQueue] = {}  # One for each exchange of a graph, as long as the graph.
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queues)

    def __getitem__(self, place: int) -> tf.queue.FIFOQueue:
        return self._queues[place]

    def exchange(self, rows: tf.Tensor, group: int, key: tf.Tensor, form: ExchangeForm, times: int) -> tf.Tensor:
        """Adds an exchange to the graph. Returns its result, a tensor like `rows`, of `times` as many rows.

        It adds few operations, since TensorFlow takes long to optimize many. The function that Python runs is the same
        for all exchanges, since TensorFlow never releases it.
        """
        place, inbox = self._new_inbox()
        labels = tf.constant([place, group, form.value])
        # In a thread of the step, since waking another takes longer. Stateful calls would run one after another.
        key = tf.numpy_function(self._begin, [labels, key, rows], tf.int32, stateful=False)
        with tf.control_dependencies([key]):
            received, got = _take(inbox)
        elements = None if rows.shape.num_elements() is None else times * rows.shape.num_elements()
        # All exchanges share both branches, which `tf.cond` would trace for each.
        received = tf.raw_ops.If(
            cond=tf.raw_ops.NotEqual(x=got, y=key),
            input=[received, got, key, inbox],
            then_branch=self._await_next,
            else_branch=self._is_received,
            Tout=[tf.uint8],
            output_shapes=[shape_of_elements(elements, rows.dtype.size)],
        )
        tf_internals.maybe_set_lowering_attr(received[0].op)
        return like(received[0], rows, times)

    @functools.cached_property
    def _is_received(self):
        """Returns the bytes of a message."""
        return _traced(lambda received, got, key, inbox: received)

    @functools.cached_property
    def _await_next(self):
        """Returns the bytes of the message of a key, instead of those that a failed step has left in the inbox.

        Raises an error in the step if the message tells of a failure.
        """
        is_other = _traced(lambda received, got, key, inbox: (got != key) & (got != FAILED))
        take_next = _traced(lambda received, got, key, inbox: (*_take(inbox), key, inbox))

        def await_next(*message):
            # One operation, which runs functions. The loop of `tf.while_loop` becomes dozens in each step.
            received, *_ = tf.raw_ops.While(input=message, cond=is_other, body=take_next)
            # Outside of the functions, since an error in one of them would first cancel the other operations of the
            # step, which then fails as cancelled.
            with tf.control_dependencies([received]), tf.control_dependencies([raise_if_aborted(self._worker)]):
                return tf.identity(received)

        return _traced(await_next)

    def _new_inbox(self):
        """Makes an inbox, which lives as long as the graphs that use its handle. Returns its number and its handle."""
        place = next(self._numbers)
        with tf.init_scope(), tf.device("CPU:0"):
            inbox = tf.queue.FIFOQueue(-1, MESSAGE)
            handle = tf.identity(inbox.queue_ref)
        self._queues[place] = inbox
        weakref.finalize(handle, self._queues.pop, place, None).atexit = False
        return place, handle


def _take(inbox):
    """Takes a message out of an inbox: received bytes, and the key of their exchange, int32 []."""
    return tf.raw_ops.QueueDequeueV2(handle=inbox, component_types=MESSAGE)


def _traced(function):
    """Traces a function of a message, the key of the exchange that the step awaits, and its inbox."""
    scalar = tf.TensorSpec([], tf.int32)
    message = tf.TensorSpec(None, tf.uint8), scalar
    traced = tf.function(function, autograph=False)
    with tf.init_scope():
        return traced.get_concrete_function(*message, scalar, tf.TensorSpec([], tf.resource))
