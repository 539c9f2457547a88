"""Distribution of gradients over buckets."""

import random

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.collectives.buckets import BUCKET_BYTES, bucket_bytes, fill_buckets, join, separate
from tfdist.strategies.collectives.codec_choice import _LEAST_PART, _units


def laid_out(kilobytes):
    tensors = [tf.TensorSpec([size * 256]) for size in kilobytes]
    return [[segment.tensor for segment in bucket] for bucket in fill_buckets(tensors, bucket_bytes(tensors))]


@pytest.mark.parametrize("seed", range(50))
def test_a_small_model_has_two_buckets_and_the_first_holds_half(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([1, 10, 100, 500]) for _ in range(draw.randint(2, 12))]
    first, *rest = laid_out(sizes)
    assert len(rest) <= 1
    if sum(sizes) * 1024 > BUCKET_BYTES // 2:  # For smaller models the least size of a bucket counts.
        assert 2 * sum(sizes[i] for i in first) >= sum(sizes)
        assert 2 * sum(sizes[i] for i in first if i != min(first)) < sum(sizes), sizes


@pytest.mark.parametrize(
    ("sizes", "buckets"), [([10, 490, 490, 10], [[3, 2], [1, 0]]), ([891, 43, 928, 6], [[3, 2], [1, 0]])]
)
def test_buckets_are_halves_if_tensors_allow(sizes, buckets):
    assert laid_out(sizes) == buckets


@pytest.mark.parametrize("seed", range(20))
def test_a_unit_with_a_choice_of_a_small_model_is_one_message_uncompressed(seed):
    draw = random.Random(seed)
    tensors = [tf.TensorSpec([draw.choice([64, 144, 288, 576]) * 256]) for _ in range(draw.randint(2, 14))]
    units = _units(range(len(tensors)), tensors, 0.0)
    assert sorted(i for unit in units for i in unit) == list(range(len(tensors)))
    assert [len(fill_buckets([tensors[i] for i in unit], BUCKET_BYTES)) for unit in units] == [1] * len(units)


def test_a_small_model_with_a_choice_is_one_unit():
    assert _units(range(4), [tf.TensorSpec([256, 1000])] * 4, 0.0) == [[0, 1, 2, 3]]


def test_a_tiny_layer_with_a_choice_is_no_unit_of_its_own():
    shapes = [[784, 2048], [2048, 2048], [2048, 10]]
    tensors = [tf.TensorSpec(shape) for shape in shapes]
    assert _units(range(3), tensors, _LEAST_PART) == [[0], [1]]
    assert _units(range(3), tensors, 0.0) == [[0], [1], [2]]


def test_tensors_of_unknown_rank_travel_whole():
    @tf.function
    def there_and_back(value):
        tensors = [tf.numpy_function(lambda x: x, [value], tf.float32)]
        buckets = fill_buckets(tensors)
        assert tensors[0].shape.rank is None
        return separate(buckets, [join(bucket, tensors) for bucket in buckets], tensors)[0]

    np.testing.assert_array_equal(there_and_back(tf.ones([2, 3])), np.ones([2, 3]))
