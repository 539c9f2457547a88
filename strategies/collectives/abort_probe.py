"""Tells whether TensorFlow's collectives of this process are aborted, as after the loss of a worker."""

import tensorflow as tf

_PROBE_KEYS = 1 << 30  # Larger than the group keys of strategy k, which count up from 65536 * k + 1.


def raise_if_aborted(worker: int, *tokens: tf.Tensor) -> tf.Tensor:
    """Raises an error in the step if TensorFlow's collectives are aborted: runs one of this worker alone.

    Args:
      worker: The number of this worker.
      tokens: Handles by which TensorFlow orders operations that can fail.

    Returns:
      float32 [1], if they are not aborted.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=tf.zeros([1]),
        group_size=1,
        group_key=_PROBE_KEYS + worker,
        instance_key=1,
        ordering_token=tokens,
        merge_op="Add",
        final_op="Id",
    )
