"""Which replicas are a worker's own, and which part of a global batch each replica gets."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.counts import as_count


@dataclasses.dataclass(frozen=True)
class Place:
    """Who reads: one worker of some, with the limits of all.

    Attributes:
      replicas: Of all workers.
      own: The numbers of this worker's.
      parts: By replica, which part of a global batch it gets, counted from its beginning.
      at_most: By replica, the most rows that it takes.
    """

    replicas: int
    own: range
    parts: tuple[int, ...]
    at_most: tuple[int, ...]

    @classmethod
    def of(cls, context: tf.distribute.InputContext, global_batch_size: int, max_rows: Any) -> "Place":
        """The place that a context says.

        Raises:
          ValueError: If a global batch has fewer examples than there are replicas, or `max_rows` leaves no room for it.
        """
        replicas, workers = context.num_replicas_in_sync, context.num_input_pipelines
        worker, devices = context.input_pipeline_id, replicas // workers
        if global_batch_size < replicas:
            raise ValueError(
                f"A global batch needs an example for each replica, but global_batch_size is {global_batch_size} and "
                f"there are {replicas} replicas. Make it larger, or use fewer."
            )
        # Keras' `predict` puts outputs together device by device, and worker by worker within.
        parts = tuple(device * workers + number for number in range(workers) for device in range(devices))
        own = range(worker * devices, (worker + 1) * devices)
        return cls(replicas, own, parts, _limits(replicas, global_batch_size, max_rows))


def _limits(replicas: int, size: int, max_rows: Any) -> tuple[int, ...]:
    given: Any = size if max_rows is None else max_rows
    each = list(given) if isinstance(given, Sequence | np.ndarray) else [given] * replicas
    limits = [limit for limit in map(as_count, each) if limit is not None]
    if not len(limits) == len(each) == replicas or sum(limits) < size:
        raise ValueError(
            f"max_rows must leave room for a global batch of {size} on {replicas} replicas, one whole number from 1 up "
            f"or one for each replica, but it is {max_rows!r}."
        )
    return tuple(min(limit, size) for limit in limits)
