"""The request by which a replica asks its strategy to sum or average values, such as gradients, over replicas."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.transport import Gradient


@dataclasses.dataclass(frozen=True)
class ReductionRequest:
    """Values of one replica, to be summed or averaged over all replicas, and what is known of them.

    Attributes:
      reduce_op: Sum or mean.
      values: The values, equal in number, type and shape on all replicas; `IndexedSlices` may differ in their rows.
      optimizer: The optimizer that applies the values, if they are its gradients, which codecs may encode; else `None`.
      variables: The variables of the gradients; empty if unknown.
      options: TensorFlow's `CommunicationOptions`; encoded gradients do without them.
    """

    reduce_op: tf.distribute.ReduceOp
    values: Sequence[Gradient]
    optimizer: Any = None
    variables: Sequence[Any] = ()
    options: Any = None
