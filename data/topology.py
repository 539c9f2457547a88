"""The replicas of a worker, and the part of a global batch that each replica of the cluster gets."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.validation import as_count
from tfdist.readable_numbers import counted

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ReplicaTopology:
    """Which replicas of the cluster belong to one worker, and which part of a global batch each replica gets."""

    replicas: int  # Number of replicas on all workers.
    own: range  # Numbers of the replicas of this worker.
    parts: tuple[int, ...]  # For each replica the index of its part of a global batch.
    at_most: tuple[int, ...]  # For each replica the largest number of rows of a global batch.
    is_alone: bool = False  # Whether they evaluate all rows by themselves, while the job has more replicas.

    @classmethod
    def of(
        cls, context: "tf.distribute.InputContext", global_batch_size: int, max_rows: Any, largest: int | None = None
    ) -> "ReplicaTopology":
        """Returns which replicas a worker has, from the `tf.distribute` input context of that worker.

        Args:
          context: The input context.
          global_batch_size: The smallest global batch.
          max_rows: The largest number of rows per replica, one number or one per replica; `None` for no limit.
          largest: The largest global batch, if the size may change.

        Raises:
          ValueError: If a global batch has fewer examples than there are replicas, or more than `max_rows` allows.
        """
        replicas, workers = context.num_replicas_in_sync, context.num_input_pipelines
        worker, devices = context.input_pipeline_id, replicas // workers
        if global_batch_size < replicas:
            raise ValueError(
                f"A global batch must hold at least one example per replica, but global_batch_size is "
                f"{global_batch_size} for {counted(replicas, 'replica')}. Use a larger batch, or fewer replicas."
            )
        # Keras' `predict` concatenates outputs by device first, and by worker within a device.
        parts = tuple(device * workers + number for number in range(workers) for device in range(devices))
        own = range(worker * devices, (worker + 1) * devices)
        return cls(replicas, own, parts, _limits(replicas, largest or global_batch_size, max_rows))


def _limits(replicas: int, size: int, max_rows: Any) -> tuple[int, ...]:
    given: Any = size if max_rows is None else max_rows
    each = list(given) if isinstance(given, Sequence | np.ndarray) else [given] * replicas
    limits = [limit for limit in map(as_count, each) if limit is not None]
    if not len(limits) == len(each) == replicas or sum(limits) < size:
        raise ValueError(
            f"max_rows must leave room for a global batch of {size} on {counted(replicas, 'replica')}, and must be an "
            f"integer of at least 1 or a list of one integer per replica, got {max_rows!r}. Use larger limits, or a "
            "smaller batch."
        )
    return tuple(min(limit, size) for limit in limits)
