"""Exchanges in two levels give what exchanges in one level give, with few messages, between ranks of this process."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.collectives.exchange_groups import ExchangeGroups, balanced_size, check_exchange_group_size
from tfdist.strategies.collectives.in_memory_transport import run_ranks
from tfdist.strategies.collectives.two_level_transport import TwoLevelTransport

pytestmark = pytest.mark.unit

GROUPS = [(2, 2), (2, 3), (3, 2), (4, 3)]  # Ranks of a group, number of groups.
SIZES = [1, 7, 5000, 30_001]  # Elements, of which the last two travel in parts.


def addresses(count):
    return [f"host{i}:1000" for i in range(count)]


def in_two_levels(transport, rank, size):
    """Returns a transport in two levels to all ranks, and the transports of the levels."""
    groups = ExchangeGroups(size, transport.ranks)
    levels = [transport.among(box.workers) for box in (groups.group_of(rank), groups.same_place(rank))]
    return TwoLevelTransport(*levels), levels


def values(rank, shape):
    return np.random.default_rng(rank).normal(size=shape).astype("float32")


@pytest.mark.parametrize(("size", "groups"), GROUPS)
@pytest.mark.parametrize("elements", SIZES)
def test_sums_have_the_same_bits_on_all_ranks_and_in_each_run(size, groups, elements):
    def run(transport, rank):
        two_levels, _ = in_two_levels(transport, rank, size)
        return two_levels.all_reduce(tf.constant(values(rank, elements)), None).numpy()

    first, second = (run_ranks(size * groups, run) for _ in range(2))

    exact = sum(values(rank, elements).astype("float64") for rank in range(size * groups))
    np.testing.assert_allclose(first[0], exact, rtol=1e-5, atol=1e-5)
    for total in [*first, *second]:
        np.testing.assert_array_equal(total, first[0])


@pytest.mark.parametrize(("size", "groups"), GROUPS)
def test_rows_arrive_as_in_one_level(size, groups):
    ranks = size * groups

    def run(transport, rank):
        two_levels, _ = in_two_levels(transport, rank, size)
        rows, one_each = tf.constant(values(rank, (3, 2))), tf.constant(values(rank, (ranks, 2, 3)))
        return [
            (each.all_gather(rows, None).numpy(), each.all_to_all(one_each, None).numpy())
            for each in (transport, two_levels)
        ]

    for one_level, two_levels in run_ranks(ranks, run):
        for expected, result in zip(one_level, two_levels, strict=True):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("ranks", [16, 64, 1024])
def test_ranks_sum_to_the_same_bits_with_messages_of_the_order_of_the_square_root(ranks):
    size = balanced_size(ranks)

    def run(transport, rank):
        two_levels, levels = in_two_levels(transport, rank, size)
        total = two_levels.all_reduce(tf.constant(values(rank, 1000)), None)
        return total.numpy().tobytes(), sum(level.messages for level in levels)

    results = run_ranks(ranks, run)

    assert len({total for total, _ in results}) == 1
    assert max(messages for _, messages in results) < 4 * math.sqrt(ranks)


@pytest.mark.parametrize("workers", range(2, 200))
def test_groups_of_any_number_of_workers_reach_all_of_them_over_one_other(workers):
    groups = ExchangeGroups.of("auto", addresses(workers))
    if groups is None:  # A prime number, or fewer than four.
        assert workers < 4 or all(workers % size for size in range(2, workers))
        return
    assert workers % groups.size == 0
    peers = [set(groups.peers_of(worker)) for worker in range(workers)]
    for worker in range(workers):
        assert all(worker in peers[peer] for peer in peers[worker])
        near = set().union(*(peers[peer] for peer in peers[worker]))
        assert near | peers[worker] | {worker} == set(range(workers))


def test_groups_by_host_are_the_workers_of_a_host():
    two_each = [f"host{i // 2}:{1000 + i % 2}" for i in range(6)]

    assert ExchangeGroups.of("host", two_each) == ExchangeGroups(2, 6)
    assert ExchangeGroups.of("host", addresses(6)) is None  # One worker on each: no group has two.
    assert ExchangeGroups.of("host", ["host:1", "host:2", "host:3", "host:4"]) is None  # One group.
    for unequal in (["a:1", "a:2", "a:3", "b:1"], ["a:1", "b:1", "a:2", "b:2"]):
        with pytest.raises(ValueError, match="host by host"):
            ExchangeGroups.of("host", unequal)


def test_sizes_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match=r"got 4 for 6 workers\. Give one of 2, 3, 6, or"):
        ExchangeGroups.of(4, addresses(6))
    assert ExchangeGroups.of(3, addresses(6)) == ExchangeGroups(3, 6)
    assert ExchangeGroups.of(None, addresses(6)) is None
    for asked in (0, 1, -2, True, 2.0, "rack"):
        with pytest.raises(ValueError, match="`exchange_group_size` must be"):
            check_exchange_group_size(asked)
    for asked in (None, 2, "auto", "host"):
        check_exchange_group_size(asked)
