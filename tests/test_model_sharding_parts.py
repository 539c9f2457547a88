"""Division of tensors into parts, and their exchange between several ranks of this process."""

import numpy as np
import pytest
import tensorflow as tf

from test_codec_groups import OneDevicePerWorker
from tfdist.strategies.collectives.in_memory_transport import run_ranks
from tfdist.strategies.collectives.part_exchange import PartExchange
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import all_reduce_in_order
from tfdist.strategies.compression import from_name
from tfdist.strategies.sharding.owner_buckets import OwnerBuckets
from tfdist.strategies.sharding.ownership import Ownership, owners
from tfdist.strategies.sharding.part_buckets import PartBuckets
from tfdist.strategies.sharding.part_codec_group import PartCodecGroup
from tfdist.strategies.sharding.part_tensors import part_of, part_of_slices, rows_of, whole_of
from tfdist.strategies.sharding.partition import Partition

SHAPES = ([], [1], [7], [64, 3], [3, 3, 5, 8], [1000, 2], [2, 200_000], [5, 1])
SHARDS = (1, 2, 3, 4, 7)


def random(shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_equal_in_shape_and_make_up_the_tensor(shape, shards):
    partition, tensor = Partition.of(shape, shards), random(shape)
    parts = [part_of(partition, tensor, shard) for shard in range(shards)]
    assert {tuple(part.shape) for part in parts} == {partition.part_shape}
    rows = tf.stack([tf.reshape(part, [-1]) for part in parts])
    np.testing.assert_array_equal(rows, rows_of(partition, tensor))
    np.testing.assert_array_equal(whole_of(partition, rows), tensor)
    assert sum(stop - start for start, stop in map(partition.range_of, range(shards))) == partition.rows


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if np.prod(shape) >= 1000])
def test_padding_is_small(shape, shards):
    assert Partition.of(shape, shards).part_elements * shards <= 1.02 * np.prod(shape)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("shape", [[64, 3], [5, 4], [3, 2, 2]])
def test_rows_of_sparse_gradients_reach_their_owner_in_order(shape, shards):
    partition, indices = Partition.of(shape, shards), [2, 0, 2, 1]
    slices = tf.IndexedSlices(random([4, *shape[1:]]), tf.constant(indices), tf.constant(shape))
    parts = [part_of_slices(partition, slices, shard) for shard in range(shards)]
    for shard, part in enumerate(parts):
        dense = tf.math.unsorted_segment_sum(part.values, part.indices, partition.part_shape[0])
        whole = tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])
        np.testing.assert_array_equal(dense, part_of(partition, whole, shard))
    count = sum(int(tf.size(part.values)) for part in parts)
    assert count == tf.size(slices.values)  # Rows of equal index stay apart.


@pytest.mark.parametrize("sizes", [[1], [5, 5, 5], [9, 1, 1, 1, 1, 1, 1, 1, 1, 1], [3, 7, 7, 2, 8, 1, 1, 4], []])
@pytest.mark.parametrize("shards", SHARDS)
def test_owners_are_balanced(sizes, shards):
    owner = owners(sizes, shards)
    loads = [sum(size for size, own in zip(sizes, owner, strict=True) if own == shard) for shard in range(shards)]
    least = max(sum(sizes) / shards, max(sizes, default=0))
    assert max(loads) <= 4 / 3 * least + 1e-9 or len(sizes) <= shards


