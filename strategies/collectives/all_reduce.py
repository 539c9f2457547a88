"""The collectives of both strategies: they sum dense tensors in buckets, and sparse tensors row by row."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.box_transports import BoxTransports
from tfdist.strategies.collectives.buckets import BUCKET_BYTES, bucket_bytes, fill_buckets, join, part_bytes, separate
from tfdist.strategies.collectives.collective_launcher import FIRST_KEY_BESIDE, CollectiveLauncher, added_up, to_add_up
from tfdist.strategies.collectives.exchange_groups import ExchangeGroups
from tfdist.strategies.collectives.grouped_tcp_transport import GroupedTcpTransport
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.collectives.shard_groups import Box
from tfdist.strategies.collectives.sparse import all_reduce_sparse
from tfdist.strategies.collectives.tcp_transport import TcpTransport
from tfdist.strategies.collectives.tensorflow_transport import TensorFlowTransport
from tfdist.strategies.collectives.transport import Transport, is_sent_whole
from tfdist.strategies.collectives.two_level_transport import TwoLevelTransport

# Far above the group keys of the strategy's other collectives.
_HIERARCHY_KEYS = 1 << 10
# Between the keys of the transports of boxes; a box adds the number of its first replica.
_BOX_KEYS = 1 << 13


class Collectives(tf_internals.CollectiveAllReduce):
    """Exchanges tensors between replicas: `CollectiveAllReduce` with run-time keys, buckets and ordered sparse sums.

    Args:
      devices: The devices of this worker, one per replica.
      group_size: Number of replicas on all workers.
      options: TensorFlow's `CommunicationOptions` for collectives.
      collective_keys: The strategy's collective keys.
      worker: Index of this worker. If workers have several devices each, gradients to encode are first summed over the
        worker's devices, so that they cross the network once.
      is_beside: Whether these exchanges run beside those of steps, in another thread, under keys of their own.

    Attributes:
      replicas: Number of replicas of this worker.
      ranks: Number of participants of an encoded exchange: the workers if each has several devices, else the replicas.
      spread: Number of devices of a worker that share an encoded exchange; 1 with one device per worker or one worker.
    """

    def __init__(self, devices, group_size, options, collective_keys, worker=0, is_beside=False):
        super().__init__(devices, group_size, options, collective_keys)
        group_key = collective_keys.get_group_key(self._devices)
        self.replicas = len(self._devices)
        self.worker = worker
        self.spread = self.replicas if 1 < self.replicas < group_size else 1
        self.ranks = group_size // self.spread

        self._keys, self._group_key = collective_keys, group_key
        self._launcher_options = {"first_key": FIRST_KEY_BESIDE} if is_beside else {}
        self._boxes: list[BoxTransports] = []
        self._levels: list[BoxTransports] = []  # The transports of both levels, if exchanges go in two levels.
        transports = self._make_transports
        # With several devices per worker, a ring crosses the network fewer times.
        self._among_all = transports([group_key] * self.replicas, group_size, is_ordered=self.spread == 1)
        self._launchers = [transport.launcher for transport in self._among_all]  # TensorFlow's methods use them.
        self._across: list[TensorFlowTransport] = []
        self._within: list[TensorFlowTransport] = []
        if self.spread > 1:
            first = group_key + _HIERARCHY_KEYS
            self._across = transports([first + i for i in range(self.replicas)], self.ranks)
            self._within = transports([first + self.replicas + worker] * self.replicas, self.replicas)

    def _make_transports(self, keys, size, is_ordered=False):
        """Makes a transport of TensorFlow for each replica of this worker, in the groups with these keys."""
        placed = zip(keys, self._devices, strict=True)
        more = self._launcher_options
        launchers = [CollectiveLauncher(key, size, self._keys, device, self._options, **more) for key, device in placed]
        return [TensorFlowTransport(each, is_ordered and "CPU" in each._device) for each in launchers]

    def among(self, boxes: Sequence[Box]) -> BoxTransports:
        """Makes transports between some replicas: `boxes` has those with which each replica of this worker exchanges.

        All workers call this method when the strategy is made, in the same order and before `use`. The boxes of all
        workers have the same size, and each replica is in one of them.
        """
        first = self._group_key + (2 * len(self._boxes) + 1) * _BOX_KEYS
        inside = [first + self.worker * self.replicas + box.devices[0] for box in boxes]
        between = [first + _BOX_KEYS + box.workers[0] * self.replicas + i for i, box in enumerate(boxes)]
        made = BoxTransports(boxes[0], self.worker)
        if made.replicas > 1:
            made.inside = self._make_transports(inside, made.replicas, is_ordered=True)
        if len(made.workers) > 1:
            made.between = self._make_transports(between, len(made.workers), is_ordered=True)
        self._boxes.append(made)
        return made

    def exchange_in(self, groups: ExchangeGroups) -> None:
        """Makes exchanges over the workers' own connections go in two levels; see `TwoLevelTransport`.

        All workers call this method when the strategy is made, before `use`. Each worker has one device.
        """
        boxes = groups.group_of(self.worker), groups.same_place(self.worker)
        self._levels = [self.among([box]) for box in boxes]

    def device(self, replica: int) -> str:
        """Returns the device of a replica of this worker."""
        return self._devices[replica]

    @property
    def ring(self) -> float:
        """Bytes a replica sends per byte of a large sum; with several workers only bytes across the network count."""
        replicas = self.ranks * self.spread
        # In a ring only one of the worker's devices sends to another worker.
        return 2 * (replicas - 1) / replicas / self.spread

    def sum_bytes(self, size: int) -> float:
        """Bytes that a replica sends to sum a tensor of `size` bytes over all replicas; see `ring`."""
        transport = self._among_all[0]
        if isinstance(transport, GroupedTcpTransport):
            return transport.levels.sum_bytes(size)
        whole = transport.is_ordered and is_sent_whole(size, self._group_size)
        return size * (self._group_size - 1 if whole else self.ring)

    @property
    def relay(self) -> float:
        """How many times as many bytes `all_to_all` of all replicas sends as if each replica sent to each."""
        transport = self._among_all[0]
        return transport.levels.relay if isinstance(transport, GroupedTcpTransport) else 1

    def uncompressed_bytes(self, tensors: Sequence[tf.Tensor], options=None) -> float:
        """Bytes that a replica sends to sum these tensors uncompressed, for counts of traffic; see `ring`."""
        laid_out = self._laid_out(tensors, self._among_all[0], self._options.merge(options or self._options))
        return sum(
            self.sum_bytes(sum(segment.bytes_of(members[segment.tensor]) for segment in bucket))
            for _, members, buckets in laid_out
            for bucket in buckets
        )

    def shard(self, replica: int, elements: int) -> slice:
        """Returns the range of a bucket of `elements` that a replica of this worker exchanges with other workers."""
        size = elements // self.spread
        place = replica if self.spread > 1 else 0
        return slice(place * size, (place + 1) * size)

    def owned(self, replica: int, elements: int) -> slice:
        """Returns the range of a bucket, within the replica's `shard`, that this replica sums for all ranks."""
        size = elements // self.spread // self.ranks
        rank = self.worker if self.spread > 1 else self.worker * self.replicas + replica
        start = self.shard(replica, elements).start + rank * size
        return slice(start, start + size)

    def is_first(self, replica: int) -> bool:
        """Whether `replica` of this worker is the first replica of the cluster, which warns and counts for all."""
        return self.worker == 0 and replica == 0

    def use(self, peers: PeerExchange) -> None:
        """Sends collectives of CPUs over the workers' own connections; with several devices, not all-reduces."""
        of_all: list[tuple[list, list[int] | None]] = [(self._across or self._among_all, None)]
        if self._levels:
            of_all = []  # The transports of both levels carry these exchanges.
        for transports, workers in [*of_all, *((box.between, box.workers) for box in self._boxes)]:
            for place, transport in enumerate(transports):
                if "CPU" in transport.launcher._device:
                    transports[place] = TcpTransport(transport.launcher, transport.is_ordered, peers, workers)
        if self._levels:
            levels = TwoLevelTransport(*(level.across_workers(0) for level in self._levels))
            direct = self._among_all[0]
            self._among_all[0] = GroupedTcpTransport(direct.launcher, direct.is_ordered, levels)

    def count_alike(self, data: Sequence[tf.Tensor] = ()) -> None:
        """Sets the instance keys of this worker's replicas to the highest of them, after `data` are computed.

        A step that ends early, because its data ends or an operation fails, may have counted more collectives on one
        replica than on another. The next collective would then wait for ever, under different keys. Counting must wait
        for `data`, since without inputs of its own it would run before the step fails.
        """
        if self._group_size == 1 or (self.replicas == 1 and not data):  # Without data there is nothing to wait for.
            return
        boxes = [each for box in self._boxes for each in (box.between, box.inside)]
        for transports in filter(None, (self._among_all, self._across, self._within, *boxes)):
            counts = [transport.launcher.count for transport in transports]
            # On the host, as all keys follow from it; see `CollectiveLauncher`.
            with tf.device(host_of(self._devices[0])), tf.control_dependencies(data):
                highest = tf.reduce_max(tf.stack(counts))
            for count in counts:
                count.assign(highest, read_value=False)

    def reserve(self, replica: int, most: int) -> Callable[[], AbstractContextManager[None]]:
        """Reserves keys for up to `most` collectives of a branch on each transport; see `CollectiveLauncher.reserve`.

        Exchanges in a branch then overlap with those after it.
        """
        boxes = [each for box in self._boxes for each in (box.between, box.inside)]
        of_replica = [each[replica] for each in (self._among_all, self._across, self._within, *boxes) if each]
        reserved = [transport.launcher.reserve(most) for transport in of_replica]

        @contextlib.contextmanager
        def branch() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for each in reserved:
                    stack.enter_context(each())
                yield

        return branch

    def buckets_of(self, tensors: Sequence[tf.Tensor], options=None, limit_bytes: int | None = None) -> int:
        """Returns the number of buckets in which `sum_in_buckets` sums these dense tensors."""
        options = self._options.merge(options or self._options)
        laid_out = self._laid_out(tensors, self._among_all[0], options, limit_bytes)
        return sum(len(buckets) for _, _, buckets in laid_out)

    def untouched(self, replica: int) -> tf.Variable:
        """Returns a variable on a CPU of this worker, for operations that need a resource; none reads or writes it."""
        return self._launchers[replica].untouched

    def among_all(self, replica: int) -> Transport:
        """Returns the transport of a replica of this worker to all replicas."""
        return self._among_all[replica]

    def across_workers(self, replica: int) -> Transport:
        """Returns the transport on which a replica exchanges encoded gradients.

        It leads to the matching replicas of the other workers if workers have several devices, else to all replicas.
        """
        return (self._across or self._among_all)[replica]

    def within_worker(self, replica: int) -> Transport | None:
        """Returns the transport of a replica to the other devices of its worker; `None` if `spread` is 1."""
        return self._within[replica] if self._within else None

    def _all_reduce_per_replica_values(self, reduce_op, per_replica_values, options):
        self._count_alike_before(per_replica_values)
        return super()._all_reduce_per_replica_values(reduce_op, per_replica_values, options)

    def _batch_all_gather(self, per_replica_values, axis, options):
        self._count_alike_before(per_replica_values)
        return super()._batch_all_gather(per_replica_values, axis, options)

    def _count_alike_before(self, per_replica_values):
        with self._lock:  # Another thread may be running an eager reduction.
            self.count_alike(symbolic_tensors([value.values for value in per_replica_values]))

    def _all_reduce(self, reduce_op, value, replica_id, options):
        """Reduces a nest of tensors and `IndexedSlices` over all replicas. Called once per replica of this worker."""
        flat = self.sum_in_buckets(tf.nest.flatten(value), replica_id, options)
        if reduce_op == tf.distribute.ReduceOp.MEAN and self._group_size > 1:
            with tf.device(self._devices[replica_id]):
                flat = [_divide(tensor, self._group_size) for tensor in flat]
        return tf.nest.pack_sequence_as(value, flat)

    def sum_in_buckets(self, tensors, replica: int, options=None, limit_bytes: int | None = None) -> list:
        """Sums tensors and `IndexedSlices` over all replicas. Called once per replica of this worker.

        Buckets have at most `limit_bytes`, unless the user has set their size; by default see `bucket_bytes`.
        """
        if self._group_size == 1:  # The caller would read a variable by another reduction, without end.
            return [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in tensors]
        with tf.device(self._devices[replica]):
            return self._sum(tensors, self._among_all[replica], self._options.merge(options), limit_bytes)

    def _sum(self, tensors, transport, options, limit_bytes):
        totals = [
            all_reduce_sparse(tensor, transport, options) if isinstance(tensor, tf.IndexedSlices) else tensor
            for tensor in tensors
        ]
        for group, members, buckets in self._laid_out(tensors, transport, options, limit_bytes):
            joined = [join(bucket, members, multiple=_padded_to(bucket, members, transport)) for bucket in buckets]
            reduced = [transport.all_reduce(each, options) for each in joined]
            for i, total in zip(group, separate(buckets, reduced, members), strict=True):
                totals[i] = added_up(total, tensors[i].dtype)
        return totals

    def _laid_out(self, tensors, transport, options, limit_bytes=None):
        """Groups dense tensors by the type of their sum. Yields the indices, tensors and buckets of each group."""
        terms: dict[tf.DType, dict[int, tf.Tensor]] = {}
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, tf.IndexedSlices):
                term = to_add_up(tensor)
                terms.setdefault(term.dtype, {})[i] = term
        # TensorFlow's ring all-reduce waits for its own copies, so it does not gain from larger parts.
        largest = part_bytes(self._group_size) if transport.is_ordered else BUCKET_BYTES
        for group in terms.values():
            members = list(group.values())
            limit = options.bytes_per_pack or limit_bytes or bucket_bytes(members)
            part = options.bytes_per_pack or largest
            yield list(group), members, fill_buckets(members, limit, part_bytes=part)


def _padded_to(bucket, members, transport):
    """Returns a number of elements. `join` pads a bucket to a multiple of it, and then the transport can divide it.

    Padding in `join` takes fewer operations than in the transport. Exchanges in two levels divide a bucket into fewer
    parts, and send some small ones whole, so their padding is a little larger than they need.
    """
    size = sum(segment.bytes_of(members[segment.tensor]) for segment in bucket)
    in_parts = transport.is_ordered and not is_sent_whole(size, transport.ranks)
    return transport.ranks if in_parts else 1


def symbolic_tensors(values) -> list[tf.Tensor]:
    """Returns the symbolic tensors of a nest, that is, tensors computed by the function being traced."""
    return [leaf for leaf in tf.nest.flatten(values, expand_composites=True) if tf.is_symbolic_tensor(leaf)]


def _divide(total, count):
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count
