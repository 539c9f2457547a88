"""`tf.data` pipelines that make batches from indices of examples, read ahead by this worker or a tf.data service."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_coalescing import EXAMPLES_TOGETHER, coalesced
from tfdist.data.reading import Reader
from tfdist.data.service_client import Service
from tfdist.data.sources import Source
from tfdist.data.topology import ReplicaTopology
from tfdist.data.validation import checked_count


class Pipeline:
    """Makes `tf.data` datasets of batches from the indices of examples that a worker is assigned.

    The arguments are those of `BalancedSharding`.

    Raises:
      ValueError: If `num_parallel_calls` is not a positive integer or `tf.data.AUTOTUNE`; also see `Service`.
      SourceError: If the source cannot be read, or no service answers; see `Service`.
    """

    def __init__(self, source: Source, map_fn: Callable[..., Any] | None, num_parallel_calls: int, service: str | None):
        self._source, self._reader, self._calls = source, Reader(source, map_fn), num_parallel_calls
        if num_parallel_calls != tf.data.AUTOTUNE:
            self._calls = checked_count("num_parallel_calls", num_parallel_calls)
        self._service = Service(service, source, map_fn) if service is not None else None

    def dataset(
        self,
        begin: Callable[[], BatchAssignment],
        place: ReplicaTopology,
        rows: int,
        *,
        has_rows: bool,
        on_end: Callable[[np.ndarray], None] | None,
    ) -> tf.data.Dataset:
        """A dataset of the batches of one worker's replicas, read ahead.

        Args:
          begin: Function that returns the assignment for an iterator. TensorFlow never releases it.
          place: The replicas that the batches are for.
          rows: Approximate number of rows per batch.
          has_rows: Whether every batch has rows for every replica.
          on_end: Called with the epoch that begins when the batch before it is taken, or None.
        """
        if self._service is not None:
            return _taken(self._service.dataset(begin).prefetch(len(place.own)), on_end)
        if self._source.examples_together < 2 * rows:
            groups = coalesced(begin, EXAMPLES_TOGETHER, are_equal=False)
        else:
            # Groups of stored examples need no function call per batch, which would cost 40 us.
            is_ready = has_rows and not self._reader.makes_anything and len(place.own) == 1
            most = min(self._source.examples_together, EXAMPLES_TOGETHER)
            groups = self._reader.together(coalesced(begin, most, are_equal=is_ready))
            if is_ready:
                return _taken(groups.map(lambda indices, lengths, ends, read: (read, ends)), on_end).unbatch()
        batches = self._reader.batches(groups, self._calls, replica=place.own.start)
        return _taken(batches.prefetch(len(place.own)), on_end)

    def first_example(self, place: ReplicaTopology) -> tf.data.Dataset:
        """The first example of the source, in a batch of its own."""
        indices = tf.data.Dataset.from_tensors(tf.zeros([1], tf.int64))
        return indices.map(lambda first: self._reader(first, replica=place.own.start))


def finished(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The last step of a pipeline: `dataset` with options that stop TensorFlow and Keras from changing it."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False  # There is nothing to tune, and `fit` would wait for the tuner to end.
    return dataset.with_options(options)


def _taken(dataset: tf.data.Dataset, on_end: Callable[[np.ndarray], None] | None) -> tf.data.Dataset:
    """Drops the epochs from a dataset of (batch or batches, epochs that begin after them), and reports them.

    Must follow all stages that read ahead. For `on_end` see `Pipeline.dataset`.
    """
    if on_end is None:
        return dataset.map(lambda batch, _: batch)

    def taken(batch: Any, ends: tf.Tensor) -> Any:
        end = tf.reduce_max(ends)

        def told() -> tf.Operation:
            with tf.control_dependencies(tf.nest.flatten([tf.numpy_function(on_end, [end], [])])):
                return tf.no_op()

        tf.cond(end > 0, told, tf.no_op)
        return batch

    return dataset.map(taken)
