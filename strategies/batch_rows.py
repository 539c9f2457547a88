"""Counts the rows of a batch, and gives batches and outputs the rows or shapes that all replicas agree on."""

from typing import Any

import keras
import tensorflow as tf


def has_any(rows: int | tf.Tensor | None) -> bool | tf.Tensor:
    """Whether there are rows, True or bool []; True if their number is unknown."""
    return True if rows is None or (isinstance(rows, int) and rows > 0) else tf.convert_to_tensor(rows) > 0


def only_rows(outputs: Any, rows: int | tf.Tensor | None) -> Any:
    """Returns a model's outputs, without the outputs for a stand-in row on a replica without rows."""
    has_rows = has_any(rows)
    if has_rows is True:
        return outputs

    def cut(leaf):
        if not isinstance(leaf, tf.Tensor | tf.RaggedTensor) or leaf.shape.rank in (0, None):
            return leaf
        return tf.cond(has_rows, lambda: leaf, lambda: leaf[:0])

    return keras.tree.map_structure(cut, outputs)


def any_rows(values: list[Any]) -> int | tf.Tensor | None:
    """Returns 1 if one of several batches has rows, else 0; `None` if no value is a batch."""
    kinds = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
    counts = [count_rows(value) for value in values if isinstance(value, kinds)]
    counts = [count for count in counts if count is not None]
    if any(isinstance(count, int) and count for count in counts):
        return 1
    return tf.minimum(tf.reduce_max(tf.stack(counts)), 1) if counts else None


def count_rows(data: Any) -> int | tf.Tensor | None:
    """Counts the rows of a batch as Keras does: the first dimension of the first input; `None` if it has none."""
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:  # Only a custom step can unpack this batch.
        x = data
    first = next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)
    if first is None:
        return None
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    first = tf.convert_to_tensor(first)
    if first.shape.rank == 0:
        return None
    return first.shape[0] if first.shape.rank and first.shape[0] is not None else tf.shape(first)[0]


def of_shapes_in(data: Any, spec: Any) -> Any:
    """Gives `data` the static dimensions of its dataset's spec, except for the number of rows.

    A graph that is traced on a batch knows the dimensions of that batch, which may differ between replicas. Decisions
    of replicas that use the shapes in the graph must not depend on them.
    """
    leaves, specs = tf.nest.flatten(data), tf.nest.flatten(spec)
    if len(leaves) != len(specs):
        return data
    return tf.nest.pack_sequence_as(data, [_of_shape_in(*each) for each in zip(leaves, specs, strict=True)])


def _of_shape_in(leaf, spec):
    if not tf.is_symbolic_tensor(leaf) or not isinstance(spec, tf.TensorSpec) or not leaf.shape.rank:
        return leaf
    if spec.shape.rank != leaf.shape.rank or spec.shape[1:].as_list() == leaf.shape[1:].as_list():
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [leaf.shape[0], *spec.shape[1:]])
