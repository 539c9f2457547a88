"""Outputs of `predict`: without stand-in rows, and joined if each batch has another shape, as padded texts have.

Replicas then have outputs of different shapes, which collectives and `tf.concat` refuse. Each row carries its shape and
is padded where rows of several replicas become one tensor. At the end the padding is removed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.row_count import has_any


class PaddedRows(tf.experimental.ExtensionType):
    """Rows of the outputs of `predict` that have different shapes, padded to one shape.

    Keras joins `PaddedRows` like tensors, by `strategy.gather`, `tf.shape`, `tf.split` and `tf.concat`. The method
    `numpy` returns the result of `predict`.

    Attributes:
      values: The rows, padded with zeros (or empty strings), [rows, ...].
      sizes: The shape of each row without padding, int32 [rows, rank - 1].
    """

    values: tf.Tensor
    sizes: tf.Tensor

    def padded_to(self, sizes: tf.Tensor) -> tf.Tensor:
        """Returns the rows, padded further so that each has the shape `sizes`."""
        after = tf.concat([[0], sizes - tf.shape(self.values)[1:]], axis=0)
        return tf.pad(self.values, tf.stack([tf.zeros_like(after), after], axis=1))

    def numpy(self) -> np.ndarray | tf.RaggedTensor:
        """Returns an array if all rows have one shape, otherwise a ragged tensor, as Keras does for unequal batches."""
        sizes = self.sizes.numpy()
        most = sizes.max(axis=0) if len(sizes) else self.values.shape[1:]
        within = (slice(None), *(slice(size) for size in most))
        values = self.values[within]
        unlike = np.flatnonzero((sizes != most).any(axis=0))
        if not unlike.size:
            return values.numpy()
        lengths = [np.repeat(sizes[:, i], sizes[:, :i].prod(axis=1)) for i in range(unlike[-1] + 1)]
        return tf.RaggedTensor.from_tensor(values, lengths=[length.astype("int64") for length in lengths])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


def with_own_shapes(outputs: Any) -> Any:
    """Replaces tensors of unknown shape in a replica's outputs by `PaddedRows`.

    The graph must know the same dimensions on all replicas. Eager tensors do not show whether their shape depends on
    the batch, so all eager tensors with more than one dimension are replaced.
    """

    def replaced(leaf):
        if not isinstance(leaf, tf.Tensor) or (leaf.shape.rank or 0) < 2:
            return leaf
        if tf.is_symbolic_tensor(leaf) and leaf.shape[1:].is_fully_defined():
            return leaf
        shape = tf.shape(leaf)
        return PaddedRows(leaf, tf.tile(shape[None, 1:], [shape[0], 1]))

    return keras.tree.map_structure(replaced, outputs)


def gathered(local: Sequence[PaddedRows], gather: Callable[[Any, int], tf.Tensor]) -> PaddedRows:
    """Gathers the padded output rows of all replicas, for `predict`.

    Costs two exchanges of small tensors besides the rows: the largest shape, and the shapes of the rows. For `gather`
    see `tf.distribute.Strategy.gather`.
    """
    shapes = gather(tf_internals.regroup([tf.shape(rows.values)[None, 1:] for rows in local]), 0)
    most = tf.reduce_max(shapes, axis=0)
    values = gather(tf_internals.regroup([rows.padded_to(most) for rows in local]), 0)
    return PaddedRows(values, gather(tf_internals.regroup([rows.sizes for rows in local]), 0))


@tf.experimental.dispatch_for_api(tf.shape)
def _shape(input: PaddedRows, out_type=None, name=None):
    """Defines `tf.shape` of `PaddedRows`: the number of rows alone, since other dimensions differ between rows."""
    return tf.shape(input.values, out_type, name)[:1]


@tf.experimental.dispatch_for_api(tf.concat)
def _concat(values: list[PaddedRows], axis, name="concat"):
    del axis, name  # Keras joins along the first axis only.
    most = tf.reduce_max(tf.stack([tf.shape(rows.values)[1:] for rows in values]), axis=0)
    return PaddedRows(
        tf.concat([rows.padded_to(most) for rows in values], axis=0), tf.concat([rows.sizes for rows in values], axis=0)
    )


@tf.experimental.dispatch_for_api(tf.split)
def _split(value: PaddedRows, num_or_size_splits, axis=0, num=None, name="split"):
    parts = [tf.split(tensor, num_or_size_splits, axis, num, name) for tensor in (value.values, value.sizes)]
    return [PaddedRows(*part) for part in zip(*parts, strict=True)]


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