@pytest.mark.parametrize("kind", ["equal", "owned"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_of_parts_have_the_bits_of_an_all_reduce(ranks, kind):
    partitions = [Partition.of(shape, ranks) for shape in SHAPES]
    if kind == "owned":
        owner = owners([int(np.prod(shape)) for shape in SHAPES], ranks)
        partitions = [Ownership(tuple(shape), ranks, own) for shape, own in zip(SHAPES, owner, strict=True)]
    buckets = (OwnerBuckets if kind == "owned" else PartBuckets)(partitions, tf.float32)

    def run(transport, rank):
        exchange = PartExchange(OneDevicePerWorker(transport, rank))
        own = [random(shape, seed) for seed, shape in enumerate(SHAPES, start=100 * rank)]
        sums = [all_reduce_in_order(transport, tensor, None) for tensor in own]
        rows = [exchange.reduce_scatter(bucket, 0, None) for bucket in buckets.join_tensors(own)]
        parts = buckets.separate_parts(rows, exchange.shard_of(0))
        gathered = [exchange.all_gather(row, 0, None) for row in buckets.join_parts(parts, exchange.shard_of(0))]
        assert len(rows) < len(SHAPES)
        return sums, parts, buckets.separate_tensors(gathered), exchange.shard_of(0)

    for sums, parts, wholes, shard in run_ranks(ranks, run):
        for total, part, whole, partition in zip(sums, parts, wholes, partitions, strict=True):
            np.testing.assert_array_equal(part, part_of(partition, total, shard))
            np.testing.assert_array_equal(whole, total)


class DevicesAndWorkers:
    """The part of `Collectives` that `PartExchange` uses, on workers with several devices each."""

    def __init__(self, transport, rank, devices):
        self.spread = self.replicas = devices
        self.ranks, self.worker = transport.ranks // devices, rank // devices
        self._all, self._rank, self._devices = transport, rank, devices

    def within_worker(self, replica):
        return Among(self._all, self._rank, [self.worker * self._devices + i for i in range(self._devices)])

    def across_workers(self, replica):
        return Among(self._all, self._rank, [w * self._devices + replica for w in range(self.ranks)])


class Among:
    """A transport between some of the ranks of another one."""

    def __init__(self, transport, rank, members):
        self.ranks, self._all, self._members, self._place = len(members), transport, members, members.index(rank)

    def all_gather(self, rows, options):
        everyone = self._all.all_gather(rows[None])
        return tf.concat([everyone[i] for i in self._members], axis=0)

    def all_to_all(self, rows, options):
        everyone = self._all.all_gather(rows[None])
        return tf.stack([everyone[i][self._place] for i in self._members])


def test_devices_of_a_worker_sum_first():
    rows = [tf.cast(tf.reshape(tf.range(24), [6, 4]), tf.float32) * (rank + 1) for rank in range(6)]
    total = np.sum(rows, axis=0)

    def run(transport, rank):
        exchange = PartExchange(DevicesAndWorkers(transport, rank, devices=2))
        own = exchange.reduce_scatter(rows[rank], rank % 2, None)
        return exchange.shard_of(rank % 2), own, exchange.all_gather(own, rank % 2, None)

    results = run_ranks(6, run)
    assert sorted(shard for shard, _, _ in results) == list(range(6))
    for shard, own, everyone in results:
        np.testing.assert_array_equal(own, total[shard])
        np.testing.assert_array_equal(everyone, total)


def encoded(codec, collectives_of, ranks, steps):
    """Exchanges encoded gradients for some steps.

    Returns:
      For each rank: the joined sums; its states, for whole tensors; its part of a state that was spread, for whole
      tensors; and the sum over its part of states of ones, with their padding.
    """
    partitions = [Partition.of(shape, ranks) for shape in SHAPES]

    def run(transport, rank):
        collectives = collectives_of(transport, rank)
        replica = rank % collectives.replicas
        group = PartCodecGroup(codec, list(range(len(SHAPES))), partitions, collectives)
        exchange, watch = PartExchange(collectives), Stopwatch("CPU:0", None, is_on=False)
        states, sums = [tf.zeros(shape) for shape in group.state_shapes], [np.zeros(shape) for shape in SHAPES]
        buckets = PartBuckets(partitions, tf.float32)
        for step in range(steps):
            own = [random(shape, seed) for seed, shape in enumerate(SHAPES, start=100 * rank + 1000 * step)]
            parts, states, finite = group.exchange(own, states, replica, collectives, None, watch)
            assert finite
            rows = [exchange.all_gather(row, replica, None) for row in buckets.join_parts(parts, 0)]
            sums = [total + new for total, new in zip(sums, buckets.separate_tensors(rows), strict=True)]
        total = [[random(shape, seed).numpy() for seed, shape in enumerate(SHAPES)]] * codec.states
        again = group.pending(group.spread(total, replica, collectives), replica, collectives)
        ones = group.spread([[np.ones(shape, np.float32) for shape in SHAPES]] * codec.states, replica, collectives)
        return (
            sums,
            group.pending(states, replica, collectives),
            again,
            sum(float(tf.reduce_sum(each)) for each in ones),
        )

    return run_ranks(ranks, run)


@pytest.mark.parametrize(
    ("name", "ranks", "devices"),
    [
        pytest.param(name, *ranks, marks=() if name == "int8" or ranks == (4, 2) else pytest.mark.exhaustive)
        for name in ("bfloat16", "int8", "int4", "sign", "topk")
        for ranks in [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)]
    ],
)
def test_encoded_parts_and_residuals_add_up_to_the_gradients(name, ranks, devices):
    codec, steps = from_name(name), 3

    def collectives_of(transport, rank):
        if devices > 1:
            return DevicesAndWorkers(transport, rank, devices)
        return OneDevicePerWorker(transport, rank)

    everyone = encoded(codec, collectives_of, ranks, steps)
    for place, shape in enumerate(SHAPES):
        exact = sum(random(shape, 100 * rank + 1000 * step + place) for rank in range(ranks) for step in range(steps))
        kept = sum(pending[-1][place] for _, pending, _, _ in everyone) if codec.states else 0
        tolerance = 1e-4 if codec.states else 8e-2
        np.testing.assert_allclose(everyone[0][0][place] + kept, exact, rtol=tolerance, atol=tolerance)
        if codec.states:  # What is spread over all replicas adds up again.
            spread = sum(again[-1][place] for _, _, again, _ in everyone)
            np.testing.assert_allclose(spread, random(shape, place), rtol=1e-4, atol=1e-5)
    elements = sum(int(np.prod(shape)) for shape in SHAPES)  # Padding has no residuals.
    assert sum(ones for *_, ones in everyone) == pytest.approx(codec.states * elements, rel=1e-5)
