"""Buckets of gradients: large ones are cut and small ones joined, so that collectives are few and none takes long."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import tensorflow as tf

# Large enough to hide latency, small enough that the first bucket leaves while the backward pass still runs.
BUCKET_BYTES = 4 << 20
_LEAST_BYTES = 256 << 10
# Tensors with more elements than this on average are sliced out of a bucket, mostly without a copy. Smaller ones are
# copied by one `tf.split`, since a slice of each tensor would be three operations.
_SLICED_ELEMENTS = 1 << 14


def bucket_bytes(tensors: Sequence[tf.Tensor]) -> int:
    """The size limit of the buckets for these tensors, in bytes.

    For a small model it is the size of the last tensors that together make up half of the model. Larger buckets would
    not leave before the backward pass ends, and smaller ones would need a third bucket for a few bytes.
    """
    sums = list(itertools.accumulate(known_bytes(tensor) for tensor in reversed(tensors)))
    first = next((held for held in sums if 2 * held >= sums[-1]), 0)
    return min(max(first, _LEAST_BYTES), BUCKET_BYTES)


def known_bytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor, or 0 if its shape is not static."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def part_bytes(ranks: int) -> int:
    """The size limit, in bytes, for the parts of a tensor larger than a bucket, for sums in the order of ranks.

    Joining the parts again costs a copy. With more than two ranks smaller parts pay off, because each part travels
    twice and other parts use the link in between.
    """
    return (16 if ranks == 2 else 8) << 20


class Segment(NamedTuple):
    """A tensor's part in a bucket: the elements from `start` to `stop` of the flat tensor, or all if `stop` is None."""

    tensor: int
    start: int = 0
    stop: int | None = None

    def of(self, flat: tf.Tensor) -> tf.Tensor:
        """Slices the segment out of its flattened tensor: [tensor's elements] -> [elements]."""
        is_whole = self.stop is None or (self.start == 0 and self.stop == flat.shape[0])
        return flat if is_whole else flat[self.start : self.stop]

    def bytes_of(self, tensor: tf.Tensor) -> int:
        """Bytes of the segment of `tensor`, or 0 if the size is not static."""
        return 0 if self.stop is None else (self.stop - self.start) * tensor.dtype.size

    def padded(self, granule: int) -> int:
        """Number of elements of the segment, rounded up to a multiple of `granule`, which a codec encodes as a unit."""
        stop = cast(int, self.stop)  # Only tensors of static size are encoded.
        return -(-(stop - self.start) // granule) * granule


Bucket = list[Segment]


def fill_buckets(
    tensors: Sequence[tf.Tensor], limit_bytes: int = BUCKET_BYTES, granule: int = 1, part_bytes: int = 0
) -> list[Bucket]:
    """Distributes tensors of one dtype over buckets of at most `limit_bytes`, starting with the last tensor.

    The backward pass yields gradients from the last layer to the first, so the last tensors are exchanged first. A
    tensor as large as a bucket travels alone, in equal parts. A tensor of unknown size travels alone and whole.

    Tensors are cut at multiples of `granule` elements, and count as padded to such a multiple. Parts of a tensor that
    travels alone have up to `part_bytes`, if that is larger than `limit_bytes`. The buckets depend on shapes and dtypes
    alone, so they are equal on all replicas.
    """
    buckets: list[Bucket] = []
    open_bucket: Bucket | None = None
    filled = 0
    for position in reversed(range(len(tensors))):
        tensor = tensors[position]
        elements = tensor.shape.num_elements()
        if elements is None:
            buckets.append([Segment(position)])
            continue
        limit = max(limit_bytes // tensor.dtype.size // granule, 1) * granule
        if elements >= limit:
            part = max(limit, part_bytes // tensor.dtype.size // granule * granule)
            buckets += [[Segment(position, start, stop)] for start, stop in _cut(elements, part, granule)]
            continue
        segment = Segment(position, 0, elements)
        if open_bucket is None or filled + segment.padded(granule) > limit:
            open_bucket, filled = [], 0
            buckets.append(open_bucket)
        open_bucket.append(segment)
        filled += segment.padded(granule)
    return buckets


def _cut(elements: int, limit: int, granule: int) -> list[tuple[int, int]]:
    """Cuts a large tensor into ranges of equal size, apart from the last, so that few shapes are compiled."""
    parts = -(-elements // limit)
    size = -(-elements // (parts * granule)) * granule
    return [(start, min(start + size, elements)) for start in range(0, elements, size)]


def join(
    bucket: Bucket, tensors: Sequence[tf.Tensor], granule: int = 1, multiple: int = 1, *, repeats: bool = False
) -> tf.Tensor:
    """Concatenates the parts of tensors in a bucket, to be sent as one tensor: shapes [...] -> [elements].

    Each segment is padded to a multiple of `granule`, with zeros or, if `repeats`, with copies of its last elements.
    The whole is then padded with zeros to a multiple of `multiple`.
    """
    flat = []
    total = 0
    for segment in bucket:
        tensor = tensors[segment.tensor]
        is_flat = tf.TensorShape(tensor.shape).rank == 1  # The rank may be unknown, and `tensor` may be an array.
        part = segment.of(tensor if is_flat else tf.reshape(tensor, [-1]))
        flat.append(part)
        if segment.stop is None:
            continue
        elements = segment.stop - segment.start
        padding = segment.padded(granule) - elements
        total += elements + padding
        if padding and repeats:
            last = part[-(elements % granule) :]
            flat.append(tf.tile(last, [-(-padding // last.shape[0])])[:padding])
        elif padding:
            flat.append(tf.zeros([padding], part.dtype))
    if total % multiple:
        flat.append(tf.zeros([multiple - total % multiple], flat[0].dtype))
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def separate(
    buckets: list[Bucket], totals: list[tf.Tensor], like: Sequence[tf.Tensor], granule: int = 1
) -> list[tf.Tensor]:
    """Splits summed buckets, the inverse of `join`: [elements] each -> tensors of the shapes and dtypes of `like`."""
    parts: dict[int, list[tuple[int, tf.Tensor]]] = {position: [] for position in range(len(like))}
    for bucket, total in zip(buckets, totals, strict=True):
        for segment, part in zip(bucket, _split(bucket, total, granule), strict=True):
            parts[segment.tensor].append((segment.start, part))
    separated = []
    for position, tensor in enumerate(like):
        flat = [part for _, part in sorted(parts[position], key=lambda placed: placed[0])]
        whole = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        shape = tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)
        whole = tf.cast(whole, tensor.dtype)
        if whole.shape != tensor.shape or not tensor.shape.is_fully_defined():
            whole = tf.reshape(whole, shape)
        separated.append(whole if whole.shape == tensor.shape else tf.ensure_shape(whole, tensor.shape))
    return separated


def _split(bucket, total, granule):
    """Splits a joined bucket into its segments, without their padding."""
    if bucket[0].stop is None:
        return [total]
    sizes = [segment.stop - segment.start for segment in bucket]
    padded = [segment.padded(granule) for segment in bucket]
    if len(bucket) == 1 and total.shape[0] == sizes[0]:
        return [total]
    if len(bucket) == 1 or sum(padded) > len(bucket) * _SLICED_ELEMENTS:
        starts = itertools.accumulate(padded, initial=0)
        return [tf.slice(total, [start], [size]) for start, size in zip(starts, sizes, strict=False)]
    parts = tf.split(total, [*padded, -1])
    return [part if part.shape[0] == size else part[:size] for part, size in zip(parts, sizes, strict=False)]
