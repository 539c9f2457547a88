"""Policy: bytes, messages and rounds of the exchange of a bucket, by codec and number of replicas. No TensorFlow.

In an all-reduce of S bytes over N replicas each replica sends at least 2 (N - 1) / N S bytes (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Sums and encoded buckets reach this
bound, except small sums and sparse codecs, of which each replica sends its whole bucket to all.
"""

import dataclasses

from tfdist.plan.exchange_costs import NONE
from tfdist.plan.planned_buckets import LOW_RANK, PlannedBucket, family

_WHOLE_BYTES = 48 << 10  # As in `strategies.collectives.transport`.
_SPARSE = ("topk",)


@dataclasses.dataclass(frozen=True)
class BucketTraffic:
    """The messages that each replica sends for a bucket.

    Attributes:
      sent_bytes: Bytes.
      messages: Number of messages.
      rounds: How many times a replica waits for messages of others before it can go on.
    """

    sent_bytes: float
    messages: int
    rounds: int

    def __add__(self, other: "BucketTraffic") -> "BucketTraffic":
        return BucketTraffic(
            self.sent_bytes + other.sent_bytes, self.messages + other.messages, self.rounds + other.rounds
        )


def traffic_of(bucket: PlannedBucket, codec: str, replicas: int, group_size: int | None = None) -> BucketTraffic:
    """Returns the traffic of a bucket, in one level or in groups of `group_size` replicas, at least 2 of them."""
    size = bucket.sent_bytes
    if family(codec) == LOW_RANK:  # Two sums: of the projections, and of the back projections.
        half = _sum(size / 2, replicas, group_size)
        return half + half
    if codec == NONE:
        return _sum(size, replicas, group_size)
    within, across = (replicas, 1) if group_size is None else (group_size, replicas // group_size)
    peers, levels = within + across - 2, 1 if across == 1 else 2
    if replicas == 2 or family(codec) in _SPARSE:
        return BucketTraffic(size * (replicas - 1), peers, levels)
    # Each replica gets its part of all buckets, which others pass on between groups, and sends its encoded sum to all.
    passed_on = ((within - 1) * across + (across - 1) * within) / replicas
    return BucketTraffic(size * (passed_on + (replicas - 1) / replicas), 2 * peers, 2 * levels)


def _sum(size: float, replicas: int, group_size: int | None) -> BucketTraffic:
    """Returns the traffic of the sum of a tensor of `size` bytes."""
    if group_size is None:
        if replicas == 2 or size * (replicas - 1) <= _WHOLE_BYTES:
            return BucketTraffic(size * (replicas - 1), replicas - 1, 1)
        return BucketTraffic(2 * size * (replicas - 1) / replicas, 2 * (replicas - 1), 2)
    groups = replicas // group_size
    if size * (group_size + groups - 2) <= _WHOLE_BYTES:
        return BucketTraffic(size * (group_size + groups - 2), group_size + groups - 2, 2)
    within = BucketTraffic(2 * size * (group_size - 1) / group_size, 2 * (group_size - 1), 2)
    return within + _sum(size / group_size, groups, None)
