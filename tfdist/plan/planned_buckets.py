"""Policy: the buckets in which gradients travel, as `strategies.collectives` fills them. Does not load TensorFlow."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from tfdist.plan.exchange_costs import NONE

LOW_RANK = "powersgd"
# As in `strategies.collectives.buckets`, and for low-rank codecs as in `power_sgd_group`.
_BUCKET_BYTES, _LEAST_BYTES, _MATRICES_BYTES = 4 << 20, 256 << 10, 16 << 20
_PARTS_BYTES = {2: 16 << 20}  # The largest part of a tensor that travels alone, by number of replicas.
_PART_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient of a model.

    Attributes:
      float_bytes: Bytes as float32.
      sent_bytes: Bytes of its encoding.
      coding_seconds: Time to encode and decode it, beside that of the codec of the step.
    """

    float_bytes: float
    sent_bytes: float
    coding_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class PlannedBucket:
    """Gradients that travel together.

    Attributes:
      made: The part of all gradients that exists when the bucket is complete, from 0 to 1.
      float_bytes: Bytes as float32.
      sent_bytes: Bytes of the encoding.
      coding_seconds: Sum of those of its gradients.
    """

    made: float
    float_bytes: float
    sent_bytes: float
    coding_seconds: float = 0.0


def family(codec: str) -> str:
    """The name of a codec without its options: "powersgd" of "powersgd(4)"."""
    return codec.partition("(")[0]


def fill_planned_buckets(gradients: Sequence[Gradient], codec: str, replicas: int) -> list[PlannedBucket]:
    """Returns the buckets of gradients, in the order in which they are complete.

    Args:
      gradients: The gradients in the order of the layers. The backward pass makes the last one first. One as large as
        a bucket travels alone, in equal parts. Others travel together, if they fit.
      codec: Name of the codec, or "none".
      replicas: Number of replicas, at least 2.
    """
    whole = sum(each.float_bytes for each in gradients)
    limit = _limit(gradients, codec)
    part = max(limit, _PARTS_BYTES.get(replicas, _PART_BYTES))
    filled: list[PlannedBucket] = []
    open_bucket: PlannedBucket | None = None
    made = 0.0
    for gradient in reversed(gradients):
        made += gradient.float_bytes / whole
        new = PlannedBucket(made, gradient.float_bytes, gradient.sent_bytes, gradient.coding_seconds)
        if gradient.float_bytes >= limit:
            parts = 1 if family(codec) == LOW_RANK else math.ceil(gradient.float_bytes / part)
            sizes = (new.float_bytes / parts, new.sent_bytes / parts, new.coding_seconds / parts)
            filled += [PlannedBucket(made, *sizes)] * parts
        elif open_bucket is not None and open_bucket.float_bytes + new.float_bytes <= limit:
            open_bucket = _joined(open_bucket, new)
        else:
            filled += [] if open_bucket is None else [open_bucket]
            open_bucket = new
    filled += [] if open_bucket is None else [open_bucket]
    return sorted(filled, key=lambda bucket: bucket.made)


def _joined(bucket: PlannedBucket, new: PlannedBucket) -> PlannedBucket:
    sent_bytes, coding = bucket.sent_bytes + new.sent_bytes, bucket.coding_seconds + new.coding_seconds
    return PlannedBucket(new.made, bucket.float_bytes + new.float_bytes, sent_bytes, coding)


def _limit(gradients: Sequence[Gradient], codec: str) -> float:
    """Returns the size limit of the buckets in bytes. For a small model it is half of the model without a codec."""
    if family(codec) == LOW_RANK:
        return _MATRICES_BYTES
    if codec != NONE:
        return _BUCKET_BYTES
    sums = list(itertools.accumulate(each.float_bytes for each in reversed(gradients)))
    half = next((held for held in sums if 2 * held >= sums[-1]), 0.0)
    return min(max(half, _LEAST_BYTES), _BUCKET_BYTES)
