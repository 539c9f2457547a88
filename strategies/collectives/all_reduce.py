"""The all-reduce of both strategies: dense tensors in buckets, sparse ones by rows."""

import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.collectives.buckets import BUCKET_BYTES, fill_buckets, pack, unpack
from tfdist.strategies.collectives.launcher import Launcher
from tfdist.strategies.collectives.sparse import all_reduce_sparse


class Collectives(_tf.CollectiveAllReduce):
    """`CollectiveAllReduce` with run-time keys, buckets by dtype and a deterministic sparse exchange."""

    def __init__(self, devices, group_size, options, collective_keys):
        super().__init__(devices, group_size, options, collective_keys)
        group_key = collective_keys.get_group_key(self._devices)
        self._launchers = [
            Launcher(group_key, group_size, collective_keys, device, options) for device in self._devices
        ]

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
        totals = list(tensors)
        dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
        for bucket in fill_buckets([tensors[i] for i in dense], options.bytes_per_pack or BUCKET_BYTES):
            members = [tensors[dense[i]] for i in bucket]
            total = launcher.all_reduce(pack(members), options=options)
            for i, part in zip(bucket, unpack(total, members), strict=True):
                totals[dense[i]] = tf.ensure_shape(part, tensors[dense[i]].shape)
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                totals[i] = all_reduce_sparse(tensor, launcher, self._group_size, options)
        return totals


def _divide(total, count):
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count
