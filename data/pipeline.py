"""What is handed out, as batches in `tf.data`: read by this worker or by a service, ahead of training."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.counts import checked_count
from tfdist.data.handout import Handout
from tfdist.data.place import Place
from tfdist.data.reading import Reader
from tfdist.data.service import Service
from tfdist.data.sources import Source
from tfdist.data.together import EXAMPLES_TOGETHER, Asked, Made, together
from tfdist.data.weakly import weakly


@dataclasses.dataclass(frozen=True)
class Use:
    """What a dataset is read for: where, whether to train, and whether `start` begins its iterators."""

    place: Place
    training: bool
    is_started: bool

    @property
    def tells_ends(self) -> bool:
        """Whether with each batch comes the epoch that begins after it, else 0: to count epochs that are read."""
        return self.training and not self.is_started


Make = Callable[[Asked, Handout], Made]
# Hands out for a use, and gives what was made of it, of one batch or of several of an epoch at once; and of each batch
# the epoch that begins after it, else 0.
Batches = Callable[[Make, Use], Iterator[tuple[Any, np.ndarray]]]


class Pipeline:
    """Makes datasets of what is handed out.

    Args:
      source: What is read.
      map_fn: What to make of an example.
      num_parallel_calls: Batches that are read and decoded at once.
      service: The address of a tf.data service that makes the batches.

    Raises:
      ValueError: If `num_parallel_calls` is no such number, or as `Service`.
      SourceError: As `Service`.
    """

    def __init__(self, source: Source, map_fn: Callable[..., Any] | None, num_parallel_calls: int, service: str | None):
        self._source, self._reader, self._calls = source, Reader(source, map_fn), num_parallel_calls
        if num_parallel_calls != tf.data.AUTOTUNE:
            self._calls = checked_count("num_parallel_calls", num_parallel_calls)
        self._service = Service(service, source, map_fn) if service is not None else None

    def dataset(self, use: Use, rows: int, batches: Batches) -> tf.data.Dataset:
        """Batches of about so many rows each, read ahead; with the epoch that begins after it, if the use tells ends.

        Args:
          use: What it is read for.
          rows: Of a batch, about.
          batches: Hands out; TensorFlow keeps it for ever.
        """
        made = self._read_here(use, rows, batches) if self._service is None else self._read_there(use, batches)
        return made.prefetch(len(use.place.own))

    def _read_here(self, use: Use, rows: int, batches: Batches) -> tf.data.Dataset:
        is_together = self._source.examples_together >= 2 * rows
        most = min(self._source.examples_together, EXAMPLES_TOGETHER) if is_together else EXAMPLES_TOGETHER
        steps = tf.data.Dataset.from_generator(
            functools.partial(_made_here, batches, most, use),
            output_signature=(tf.TensorSpec([None, None], tf.int64), *[tf.TensorSpec([None], tf.int64)] * 2),
        )
        if is_together:
            steps = steps.map(
                lambda indices, lengths, ends: (indices, lengths, ends, self._source.read(indices)),
                num_parallel_calls=1,
                deterministic=True,
            )

        def read(indices: tf.Tensor, length: tf.Tensor, end: tf.Tensor, *examples: tf.Tensor) -> Any:
            first = use.place.own.start
            batch = self._reader(indices[:length], *[each[:length] for each in examples], replica=first)
            return (batch, end) if use.tells_ends else batch

        return steps.unbatch().map(read, num_parallel_calls=self._calls, deterministic=True)

    def _read_there(self, use: Use, batches: Batches) -> tf.data.Dataset:
        assert self._service is not None
        made = tf.data.Dataset.from_generator(
            functools.partial(_made_there, batches, weakly(self._service.batches), use),
            output_signature=(self._service.element_spec, tf.TensorSpec([], tf.int64)),
        )
        return made if use.tells_ends else made.map(lambda batch, _: batch)


def finished(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, which neither TensorFlow nor Keras is to change."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False  # There is nothing to tune, and `fit` would wait for the end of the tuner.
    return dataset.with_options(options)


def telling_ends(dataset: tf.data.Dataset, has_read: Callable[[np.ndarray], None]) -> tf.data.Dataset:
    """The batches of a dataset that tells ends; `has_read` is told when one is taken after which an epoch begins."""

    def taken(batch: Any, end: tf.Tensor) -> Any:
        def tell() -> tf.Operation:
            told = tf.numpy_function(has_read, [end], [])
            with tf.control_dependencies(tf.nest.flatten([told])):
                return tf.no_op()

        tf.cond(end > 0, tell, tf.no_op)
        return batch

    return dataset.map(taken)


def _made_here(batches: Batches, most: int, use: Use) -> Iterator[Any]:
    for made, ends in batches(functools.partial(together, most), use):
        yield *made, ends


def _made_there(batches: Batches, serve: Callable[..., Any], use: Use) -> Iterator[Any]:
    def make(asked: Asked, handout: Handout) -> Made:
        for epoch, indices, batch in serve(asked, lambda: handout.closed, replica=use.place.own.start):
            yield epoch, [indices], batch

    for batch, (end,) in batches(make, use):
        yield batch, end
