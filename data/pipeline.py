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
from tfdist.data.together import EXAMPLES_TOGETHER, Asked, Made, When, together
from tfdist.data.weakly import weakly


@dataclasses.dataclass(frozen=True)
class Use:
    """What a dataset is read for: where, whether to train, and whether `start` begins its iterators.

    Attributes:
      has_rows: Whether each of its batches has some, on every replica.
    """

    place: Place
    training: bool
    is_started: bool
    has_rows: bool

    @property
    def tells_ends(self) -> bool:
        """Whether with each batch comes the epoch that begins after it, else 0: to count epochs that are read."""
        return self.training and not self.is_started


Make = Callable[[Asked, Handout], Made]
Batches = Callable[[Make, Use], Iterator[tuple[Any, When]]]  # Hands out for a use, and gives what was made of it.


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

    def dataset(self, use: Use, rows: int, batches: Batches, has_read: Callable[[np.ndarray], None]) -> tf.data.Dataset:
        """Batches of about so many rows each, read ahead.

        Args:
          use: What it is read for.
          rows: Of a batch, about.
          batches: Hands out; TensorFlow keeps it for ever.
          has_read: If the use tells ends: told which epoch begins, when the batch before it is taken.
        """
        tell = has_read if use.tells_ends else None
        if self._service is not None:
            return _taken(self._read_there(use, batches).prefetch(len(use.place.own)), tell)
        is_together = self._source.examples_together >= 2 * rows
        if is_together and not self._reader.makes_anything and len(use.place.own) == 1 and use.has_rows:
            # No function is called for each batch, which would cost 40 us.
            return _taken(self._read_together(use, batches, are_equal=True).map(_as_read), tell).unbatch()
        steps = self._read_together(use, batches) if is_together else self._asked(use, batches, EXAMPLES_TOGETHER)
        return _taken(self._read_here(use, steps).prefetch(len(use.place.own)), tell)

    def _asked(self, use: Use, batches: Batches, most: int, *, are_equal: bool = False) -> tf.data.Dataset:
        """Of some batches at once, what `together` makes, and which epochs begin after them."""
        make = functools.partial(together, most, are_equal)
        return tf.data.Dataset.from_generator(
            functools.partial(_made_here, batches, make, use),
            output_signature=(tf.TensorSpec([None, None], tf.int64), *[tf.TensorSpec([None], tf.int64)] * 2),
        )

    def _read_together(self, use: Use, batches: Batches, *, are_equal: bool = False) -> tf.data.Dataset:
        """The same, with their examples."""
        asked = self._asked(use, batches, min(self._source.examples_together, EXAMPLES_TOGETHER), are_equal=are_equal)
        return asked.map(
            lambda indices, lengths, ends: (indices, lengths, ends, self._source.read(indices)),
            num_parallel_calls=1,
            deterministic=True,
        )

    def _read_here(self, use: Use, steps: tf.data.Dataset) -> tf.data.Dataset:
        def read(indices: tf.Tensor, length: tf.Tensor, end: tf.Tensor, *examples: tf.Tensor) -> Any:
            first = use.place.own.start
            return self._reader(indices[:length], *[each[:length] for each in examples], replica=first), end

        return steps.unbatch().map(read, num_parallel_calls=self._calls, deterministic=True)

    def _read_there(self, use: Use, batches: Batches) -> tf.data.Dataset:
        assert self._service is not None
        return tf.data.Dataset.from_generator(
            functools.partial(_made_there, batches, weakly(self._service.batches), use),
            output_signature=(self._service.element_spec, tf.TensorSpec([], tf.int64)),
        )


def finished(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, which neither TensorFlow nor Keras is to change."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False  # There is nothing to tune, and `fit` would wait for the end of the tuner.
    return dataset.with_options(options)


def _as_read(indices: tf.Tensor, lengths: tf.Tensor, ends: tf.Tensor, examples: Any) -> tuple[Any, tf.Tensor]:
    del indices, lengths
    return examples, ends


def _taken(dataset: tf.data.Dataset, tell: Callable[[np.ndarray], None] | None) -> tf.data.Dataset:
    """What a dataset of (batch or batches, which epochs begin after them) reads, without the latter.

    Args:
      dataset: Behind all that reads ahead.
      tell: Told which epoch begins, when what stands before it is taken.
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


def _made_here(batches: Batches, make: Make, use: Use) -> Iterator[Any]:
    for (rows, lengths), when in batches(make, use):
        yield rows, lengths, np.full(len(lengths), when.begins)


def _made_there(batches: Batches, serve: Callable[..., Any], use: Use) -> Iterator[Any]:
    def make(asked: Asked, handout: Handout) -> Made:
        for when, indices, batch in serve(asked, lambda: handout.closed, replica=use.place.own.start):
            yield when, [indices], batch

    for batch, when in batches(make, use):
        yield batch, when.begins
