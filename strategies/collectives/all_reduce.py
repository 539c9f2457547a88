"""The all-reduce of both strategies: dense tensors in buckets, sparse ones by rows."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.collectives.buckets import BUCKET_BYTES, bucket_bytes, fill_buckets, join, part_bytes, separate
from tfdist.strategies.collectives.launcher import Launcher, added_up, sum_in_order, to_add_up
from tfdist.strategies.collectives.sparse import all_reduce_sparse
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.wire import Wire

# Far from the group keys that a strategy's other collectives have.
_HIERARCHY_KEYS = 1 << 10


class Collectives(_tf.CollectiveAllReduce):
    """`CollectiveAllReduce` with run-time keys, buckets by dtype and a deterministic sparse exchange.

    Args:
      devices: Of this worker, one for each of its replicas.
      group_size: Replicas of all workers.
      options: Communication options.
      collective_keys: Of the strategy.
      worker: Which of the workers this is. If workers have several devices each, what is encoded is summed among a
        worker's devices first, and crosses the network once.

    Attributes:
      replicas: Replicas of this worker.
      worker: Which of the workers this is.
      ranks: How many take part in an encoded exchange: workers, or replicas if each has one device.
      spread: Over how many devices of a worker an encoded exchange is spread; 1 if each has one,
        or there is one worker.
    """

    def __init__(self, devices, group_size, options, collective_keys, worker=0):
        super().__init__(devices, group_size, options, collective_keys)
        group_key = collective_keys.get_group_key(self._devices)
        self.replicas = len(self._devices)
        self.worker = worker
        self.spread = self.replicas if 1 < self.replicas < group_size else 1
        self.ranks = group_size // self.spread

        def launchers(keys, size):
            placed = zip(keys, self._devices, strict=True)
            return [Launcher(key, size, collective_keys, device, options) for key, device in placed]

        self._launchers = launchers([group_key] * self.replicas, group_size)
        for launcher in self._launchers:  # A ring crosses the network fewer times where workers have several devices.
            launcher.is_ordered = self.spread == 1 and "CPU" in launcher._device
        self._across, self._within = [], []
        if self.spread > 1:
            first = group_key + _HIERARCHY_KEYS
            self._across = launchers([first + i for i in range(self.replicas)], self.ranks)
            self._within = launchers([first + self.replicas + worker] * self.replicas, self.replicas)

    def device(self, replica: int) -> str:
        """The device of a replica of this worker."""
        return self._devices[replica]

    @property
    def ring(self) -> float:
        """What a replica sends for each byte that is summed, not in one go, across the network if there is one."""
        replicas = self.ranks * self.spread
        # Of several devices of a worker, one stands at its border.
        return 2 * (replicas - 1) / replicas / self.spread

    def sum_bytes(self, size: int) -> float:
        """What a replica sends to sum so many bytes at once, across the network if there is one."""
        return size * (self._group_size - 1 if self._launchers[0].in_one_go(size) else self.ring)

    def uncompressed_bytes(self, tensors: Sequence[tf.Tensor], options=None) -> float:
        """What a replica sends to sum these tensors uncompressed."""
        laid_out = self._laid_out(tensors, self._launchers[0], self._options.merge(options or self._options))
        return sum(
            self.sum_bytes(sum(segment.bytes_of(members[segment.tensor]) for segment in bucket))
            for _, members, buckets in laid_out
            for bucket in buckets
        )

    def shard(self, replica: int, elements: int) -> slice:
        """The part of a bucket that a replica of this worker exchanges."""
        size = elements // self.spread
        place = replica if self.spread > 1 else 0
        return slice(place * size, (place + 1) * size)

    def owned(self, replica: int, elements: int) -> slice:
        """The chunk of that part of which it makes the sum."""
        size = elements // self.spread // self.ranks
        rank = self.worker if self.spread > 1 else self.worker * self.replicas + replica
        start = self.shard(replica, elements).start + rank * size
        return slice(start, start + size)

    def is_first(self, replica: int) -> bool:
        """Whether it is the first replica of all workers."""
        return self.worker == 0 and replica == 0

    def use(self, wire: Wire) -> None:
        """Lets exchanges go over the workers' own connections; encoded ones only, where they have several devices."""
        for launcher in self._across or self._launchers:
            launcher.wire = wire if "CPU" in launcher._device else None

    def count_alike(self, data: Sequence[tf.Tensor] = ()) -> None:
        """Lets the replicas of this worker count on from one number, and not before `data` are there.

        Counting needs no data and would begin with the function. A step that finds no more data, or fails halfway,
        would then count more collectives on one replica than on another, and the next collective of the two, under
        different keys, wait for ever.
        """
        if self._group_size == 1:
            return
        for launchers in filter(None, (self._launchers, self._across, self._within)):
            with tf.control_dependencies(data):
                highest = tf.reduce_max(tf.stack([launcher.count for launcher in launchers]))
            for launcher in launchers:
                launcher.count.assign(highest, read_value=False)

    def launcher(self, replica: int) -> Launcher:
        """The launcher among all replicas."""
        return self._launchers[replica]

    def across_workers(self, bucket: tf.Tensor, replica: int, options, exchange, watch: Stopwatch) -> tuple:
        """Sums a bucket by an `exchange` between workers, each of which takes part once.

        Several devices of a worker first sum in full precision, each one part of the bucket: [elements] -> [elements /
        devices]. Each exchanges its part with its likes in the other workers, and all gather the sums. Every device of
        a worker thus sends an equal part of what the worker sends.

        Args:
          bucket: float32 [elements], elements a multiple of `spread`.
          replica: Of this worker.
          options: Communication options.
          exchange: A function of (part, launcher, ranks) -> (sum of the part, ...).
          watch: Times the collectives.

        Returns:
          The sum [elements], and what else `exchange` returns.
        """
        if self.spread == 1:
            return exchange(bucket, watch.of_collectives(self._launchers[replica]), self.ranks)
        within = watch.of_collectives(self._within[replica])
        parts = within.all_to_all(tf.reshape(bucket, [self.spread, -1]), options)
        part = tf.ensure_shape(sum_in_order(tf.unstack(parts, num=self.spread)), [bucket.shape[0] // self.spread])
        total, *rest = exchange(part, watch.of_collectives(self._across[replica]), self.ranks)
        return tf.ensure_shape(within.all_gather_rows(total, options), bucket.shape), *rest

    def all_reduce_rows(self, slices: tf.IndexedSlices, replica: int, options, codec, watch=None) -> tf.IndexedSlices:
        """Joins the `slices` of all replicas, their values encoded by `codec`; times those of values on a `watch`."""
        launcher = self._launchers[replica]
        if watch is None:
            return all_reduce_sparse(slices, launcher, self._group_size, options, codec)
        timed, slices = watch.of_collectives(launcher), watch.begin(slices)
        joined = all_reduce_sparse(slices, timed, self._group_size, options, codec, beside=launcher)
        return tf.IndexedSlices(watch.end(joined.values), joined.indices, joined.dense_shape)

    def _all_reduce_per_replica_values(self, reduce_op, per_replica_values, options):
        self._count_alike_before(per_replica_values)
        return super()._all_reduce_per_replica_values(reduce_op, per_replica_values, options)

    def _batch_all_gather(self, per_replica_values, axis, options):
        self._count_alike_before(per_replica_values)
        return super()._batch_all_gather(per_replica_values, axis, options)

    def _count_alike_before(self, per_replica_values):
        with self._lock:  # Another thread may be in the middle of an eager reduction.
            self.count_alike(symbolic_tensors([value.values for value in per_replica_values]))

    def _all_reduce(self, reduce_op, value, replica_id, options):
        """Reduces a nest of tensors and `IndexedSlices`, called once for each local replica."""
        flat = tf.nest.flatten(value)
        if self._group_size == 1:
            return value
        launcher = self._launchers[replica_id]
        options = self._options.merge(options)
        with tf.device(self._devices[replica_id]):
            flat = self._sum(flat, launcher, options)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                flat = [_divide(tensor, self._group_size) for tensor in flat]
        return tf.nest.pack_sequence_as(value, flat)

    def _sum(self, tensors, launcher, options):
        totals = [
            all_reduce_sparse(tensor, launcher, self._group_size, options)
            if isinstance(tensor, tf.IndexedSlices)
            else tensor
            for tensor in tensors
        ]
        for group, members, buckets in self._laid_out(tensors, launcher, options):
            reduced = [launcher.all_reduce(join(bucket, members), options=options) for bucket in buckets]
            for i, total in zip(group, separate(buckets, reduced, members), strict=True):
                totals[i] = added_up(total, tensors[i].dtype)
        return totals

    def _laid_out(self, tensors, launcher, options):
        """Dense tensors by the type in which they are added up: their positions, themselves, and their buckets."""
        terms: dict[tf.DType, dict[int, tf.Tensor]] = {}
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, tf.IndexedSlices):
                term = to_add_up(tensor)
                terms.setdefault(term.dtype, {})[i] = term
        # A ring of TensorFlow's waits for its own copies.
        largest = part_bytes(self._group_size) if launcher.is_ordered else BUCKET_BYTES
        for group in terms.values():
            members = list(group.values())
            limit = options.bytes_per_pack or bucket_bytes(members)
            part = options.bytes_per_pack or largest
            yield list(group), members, fill_buckets(members, limit, part_bytes=part)


def symbolic_tensors(values) -> list[tf.Tensor]:
    """The tensors in a nest that the present function has yet to compute."""
    return [leaf for leaf in tf.nest.flatten(values, expand_composites=True) if tf.is_symbolic_tensor(leaf)]


def _divide(total, count):
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count
