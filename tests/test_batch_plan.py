"""Permutations, orders, global batches and their splits: integers only, without TensorFlow."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from tfdist.data.batch_plan import BatchPlan, split
from tfdist.data.example_order import BlockShuffled, Shuffled, Stratified, Unshuffled
from tfdist.data.permutation import Permutation

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 100, 257, 1000]


def chi_square_is_plausible(counts, freedom):
    """Whether the chi-square of counts of equally likely outcomes is within five standard deviations of its mean."""
    expected = np.sum(counts) / np.size(counts)
    chi_square = np.sum((counts - expected) ** 2) / expected
    return abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [*SIZES, 4095, 4096, 4097])
def test_a_permutation_has_each_element_once_and_an_inverse(n):
    for key in range(3):
        permutation = Permutation(n, (1, key))
        elements = permutation(np.arange(n))
        np.testing.assert_array_equal(np.sort(elements), np.arange(n))
        np.testing.assert_array_equal(permutation.inverse(elements), np.arange(n))
        np.testing.assert_array_equal(permutation(np.arange(n)[::-3]), elements[::-3], "any part by itself")


def family(n, number):
    """Many permutations under one key, [number, n]."""
    return Permutation(n, (3, n))(np.tile(np.arange(n), number), np.repeat(np.arange(number), n)).reshape(number, n)


def by_keys(n, number):
    return np.array([Permutation(n, (7, key))(np.arange(n)) for key in range(number)])


@pytest.mark.parametrize("drawn", [family(3, 9000), family(4, 9000), family(5, 9000), by_keys(4, 800)], ids=np.shape)
def test_all_permutations_are_equally_likely(drawn):
    number = {permutation: i for i, permutation in enumerate(itertools.permutations(range(drawn.shape[1])))}
    counts = np.bincount([number[tuple(permutation)] for permutation in drawn.tolist()], minlength=len(number))
    assert chi_square_is_plausible(counts, len(number) - 1)


@pytest.mark.parametrize(
    "drawn", [family(64, 3000), family(61, 3000), family(700, 3000), by_keys(64, 300)], ids=np.shape
)
def test_elements_are_equally_likely_at_each_position_and_after_each_other(drawn):
    number, n = drawn.shape
    places = np.zeros((n, n))
    np.add.at(places, (np.tile(np.arange(n), number), drawn.ravel()), 1)
    steps = np.bincount((np.diff(drawn) % n).ravel(), minlength=n)
    assert np.all(np.sort(drawn) == np.arange(n))
    assert chi_square_is_plausible(places, (n - 1) ** 2)
    assert chi_square_is_plausible(steps[1:], n - 2)


def test_a_large_permutation_is_uniform_and_differs_between_epochs():
    n, k = 10**9, 200_000
    epochs = [Shuffled(n, 5)(epoch, np.arange(k)) for epoch in range(2)]
    for elements in epochs:
        assert len(np.unique(elements)) == k and elements.min() >= 0 and elements.max() < n
        assert chi_square_is_plausible(np.histogram(elements, 100, (0, n))[0], 99)
        assert chi_square_is_plausible(np.bincount(elements % 64, minlength=64), 63)
    assert abs(np.corrcoef(epochs)[0, 1]) < 5 / math.sqrt(k)
    assert abs(np.corrcoef(epochs[0][1:], epochs[0][:-1])[0, 1]) < 5 / math.sqrt(k)


def test_a_full_shuffle_of_a_billion_takes_no_memory():
    plan = BatchPlan(10**9, 1024, Shuffled(10**9, 0))
    plan.batch(0, 0)
    tracemalloc.start()
    for step in (0, 1, plan.steps_per_epoch // 2, plan.steps_per_epoch - 1):
        plan.batch(3, step)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * 2**20


def shuffling_orders(n, seed=1):
    labels = np.random.default_rng(n).integers(0, 3, n)
    blocks = [BlockShuffled(n, seed, block_size) for block_size in (1, 4, n, n + 3)]
    return [Shuffled(n, seed), *blocks, Stratified(labels, seed, shuffle=True)]


def orders(n):
    return [Unshuffled(), Stratified(np.arange(n) % 3, 1, shuffle=False), *shuffling_orders(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 17, 100])
def test_every_order_has_each_example_once_an_epoch(n):
    for order, size in itertools.product(orders(n), {n // 8 + 1, n // 3 + 1, n, n + 1}):
        for drop_remainder in (False, True):
            plan = BatchPlan(n, size, order, drop_remainder)
            for epoch in (0, 1):
                batches = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
                assert [len(batch) for batch in batches] == [plan.rows(step) for step in range(plan.steps_per_epoch)]
                seen = np.concatenate([np.empty(0, np.int64), *batches])
                assert len(np.unique(seen)) == len(seen) == (n - n % size if drop_remainder else n)
                assert set(seen.tolist()) <= set(range(n))


def test_a_batch_depends_on_seed_epoch_step_and_size_only():
    n, size = 1000, 48

    def batches(order, epoch):
        return [BatchPlan(n, size, order).batch(epoch, step).tolist() for step in (5, 0)]

    made = [shuffling_orders(n, seed) for seed in (1, 1, 2)]
    for order, again, other in zip(*made, strict=True):
        assert batches(order, 0) == batches(again, 0), "made anew it is the same"
        assert batches(order, 0) != batches(order, 1)
        assert batches(order, 0) != batches(other, 0)
    for order in orders(n)[:2]:
        assert batches(order, 0) == batches(order, 1)


def test_blocks_are_read_together_and_within_shuffled():
    n, size = 1003, 50
    for epoch in range(4):
        elements = BlockShuffled(n, 2, size)(epoch, np.arange(n))
        blocks = elements // size
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        assert len(starts) == len(np.unique(blocks)) == -(-n // size), "each block in one piece"
        assert np.any(np.diff(blocks[starts]) != 1)
        assert np.any(np.diff(elements[: starts[1]]) != 1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "counts",
    [(500, 300, 200), (997, 2, 1), (333, 333, 334), (100,), (910, *[10] * 9), (495, *[55] * 9), (990, *[1] * 60)],
)
def test_stratified_runs_have_the_proportions_of_the_whole(counts, shuffle):
    n = sum(counts)
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    classes = labels[Stratified(labels, 4, shuffle=shuffle)(1, np.arange(n))]
    seen = np.concatenate([np.zeros((1, len(counts))), np.cumsum(np.eye(len(counts))[classes], axis=0)])
    for length in (1, 7, 32, n // 2):
        runs = seen[length:] - seen[:-length]  # counts in all intervals of this length
        ideal = length * np.array(counts) / n
        assert np.max(np.abs(runs - ideal)) <= 2
        assert np.max(np.abs(runs.mean(axis=0) - ideal)) < 0.5
    batches = np.add.reduceat(np.eye(len(counts))[classes], range(0, n, 32))[: n // 32]
    assert np.max(np.abs(batches - 32 * np.array(counts) / n)) <= 1.5


def test_splits_follow_the_weights_by_largest_remainder():
    rng = np.random.default_rng(0)
    for _ in range(500):
        rows, replicas = int(rng.integers(0, 100)), int(rng.integers(1, 9))
        weights = rng.random(replicas) ** 3
        bounds = None if rng.random() < 0.5 else rng.integers(1, 40, replicas) + rows // replicas
        shares = split(rows, weights.tolist(), bounds)
        assert sum(shares) == rows
        assert min(shares) >= (rows >= replicas)
        assert bounds is None or np.all(shares <= bounds)
        ideal = weights / weights.sum() * rows
        if bounds is None and ideal.min() >= 1:
            assert np.max(np.abs(shares - ideal)) < 1
            rounded_up = ideal % 1 * (np.array(shares) > ideal)
            assert np.all((np.array(shares) > ideal) | (ideal % 1 <= min(rounded_up[rounded_up > 0], default=1)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((32, [5, 11]), (10, 22)),
        ((8, [1, 2, 5]), (1, 2, 5)),
        ((2, [1, 1, 1]), (1, 1, 0)),
        ((10, [1, 100, 100]), (1, 5, 4)),
        ((10, [1, 1, 8], [4, 4, 4]), (3, 3, 4)),
        ((0, [1, 2]), (0, 0)),
        ((4, [0, 1]), (1, 3)),
    ],
)
def test_known_splits(arguments, expected):
    assert split(*arguments) == expected


def test_bounds_that_are_too_small_raise():
    with pytest.raises(ValueError, match=r"9 rows .* \[4, 4\].* 8"):
        split(9, [1, 2], [4, 4])
