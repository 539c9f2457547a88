"""Policy: predicts the time of a training step from its gradients, the link and the costs of an exchange.

    compute   forward ──── backward: gradients from the last layer to the first ─┐
    coding, messages          bucket 1 │ bucket 2 │ ...                          ├─ step
    link                         bucket 1 ─────── bucket 2 ─────── ...  ─────────┘

A bucket travels when its gradients exist, it is encoded and the link is free. Does not load TensorFlow.
"""

import dataclasses
from collections.abc import Sequence

from tfdist.plan.bucket_traffic import BucketTraffic, traffic_of
from tfdist.plan.exchange_costs import ExchangeCosts
from tfdist.plan.planned_buckets import Gradient, fill_planned_buckets


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The computation and the gradients of a step on each replica.

    Attributes:
      compute_seconds: Forward and backward pass and update of a replica alone.
      gradients: The gradients in the order of the layers. The backward pass makes the last one first.
      codec: Name of the codec, such as "int8", or "none".
      forward_share: Part of the time of the computation before the first gradient.
      codes_elsewhere: Whether another processor than that of the computation encodes and decodes.
      group_size: Replicas of a group, if exchanges go in two levels; see `exchange_group_size` of the strategy.
    """

    compute_seconds: float
    gradients: Sequence[Gradient]
    codec: str
    forward_share: float = 1 / 3
    codes_elsewhere: bool = False
    group_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted step of one codec and number of replicas.

    Attributes:
      replicas: Number of replicas.
      codec: Name of the codec, or "none".
      seconds: Time of the step.
      compute_seconds: The part in which a replica computes, as it does alone.
      sent_bytes: Bytes that each replica sends in a step.
      messages: Messages that each replica sends in a step.
    """

    replicas: int
    codec: str
    seconds: float
    compute_seconds: float
    sent_bytes: float
    messages: int

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the time of a replica alone divided by the time of the step."""
        return self.compute_seconds / self.seconds

    @property
    def speedup(self) -> float:
        """How many times as many rows per second the replicas train as one alone."""
        return self.replicas * self.efficiency


def predict_step(step: PlannedStep, replicas: int, link_bits: float, costs: ExchangeCosts) -> Prediction:
    """Predicts the time of a step in which replicas exchange all gradients.

    Coding delays the backward pass if both run on the same device. Messages are the work of the host.

    Args:
      step: Computation and gradients.
      replicas: Number of replicas.
      link_bits: Bits per second that a replica can send.
      costs: Costs of the exchange beside the link.
    """
    if replicas == 1:
        return Prediction(1, step.codec, step.compute_seconds, step.compute_seconds, 0.0, 0)
    per_byte = costs.seconds_per_byte(step.codec) or 0.0
    begin = step.forward_share * step.compute_seconds
    coded = worker_free = link_free = arrived = 0.0
    total = BucketTraffic(0.0, 0, 0)
    for bucket in fill_planned_buckets(step.gradients, step.codec, replicas):
        own = traffic_of(bucket, step.codec, replicas, step.group_size)
        coding = bucket.float_bytes * per_byte + bucket.coding_seconds
        work = coding + own.messages * costs.message_seconds
        exists = begin + (step.compute_seconds - begin) * bucket.made
        exists += 0.0 if step.codes_elsewhere else coded
        sent_at = max(exists, worker_free) + work / 2  # The first half encodes and sends, the second receives.
        worker_free = sent_at + work / 2
        coded += coding
        link_free = max(link_free, sent_at) + own.sent_bytes * 8 / link_bits
        arrived = max(link_free + own.rounds * costs.latency_seconds + work / 2, worker_free)
        total += own
    seconds = max(step.compute_seconds + (0.0 if step.codes_elsewhere else coded), arrived)
    return Prediction(replicas, step.codec, seconds, step.compute_seconds, total.sent_bytes, total.messages)
