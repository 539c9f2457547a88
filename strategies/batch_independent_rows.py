"""Sums rows of sparse gradients over replicas where needed to equal the gradients of one device.

Keras' adaptive optimizers and norms square each row of `tf.IndexedSlices` separately, so rows that one device would sum
first must be summed here too. There are two kinds: rows that do not depend on the batch, such as position embeddings,
and lookups with unique indices, as for sparse inputs. All other rows are concatenated.

Each replica finds the kind of a lookup in its graph. Kinds may differ, since the number of rows may be static on one
replica only. So each replica adds a head to its rows: one more row, with a unique index that encodes the kind. The
heads of all replicas, and a comparison of their indices, lead all replicas to the same decision.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.sparse import sum_duplicates
from tfdist.strategies.graph_analysis import may_differ
from tfdist.strategies.step import Step

# Kinds of lookups: dependent on the batch; independent; independent, on a replica without rows; unique indices.
_OF_BATCH, _FIXED, _FIXED_OF_NOTHING, _UNIQUE = range(4)
_KINDS = 4
# Operations that pass indices on unchanged, and the input they pass on. Keras handles negative indices with a select.
_PASSED_ON = {"Reshape": 0, "Identity": 0, "Cast": 0, "SelectV2": 2}


def with_heads(value: Any, step: Step | None) -> tuple[Any, Callable[[Any], Any]]:
    """Adds heads, rows that tell the kind of a lookup, to the sparse gradients in a nest, before replicas exchange it.

    Returns the nest with heads, and a function that turns the exchanged nest into the gradients of one device. Costs
    one row per replica and sparse gradient, and a copy of these. Does nothing in eager mode, which has no graph.
    """
    if tf.executing_eagerly():
        return value, lambda totals: totals
    leaves = tf.nest.flatten(value)
    kinds = [
        [_kind(indices, step) for indices in _lookups(leaf)] if isinstance(leaf, tf.IndexedSlices) else []
        for leaf in leaves
    ]
    headed = [_headed(*each, step) for each in zip(leaves, kinds, strict=True)]

    def without_heads(totals: Any) -> Any:
        pairs = zip(tf.nest.flatten(totals), kinds, strict=True)
        return tf.nest.pack_sequence_as(totals, [_without_heads(*each) for each in pairs])

    return tf.nest.pack_sequence_as(value, headed), without_heads


def _lookups(slices):
    """The indices of each lookup in a table, from its sparse gradient. TensorFlow concatenates those of several."""
    operation = slices.indices.op
    return list(operation.inputs[:-1]) if operation.type == "ConcatV2" else [slices.indices]


def _kind(indices, step):
    while indices.op.type in _PASSED_ON:
        indices = indices.op.inputs[_PASSED_ON[indices.op.type]]
    if indices.op.type.startswith("Unique"):
        return _UNIQUE
    if may_differ(indices, strict=False):
        return _OF_BATCH
    return _OF_BATCH if _may_be_for_each_row(indices.shape, step) else _FIXED


def _may_be_for_each_row(shape, step):
    """Whether indices of this shape, although constant in the graph, may hold one entry per row of the batch."""
    if shape.rank is None:
        return True
    if shape.rank < 2 or shape[0] == 1:
        return False
    rows = None if step is None or step.model is None else step.rows
    return rows is None or (isinstance(rows, int) and shape[0] == rows)


def _headed(leaf, kinds, step):
    if not kinds:
        return leaf
    parts = _lookups(leaf)
    values = tf.split(leaf.values, [tf.size(part) for part in parts]) if len(parts) > 1 else [leaf.values]
    indices = []
    for place, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        head = tf.constant(kind)
        if kind == _FIXED and step is not None:
            head = tf.where(step.has_rows, head, _FIXED_OF_NOTHING)
        dtype = leaf.indices.dtype
        indices += [tf.cast(head + _KINDS * place, dtype)[None] + dtype.min, tf.cast(part, dtype)]
    above = [[1, 0]] + [[0, 0]] * (leaf.values.shape.rank - 1)
    headed = tf.concat([tf.pad(part, above) for part in values], axis=0)
    return tf.IndexedSlices(headed, tf.concat(indices, axis=0), leaf.dense_shape)


def _without_heads(total, kinds):
    if not kinds:
        return total
    least = total.indices.dtype.min
    is_head = total.indices < least + _KINDS * len(kinds)
    if kinds == [_OF_BATCH]:  # The usual case, in which the owners of rows do not matter.
        values = tf.ensure_shape(tf.boolean_mask(total.values, ~is_head), [None, *total.values.shape[1:]])
        return tf.IndexedSlices(values, tf.boolean_mask(total.indices, ~is_head), total.dense_shape)
    heads = tf.cast(tf.boolean_mask(total.indices, is_head) - least, tf.int32)  # [replicas * lookups]
    owners = tf.cumsum(tf.cast(is_head, tf.int32)) - 1
    parts = []
    for place, kind in enumerate(kinds):
        is_own = heads // _KINDS == place
        rows = ~is_head & tf.gather(is_own, owners)
        of_replica = tf.gather(tf.cumsum(tf.cast(is_own, tf.int32)) - 1, tf.boolean_mask(owners, rows))
        joined = tf.boolean_mask(total.values, rows), tf.boolean_mask(total.indices, rows)
        parts.append(_as_one_device(kind, joined, tf.boolean_mask(heads, is_own) % _KINDS, of_replica))
    values, indices = (tf.concat(part, axis=0) for part in zip(*parts, strict=True))
    return tf.IndexedSlices(tf.ensure_shape(values, [None, *total.values.shape[1:]]), indices, total.dense_shape)


def _as_one_device(kind, joined, heads, owners):
    """Values and indices of the sparse gradient that one device would have for one lookup in a table.

    Args:
      kind: The kind of the lookup that this replica found.
      joined: Values and indices of all replicas, [rows, ...] and [rows].
      heads: The kind of the lookup that each replica found, [replicas].
      owners: The replica of each row, [rows].
    """
    if kind == _UNIQUE:
        slices = tf.IndexedSlices(*joined)
        return tf.cond(tf.reduce_all(heads == kind), lambda: _parts(sum_duplicates(slices)), lambda: joined)
    return _added_up(*joined, heads, owners) if kind == _FIXED else joined


def _parts(slices):
    return slices.values, slices.indices


def _added_up(values, indices, heads, owners):
    """The indices of one replica and the values summed over replicas, if all with rows have the same indices."""
    counts = heads == _FIXED
    lengths = tf.boolean_mask(tf.math.bincount(owners, minlength=tf.size(heads)), counts)
    are_fixed = tf.reduce_all(counts | (heads == _FIXED_OF_NOTHING)) & (tf.size(lengths) > 0)
    is_counted = tf.gather(counts, owners)

    def of_each(tensor):  # [rows, ...] -> [replicas with rows, rows per replica, ...]
        kept = tf.boolean_mask(tensor, is_counted)
        return tf.reshape(kept, tf.concat([[tf.size(lengths), lengths[0]], tf.shape(kept)[1:]], axis=0))

    def if_alike():
        own = of_each(indices)
        added = functools.partial(tf.reduce_sum, of_each(values), axis=0)
        return tf.cond(tf.reduce_all(own == own[:1]), lambda: (added(), own[0]), lambda: (values, indices))

    are_alike = are_fixed & tf.reduce_all(lengths == lengths[:1])
    return tf.cond(are_alike, if_alike, lambda: (values, indices))
