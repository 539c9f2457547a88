"""Groups of gradients with one codec, exchanged between several ranks of this process over the in-memory transport."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.collectives.codec_group import CodecGroup
from tfdist.strategies.collectives.in_memory_transport import run_ranks
from tfdist.strategies.collectives.power_sgd_group import PowerSGDGroup
from tfdist.strategies.collectives.sparse import all_reduce_sparse
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import all_reduce_in_order
from tfdist.strategies.compression import PowerSGD, from_name

SHAPES = ([33, 70], [5], [], [3, 4, 5])
RANKS = (1, 2, 3)
CODECS = ("bfloat16", "int8", "int4", "sign", "topk")


class OneDevicePerWorker:
    """The part of `Collectives` that groups use, on one rank. Each worker has one device."""

    spread, replicas = 1, 1

    def __init__(self, transport, rank):
        self.ranks, self.worker, self._transport = transport.ranks, rank, transport

    def among_all(self, replica):
        return self._transport

    across_workers = among_all

    def device(self, replica):
        return "CPU:0"

    def within_worker(self, replica):
        return None

    def is_first(self, replica):
        return self.worker == 0

    def shard(self, replica, elements):
        return slice(0, elements)

    def owned(self, replica, elements):
        size = elements // self.ranks
        return slice(self.worker * size, (self.worker + 1) * size)


def gradients(rank, step=0):
    draws = np.random.default_rng([rank, step])
    return [tf.constant(draws.normal(size=shape), tf.float32) for shape in SHAPES]


def trained(codec, ranks, steps):
    """Exchanges gradients for some steps. Returns the sums of each step and the states at the end, for each rank."""

    def run(transport, rank):
        collectives = OneDevicePerWorker(transport, rank)
        positions = [0, 3] if isinstance(codec, PowerSGD) else list(range(len(SHAPES)))
        if isinstance(codec, PowerSGD):
            group = PowerSGDGroup(codec, positions, gradients(rank), seed=0)
        else:
            group = CodecGroup(codec, positions, gradients(rank), collectives)
        states = [
            tf.zeros(shape) if value is None else value
            for shape, value in zip(group.state_shapes, group.initial_states(), strict=True)
        ]
        watch, sums = Stopwatch("CPU:0", None, is_on=False), []
        for step in range(steps):
            own = [gradients(rank, step)[i] for i in positions]
            totals, states, finite = group.exchange(own, states, 0, collectives, None, watch)
            assert finite
            sums.append([total.numpy() for total in totals])
        kinds = group.pending(states, 0, collectives)
        if isinstance(codec, PowerSGD):
            kinds = kinds[:-1]  # The factors of all matrices are last.
        return sums, kinds[-1] if kinds else None

    return run_ranks(ranks, run)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CODECS)
def test_all_ranks_have_the_same_bits_and_what_is_not_sent_stays_as_residual(name, ranks):
    codec, steps = from_name(name), 3
    everyone = trained(codec, ranks, steps)

    for sums, _ in everyone[1:]:
        for step, first in zip(sums, everyone[0][0], strict=True):
            for total, expected in zip(step, first, strict=True):
                np.testing.assert_array_equal(total, expected)
    for i in range(len(SHAPES)):
        exact = sum(gradients(rank, step)[i].numpy() for rank in range(ranks) for step in range(steps))
        sent = sum(step[i] for step in everyone[0][0])
        kept = sum(residuals[i] for _, residuals in everyone) if codec.states else 0
        np.testing.assert_allclose(sent + kept, exact, rtol=1e-4, atol=8e-2 if not codec.states else 1e-4)


@pytest.mark.parametrize("ranks", RANKS)
def test_low_rank_sums_have_the_same_bits_on_all_ranks_and_keep_residuals(ranks):
    everyone = trained(PowerSGD(2), ranks, 3)

    for place, shape in enumerate((SHAPES[0], SHAPES[3])):
        sums = [step[place] for step in everyone[0][0]]
        for others, _ in everyone[1:]:
            np.testing.assert_array_equal([step[place] for step in others], sums)
        position = [0, 3][place]
        exact = sum(gradients(rank, step)[position].numpy() for rank in range(ranks) for step in range(3))
        kept = sum(np.reshape(residuals[place], shape) for _, residuals in everyone)
        np.testing.assert_allclose(sum(sums) + kept, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", [1, 7, 40_000])
def test_sums_in_order_are_the_sums_of_one_device(ranks, size):
    terms = [np.random.default_rng(rank).normal(size=size).astype(np.float32) for rank in range(ranks)]
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term

    for total in run_ranks(
        ranks, lambda transport, rank: all_reduce_in_order(transport, tf.constant(terms[rank]), None)
    ):
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_of_all_ranks_are_joined_in_the_order_of_ranks(ranks):
    def run(transport, rank):
        rows = tf.fill([rank, 4], float(rank))  # Rank 0 has no rows.
        return all_reduce_sparse(tf.IndexedSlices(rows, tf.range(rank), [10, 4]), transport, None)

    for joined in run_ranks(ranks, run):
        np.testing.assert_array_equal(joined.values[:, 0], [rank for rank in range(ranks) for _ in range(rank)])
        np.testing.assert_array_equal(joined.indices, [row for rank in range(ranks) for row in range(rank)])


def test_the_error_of_a_rank_is_raised_and_no_rank_waits_for_it():
    def run(transport, rank):
        if rank == 1:
            raise KeyError("rank 1")
        return transport.all_reduce(tf.ones([3]))

    with pytest.raises(KeyError, match="rank 1"):
        run_ranks(3, run)


def test_a_rank_that_leaves_out_an_exchange_is_not_waited_for_without_end():
    def run(transport, rank):
        return None if rank == 1 else transport.all_gather(tf.ones([3]))

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, run, timeout_seconds=0.2)
