"""Packs tensors into buckets, so that few collectives carry many small tensors."""

import tensorflow as tf

# Large enough to hide latency, small enough that the first bucket leaves while the backward pass still runs.
BUCKET_BYTES = 4 << 20


def fill_buckets(tensors: list[tf.Tensor], bucket_bytes: int = BUCKET_BYTES) -> list[list[int]]:
    """Groups tensors into buckets of one dtype, last tensor first.

    Gradients appear from the last layer to the first, so the last tensors are exchanged first. A tensor as large as a
    bucket, or of unknown size, travels alone, which spares the copy into the bucket and back.

    Returns:
      Lists of positions in `tensors`; the same for the same shapes and dtypes, so equal on all replicas.
    """
    buckets: list[list[int]] = []
    filling: dict[tf.DType, tuple[list[int], int]] = {}
    for position in reversed(range(len(tensors))):
        tensor = tensors[position]
        elements = tensor.shape.num_elements()
        size = bucket_bytes if elements is None else elements * tensor.dtype.size
        if size >= bucket_bytes:
            buckets.append([position])
            continue
        bucket, filled = filling.get(tensor.dtype, ([], bucket_bytes))
        if filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(position)
        filling[tensor.dtype] = (bucket, filled + size)
    return buckets


def pack(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Joins the tensors of a bucket: shapes [...], one dtype -> [total elements]."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def unpack(bucket: tf.Tensor, like: list[tf.Tensor]) -> list[tf.Tensor]:
    """Takes a bucket apart again: [total elements] -> the shapes of `like`."""
    if len(like) == 1:
        return [tf.reshape(bucket, tf.shape(like[0]))]
    parts = tf.split(bucket, [tf.size(tensor) for tensor in like])
    return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, like, strict=True)]
