"""Sums of rows that have the same bits on all ranks and with any number of threads."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.collectives.ordered_sums import ADDED_OUTSIDE, add_in_order, sum_in_order

pytestmark = pytest.mark.unit

# Sizes around the widths of vector instructions and the blocks of TensorFlow's threads.
SIZES = [1, 2, 3, 17, 4099, 300_001]


def random_rows(rows, size):
    draws = np.random.default_rng([rows, size])
    return (draws.normal(size=[rows, size]) * 10.0 ** draws.integers(-3, 4, [rows, 1])).astype(np.float32)


def added(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 14, 15])
def test_rows_are_added_one_after_another(count, size):
    rows = random_rows(count, size)

    np.testing.assert_array_equal(sum_in_order(tf.constant(rows)), added(rows))


@pytest.mark.parametrize("size", SIZES[:5])
@pytest.mark.parametrize("count", [16, 30, 31, 256])
def test_many_rows_are_added_in_groups(count, size):
    rows = random_rows(count, size)
    sums = rows
    while len(sums) > 15:
        sums = [added(sums[start : start + 15]) for start in range(0, len(sums), 15)]

    np.testing.assert_array_equal(sum_in_order(tf.constant(rows)), added(sums))


@pytest.mark.parametrize("count", [2, 15, 16, 40])
def test_a_part_of_the_rows_has_the_sums_of_the_whole(count):
    rows = random_rows(count, 100_003)

    whole = sum_in_order(tf.constant(rows))

    for start, stop in [(1, 100_003), (12_345, 12_350), (99_990, 100_003)]:
        np.testing.assert_array_equal(sum_in_order(tf.constant(rows[:, start:stop])), whole[start:stop])


def test_the_number_of_operations_does_not_depend_on_the_number_of_rows():
    def operations(count):
        traced = tf.function(sum_in_order).get_concrete_function(tf.TensorSpec([count, 100]))
        return len(traced.graph.get_operations())

    assert operations(3) == operations(15)
    assert operations(40) == operations(200)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64, tf.complex64])
@pytest.mark.parametrize("count", [2, 40])
def test_sums_of_all_types(dtype, count):
    rows = tf.cast(tf.reshape(tf.range(count * 6) % 5, [count, 2, 3]), dtype)

    total = sum_in_order(rows)

    assert total.dtype == dtype
    np.testing.assert_array_equal(tf.cast(total, tf.complex128), tf.reduce_sum(tf.cast(rows, tf.complex128), axis=0))


def test_rows_of_unknown_length():
    function = tf.function(sum_in_order, input_signature=[tf.TensorSpec([20, None])])

    np.testing.assert_array_equal(function(tf.ones([20, 7])), np.full([7], 20.0))


@pytest.mark.parametrize("dtype", ADDED_OUTSIDE, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 31, 256])
def test_sums_outside_of_tensorflow_have_the_same_bits(count, dtype):
    for size in (1, 2, 17, 4099):
        rows = random_rows(count, size).astype(dtype.as_numpy_dtype)
        if dtype.is_integer:  # Some sums wrap around.
            rows = np.random.default_rng(size).integers(dtype.min, dtype.max, rows.shape, rows.dtype)
        rows[:, -1] = -0.0
        total = np.empty(size, rows.dtype)

        add_in_order(rows, total)

        assert total.tobytes() == sum_in_order(tf.constant(rows)).numpy().tobytes()
