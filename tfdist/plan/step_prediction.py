"""Policy: predicts the time of a training step from its gradients, the link and the costs of an exchange.

    compute   forward ──── backward: gradients from the last layer to the first ─┐
    coding                    bucket 1 │ bucket 2 │ ...                          ├─ step
    link                         bucket 1 ─────── bucket 2 ─────── ...  ─────────┘

A bucket travels when its gradients exist, it is encoded and the link is free. In an all-reduce of S bytes over N
replicas each replica sends 2 (N - 1) / N S bytes, which is the least possible (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009). Does not load TensorFlow.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from tfdist.plan.exchange_costs import ExchangeCosts

BUCKET_BYTES = 4 << 20  # As in `strategies.collectives.buckets`.
_PHASES = 2  # A sum travels to its owner, and from there to all.


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient of a model.

    Attributes:
      float_bytes: Bytes of the gradient itself.
      sent_bytes: Bytes of its encoding.
    """

    float_bytes: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The computation and the gradients of a step on each replica.

    Attributes:
      compute_seconds: Forward and backward pass and update of a replica alone.
      gradients: The gradients in the order of the layers. The backward pass makes the last one first.
      codec: Name of the codec, such as "int8", or "none".
      forward_share: Part of the time of the computation before the first gradient.
    """

    compute_seconds: float
    gradients: Sequence[Gradient]
    codec: str
    forward_share: float = 1 / 3


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

    Coding delays the backward pass, since both run on the same device.

    Args:
      step: Computation and gradients.
      replicas: Number of replicas.
      link_bits: Bits per second that a replica can send.
      costs: Costs of the exchange beside the link.
    """
    if replicas == 1:
        return Prediction(1, step.codec, step.compute_seconds, step.compute_seconds, 0.0, 0)
    share = 2 * (replicas - 1) / replicas
    per_byte = costs.seconds_per_byte(step.codec) or 0.0
    coded = link_free = sent = arrived = 0.0
    buckets = list(_buckets(step))
    for ready, bucket in buckets:
        coding = bucket.float_bytes * per_byte
        encoded_at = ready + coded + coding / 2  # The first half encodes, the second decodes.
        coded += coding
        own = share * bucket.sent_bytes
        sent += own
        messages = _PHASES * (replicas - 1)
        link_free = max(link_free, encoded_at) + own * 8 / link_bits + messages * costs.message_seconds
        arrived = link_free + costs.latency_seconds + coding / 2
    seconds = max(step.compute_seconds + coded, arrived)
    messages = len(buckets) * _PHASES * (replicas - 1)
    return Prediction(replicas, step.codec, seconds, step.compute_seconds, sent, messages)


def _buckets(step: PlannedStep) -> Iterator[tuple[float, Gradient]]:
    """Yields buckets of gradients, each with the time at which the last of them exists.

    The backward pass is taken to need time in proportion to the bytes of a gradient.
    """
    whole = sum(each.float_bytes for each in step.gradients)
    begin = step.forward_share * step.compute_seconds
    made = held = encoded = 0.0
    for gradient in reversed(step.gradients):
        made += gradient.float_bytes
        held += gradient.float_bytes
        encoded += gradient.sent_bytes
        if held >= BUCKET_BYTES:
            exists = begin + (step.compute_seconds - begin) * made / whole
            parts = round(held / BUCKET_BYTES)
            yield from [(exists, Gradient(held / parts, encoded / parts))] * parts
            held = encoded = 0.0
    if held:
        yield step.compute_seconds, Gradient(held, encoded)
