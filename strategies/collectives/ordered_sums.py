"""Sums of rows in a fixed order, so that they have the same bits on all ranks, in graphs and of received bytes."""

import numpy as np
import tensorflow as tf

# On CPUs TensorFlow adds up to 15 rows one after another. From 16 on it adds some columns as four interleaved sums.
_ROWS_IN_ORDER = 15
# Types of which NumPy's sums have the bits of TensorFlow's. TensorFlow adds bfloat16 with more bits, and NumPy takes
# long to add float16.
ADDED_OUTSIDE = (tf.float32, tf.float64, tf.int32, tf.int64)


def sum_in_order(rows: tf.Tensor, *, keepdims: bool = False) -> tf.Tensor:
    """Adds rows one after another, so that the bits of the sum do not depend on timing: [rows, ...] -> [...].

    With `keepdims` the sum is one row, [1, ...].

    Takes few operations for each factor of 15 in the number of rows. More than 15 rows are added in groups of up to 15
    consecutive rows, and then the sums of the groups.
    """
    if rows.shape[0] > 2 and rows.shape[1:].num_elements() == 1:  # TensorFlow adds one column in an order of its own.
        column = tf.reshape(rows, [-1, 1])
        shape = [*[1] * keepdims, *rows.shape[1:]]
        return tf.reshape(sum_in_order(tf.concat([column, column], axis=1))[0], shape)
    if rows.shape[0] == 2:
        total = tf.add(*tf.unstack(rows))
        return tf.expand_dims(total, 0) if keepdims else total
    while rows.shape[0] > _ROWS_IN_ORDER:
        groups = -(-rows.shape[0] // _ROWS_IN_ORDER)
        padding = groups * _ROWS_IN_ORDER - rows.shape[0]
        rows = tf.pad(rows, [[0, padding], *[[0, 0]] * (rows.shape.rank - 1)])
        static = [groups, _ROWS_IN_ORDER, *rows.shape[1:]]
        if rows.shape.is_fully_defined():
            rows = tf.reshape(rows, static)
        else:
            shape = tf.concat([[groups, _ROWS_IN_ORDER], tf.shape(rows)[1:]], axis=0)
            rows = tf.ensure_shape(tf.reshape(rows, shape), static)
        rows = tf.reduce_sum(rows, axis=1)
    return tf.reduce_sum(rows, axis=0, keepdims=keepdims)


def add_in_order(rows: np.ndarray, total: np.ndarray) -> None:
    """Adds rows as `sum_in_order` does, outside of TensorFlow: [rows, n] into `total` [n], in a thread of the caller.

    The sum has the same bits, except that TensorFlow takes numbers below the least normal one (1e-38 for float32) as 0.
    It is several times faster for many rows, and does not wait for TensorFlow's threads while these compute.
    """
    while len(rows) > _ROWS_IN_ORDER:
        groups = [rows[start : start + _ROWS_IN_ORDER] for start in range(0, len(rows), _ROWS_IN_ORDER)]
        rows = np.empty([len(groups), rows.shape[1]], rows.dtype)
        for group, group_total in zip(groups, rows, strict=True):
            add_in_order(group, group_total)
    total[:] = rows[0]
    if len(rows) > 2:
        total += 0  # TensorFlow begins with 0 here, which turns -0 into 0.
    for row in rows[1:]:
        total += row
