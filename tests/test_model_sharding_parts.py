"""Division of tensors into parts, and their exchange between several ranks of this process."""

import numpy as np
import pytest
import tensorflow as tf

from test_codec_groups import OneDevicePerWorker
from tfdist.strategies.collectives.box_transports import BoxTransports
from tfdist.strategies.collectives.group_exchange import GroupExchange
from tfdist.strategies.collectives.in_memory_transport import run_ranks
from tfdist.strategies.collectives.part_exchange import PartExchange
from tfdist.strategies.collectives.shard_groups import ShardGroups
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import Transport, all_reduce_in_order
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


@pytest.mark.parametrize("tensors", [1, 3])
def test_large_tensors_travel_in_several_buckets_unless_they_are_kept_whole(tensors):
    partitions = [Partition.of([4096, 4096], 2)] * tensors
    assert len(PartBuckets(partitions, tf.float32).columns) == 4 * tensors
    assert PartBuckets(partitions, tf.float32, cuts=False).columns == [tensors * 4096 * 4096 // 2]


@pytest.mark.parametrize("of", [Partition.of, Partition.of_table])
@pytest.mark.parametrize("shards", SHARDS)
def test_masks_leave_out_all_padding(shards, of):
    partitions = [of(shape, shards) for shape in SHAPES if shape]
    buckets = PartBuckets(partitions, tf.float32, granule=24)
    ones = buckets.join_tensors([tf.ones(each.shape) for each in partitions])
    for i, expected in enumerate(ones):
        np.testing.assert_array_equal(buckets.mask(i), expected)


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


class Among(Transport):
    """A transport between some of the ranks of another one."""

    def __init__(self, transport, rank, members):
        self.ranks, self._all, self._members, self._place = len(members), transport, members, members.index(rank)

    def all_gather(self, rows, options):
        everyone = self._all.all_gather(rows[None])
        return tf.concat([everyone[i] for i in self._members], axis=0)

    def all_to_all(self, rows, options):
        everyone = self._all.all_gather(rows[None])
        return tf.stack([everyone[i][self._place] for i in self._members])

    def all_reduce(self, tensor, options):
        return all_reduce_in_order(self, tensor, options)


@pytest.mark.parametrize("columns", [1, 4])
def test_devices_of_a_worker_sum_first(columns):
    rows = [tf.cast(tf.reshape(tf.range(6 * columns), [6, columns]), tf.float32) * (rank + 1) for rank in range(6)]
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


def sizes_of_groups():
    return [
        (size, workers, devices)
        for workers in (1, 2, 3, 4)
        for devices in (1, 2, 3, 4)
        for size in range(2, workers * devices)
    ]


def is_possible(size, workers, devices):
    return devices % size == 0 or (size % devices == 0 and (workers * devices) % size == 0)


@pytest.mark.parametrize(("size", "workers", "devices"), [each for each in sizes_of_groups() if is_possible(*each)])
def test_groups_are_consecutive_replicas_and_have_one_copy_of_each_part(size, workers, devices):
    groups = ShardGroups.of(size, workers, devices)

    def replicas_of(box):
        return [worker * devices + device for worker in box.workers for device in box.devices]

    for replica in range(workers * devices):
        place = divmod(replica, devices)
        group, copies = replicas_of(groups.group_of(*place)), replicas_of(groups.copies_of(*place))
        first = replica - replica % size
        assert group == list(range(first, first + size))
        assert len(copies) == workers * devices // size
        assert set(group) & set(copies) == {replica}
        assert len({other // size for other in copies}) == len(copies), "one of each group"
        for other in copies:
            assert replicas_of(groups.copies_of(*divmod(other, devices))) == copies


@pytest.mark.parametrize(("size", "workers", "devices"), [each for each in sizes_of_groups() if not is_possible(*each)])
def test_groups_that_are_not_possible_are_refused(size, workers, devices):
    with pytest.raises(ValueError, match="`shard_group_size` must divide the number of devices") as error:
        ShardGroups.of(size, workers, devices)
    possible = str(error.value).removesuffix(".").split("Give one of ")[1].split(", ")
    assert all(is_possible(int(each), workers, devices) for each in possible)
    assert str(workers * devices) in possible


@pytest.mark.parametrize("size", [None, 6])
def test_one_group_of_all_replicas_is_none(size):
    assert ShardGroups.of(size, 2, 3) is None


class InBoxes:
    """The part of `Collectives` that `GroupExchange` uses, on one rank."""

    def __init__(self, transport, rank, devices):
        self.replicas, self.worker = devices, rank // devices
        self._all, self._rank = transport, rank

    def among(self, boxes):
        made, replica = BoxTransports(boxes[0], self.worker), self._rank % self.replicas
        inside = [self.worker * self.replicas + device for device in boxes[replica].devices]
        between = [worker * self.replicas + replica for worker in boxes[replica].workers]
        made.inside = [Among(self._all, self._rank, inside)] * self.replicas if len(inside) > 1 else []
        made.between = [Among(self._all, self._rank, between)] * self.replicas if len(between) > 1 else []
        return made


@pytest.mark.parametrize("columns", [5, 8192])
@pytest.mark.parametrize(
    ("size", "workers", "devices"), [(2, 4, 1), (3, 6, 1), (2, 1, 4), (2, 1, 6), (2, 2, 2), (4, 4, 2), (2, 2, 4)]
)
def test_groups_have_all_parts_of_the_sums_over_all_replicas(size, workers, devices, columns):
    ranks, groups = workers * devices, ShardGroups.of(size, workers, devices)
    rows = [random([size, columns], seed) for seed in range(ranks)]

    def run(transport, rank):
        exchange, replica = GroupExchange(InBoxes(transport, rank, devices), groups), rank % devices
        own = exchange.reduce_scatter(rows[rank], replica, None)
        return exchange.shards, exchange.shard_of(replica), own, exchange.all_gather(own, replica, None)

    results = run_ranks(ranks, run)
    for rank, (shards, shard, own, everyone) in enumerate(results):
        group = results[rank - rank % size : rank - rank % size + size]
        assert shards == size and sorted(each[1] for each in group) == list(range(size))
        np.testing.assert_allclose(own, np.sum(rows, axis=0)[shard], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(own, everyone[shard])
        np.testing.assert_array_equal(everyone, results[0][3])  # Groups have the same bits.


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
