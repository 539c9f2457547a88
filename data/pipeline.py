"""`tf.data` pipelines that turn assigned indices into batches, read ahead by this worker or a tf.data service."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_coalescing import EXAMPLES_TOGETHER, Asked, Made, When, together
from tfdist.data.reading import Reader
from tfdist.data.service_client import Service
from tfdist.data.sources import Source
from tfdist.data.topology import ReplicaTopology
from tfdist.data.validation import checked_count
from tfdist.data.weak_callbacks import weakly


@dataclasses.dataclass(frozen=True)
class PipelineUse:
    """The worker that reads a dataset, whether to train, and whether `start` begins its iterators.

    Attributes:
      has_rows: Whether every batch has rows for every replica.
    """

    place: ReplicaTopology
    training: bool
    is_started: bool
    has_rows: bool

    @property
    def tells_ends(self) -> bool:
        """Whether each batch comes with the epoch that begins after it (or 0), so that read epochs can be counted."""
        return self.training and not self.is_started


Make = Callable[[Asked, BatchAssignment], Made]
Batches = Callable[[Make, PipelineUse], Iterator[tuple[Any, When]]]  # Assigns indices for a use, and yields elements.


class Pipeline:
    """Makes datasets of batches from assigned indices.

    Args:
      source: The source of the examples.
      map_fn: A function applied to each example, or None.
      num_parallel_calls: Number of batches that are read and decoded at the same time.
      service: Address of a tf.data service that makes the batches, or None.

    Raises:
      ValueError: If `num_parallel_calls` is not a positive integer or `tf.data.AUTOTUNE`; also see `Service`.
      SourceError: See `Service`.
    """

    def __init__(self, source: Source, map_fn: Callable[..., Any] | None, num_parallel_calls: int, service: str | None):
        self._source, self._reader, self._calls = source, Reader(source, map_fn), num_parallel_calls
        if num_parallel_calls != tf.data.AUTOTUNE:
            self._calls = checked_count("num_parallel_calls", num_parallel_calls)
        self._service = Service(service, source, map_fn) if service is not None else None

    def dataset(
        self, use: PipelineUse, rows: int, batches: Batches, has_read: Callable[[np.ndarray], None]
    ) -> tf.data.Dataset:
        """A dataset of batches, read ahead.

        Args:
          use: The purpose of the dataset.
          rows: Approximate number of rows per batch.
          batches: Function that assigns indices. TensorFlow never releases it.
          has_read: Called with the epoch that begins when the batch before it is taken, if `use.tells_ends`.
        """
        tell = has_read if use.tells_ends else None
        if self._service is not None:
            return _taken(self._read_there(use, batches).prefetch(len(use.place.own)), tell)
        is_together = self._source.examples_together >= 2 * rows
        if is_together and not self._reader.makes_anything and len(use.place.own) == 1 and use.has_rows:
            # Without a function call per batch, which would cost 40 us.
            return _taken(self._read_together(use, batches, are_equal=True).map(_as_read), tell).unbatch()
        steps = self._read_together(use, batches) if is_together else self._asked(use, batches, EXAMPLES_TOGETHER)
        return _taken(self._read_here(use, steps).prefetch(len(use.place.own)), tell)

    def first_example(self, place: ReplicaTopology) -> tf.data.Dataset:
        """The first example of the source, in a batch of its own."""
        indices = tf.data.Dataset.from_tensors(tf.zeros([1], tf.int64))
        return indices.map(lambda first: self._reader(first, replica=place.own.start))

    def _asked(self, use: PipelineUse, batches: Batches, most: int, *, are_equal: bool = False) -> tf.data.Dataset:
        """A dataset of the groups that `together` makes: padded indices, lengths, and epochs that begin after them."""
        make = functools.partial(together, most, are_equal)
        return tf.data.Dataset.from_generator(
            functools.partial(_made_here, batches, make, use),
            output_signature=(tf.TensorSpec([None, None], tf.int64), *[tf.TensorSpec([None], tf.int64)] * 2),
        )

    def _read_together(self, use: PipelineUse, batches: Batches, *, are_equal: bool = False) -> tf.data.Dataset:
        """The dataset of `_asked`, with the examples of each group."""
        asked = self._asked(use, batches, min(self._source.examples_together, EXAMPLES_TOGETHER), are_equal=are_equal)
        return asked.map(
            lambda indices, lengths, ends: (indices, lengths, ends, self._source.read(indices)),
            num_parallel_calls=1,
            deterministic=True,
        )

    def _read_here(self, use: PipelineUse, steps: tf.data.Dataset) -> tf.data.Dataset:
        def read(indices: tf.Tensor, length: tf.Tensor, end: tf.Tensor, *examples: tf.Tensor) -> Any:
            first = use.place.own.start
            return self._reader(indices[:length], *[each[:length] for each in examples], replica=first), end

        return steps.unbatch().map(read, num_parallel_calls=self._calls, deterministic=True)

    def _read_there(self, use: PipelineUse, batches: Batches) -> tf.data.Dataset:
        assert self._service is not None
        return tf.data.Dataset.from_generator(
            functools.partial(_made_there, batches, weakly(self._service.batches), use),
            output_signature=(self._service.element_spec, tf.TensorSpec([], tf.int64)),
        )


def finished(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` with options that stop TensorFlow and Keras from changing it."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False  # There is nothing to tune, and `fit` would wait for the tuner to end.
    return dataset.with_options(options)


def _as_read(indices: tf.Tensor, lengths: tf.Tensor, ends: tf.Tensor, examples: Any) -> tuple[Any, tf.Tensor]:
    del indices, lengths
    return examples, ends


def _taken(dataset: tf.data.Dataset, tell: Callable[[np.ndarray], None] | None) -> tf.data.Dataset:
    """Drops the epochs from a dataset of (batch or batches, epochs that begin after them).

    Args:
      dataset: The dataset after all stages that read ahead.
      tell: Called with the epoch that begins when the batch before it is taken, or None.
    """
    if tell is None:
        return dataset.map(lambda batch, _: batch)

    def taken(batch: Any, ends: tf.Tensor) -> Any:
        end = tf.reduce_max(ends)

        def told() -> tf.Operation:
            with tf.control_dependencies(tf.nest.flatten([tf.numpy_function(tell, [end], [])])):
                return tf.no_op()

        tf.cond(end > 0, told, tf.no_op)
        return batch

    return dataset.map(taken)


def _made_here(batches: Batches, make: Make, use: PipelineUse) -> Iterator[Any]:
    for (rows, lengths), when in batches(make, use):
        yield rows, lengths, np.full(len(lengths), when.begins)


def _made_there(batches: Batches, serve: Callable[..., Any], use: PipelineUse) -> Iterator[Any]:
    def make(asked: Asked, handout: BatchAssignment) -> Made:
        for when, indices, batch in serve(asked, lambda: handout.closed, replica=use.place.own.start):
            yield when, [indices], batch

    for batch, when in batches(make, use):
        yield batch, when.begins
