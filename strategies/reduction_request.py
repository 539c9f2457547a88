"""The request by which a replica asks its strategy to sum or average values, such as gradients, over replicas."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.sharding.part_tensors import Division


@dataclasses.dataclass(frozen=True)
class ReductionRequest:
    """Values of one replica, to be summed or averaged over all replicas, and what is known of them."""

    reduce_op: tf.distribute.ReduceOp  # Sum or mean.
    # The values, equal in number, type and shape on all replicas; `IndexedSlices` may differ in their rows.
    values: Sequence[Gradient]
    # The optimizer that applies the values, if they are its gradients, which codecs may encode; else `None`.
    optimizer: Any = None
    variables: Sequence[Any] = ()  # The variables of the gradients; empty if unknown.
    options: Any = None  # TensorFlow's `CommunicationOptions`; encoded gradients do without them.
    # How each value is divided among the replicas, which get their part of the sum; `None` for a whole sum. Empty if no
    # value is divided.
    partitions: Sequence[Division | None] = ()
    cuts: bool = True  # Whether large values with a partition are cut, see `PartBuckets`.
    fragment: str = ""  # In words for warnings: the fragment of DiLoCo whose changes the values are, if it has several.
    what: str = "exchange other values"  # Says in error messages what the replica is about to do.
