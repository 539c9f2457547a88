"""All-reduce of `tf.IndexedSlices`, the gradients of embeddings."""

import tensorflow as tf

from tfdist.strategies.collectives.launcher import Launcher


def sum_duplicates(slices: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Adds up rows of equal index, so that the order in which they are later scattered cannot change the bits."""
    if not isinstance(slices, tf.IndexedSlices):
        return slices
    indices, segment = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, segment, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def all_reduce_sparse(slices: tf.IndexedSlices, launcher: Launcher, group_size: int, options) -> tf.IndexedSlices:
    """Joins the `slices` of all replicas; each may hold another number of rows, also none.

    Rows of equal index stay apart, as they are on one device: Keras' adaptive optimizers square each by itself.
    Traffic a replica: (replicas - 1) times the rows of the longest.

    Returns:
      Slices in the order of replicas, the same on all.
    """
    lengths = launcher.all_gather_rows(tf.shape(slices.indices), options)  # [replicas]
    longest = tf.reduce_max(lengths)

    def gather(rows: tf.Tensor) -> tf.Tensor:  # [own rows, ...] -> [all rows, ...]
        # The collective needs equal shapes, so shorter replicas pad; what is padded is masked away on arrival.
        padding = [[0, longest - tf.shape(rows)[0]]] + [[0, 0]] * (rows.shape.rank - 1)
        everyone = launcher.all_gather_rows(tf.pad(rows, padding), options)
        return tf.boolean_mask(everyone, tf.reshape(tf.sequence_mask(lengths, longest), [group_size * longest]))

    # All-gather has no bfloat16 kernel.
    values = tf.cast(slices.values, tf.float32) if slices.values.dtype == tf.bfloat16 else slices.values
    return tf.IndexedSlices(tf.cast(gather(values), slices.values.dtype), gather(slices.indices), slices.dense_shape)
