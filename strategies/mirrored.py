"""`MirroredStrategy`: the strategy for one worker with several devices."""

import functools

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.cluster.launch_check import warn_if_one_of_many
from tfdist.faults import FaultTolerance, watchdog
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.collectives.shard_groups import check_shard_group_size
from tfdist.strategies.freed_memory import keep_unless_sharded, return_if_divided
from tfdist.strategies.local_steps.synchronization import check_synchronization
from tfdist.strategies.outside_scope import watch_models_outside
from tfdist.strategies.replicated import ReplicatedStrategy
from tfdist.strategies.replicated_extended import ReplicatedExtended
from tfdist.strategies.sharding.state_creation import check_model_sharding
from tfdist.strategies.virtual_devices import local_devices


class MirroredStrategy(ReplicatedStrategy, tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` under which every feature of Keras 3 gives the results of one device.

    Args:
      devices: Device strings, such as `["GPU:0", "GPU:1"]`. By default all GPUs, or all logical CPU devices.
      cross_device_ops: As in TensorFlow. The default reduces by collectives. Other ops cannot exchange gradients inside
        a branch: `gradient_accumulation_steps` and `LossScaleOptimizer` fail as they do in TensorFlow.
      compression: How to compress gradients: `None`, a codec of `tfdist.compression` or its name, such as `"int8"` or
        `"powersgd(8)"`, `"auto"`, or a function that chooses for each gradient; see `MultiWorkerMirroredStrategy`. The
        result equals, bit for bit, the result of as many workers with one device each.
      time_exchanges: Whether to measure how long compressed exchanges take; see `MultiWorkerMirroredStrategy`.
      model_sharding: `"optimizer"` divides the optimizer's state among the devices, `"parameters"` the weights too;
        see `MultiWorkerMirroredStrategy`.
      shard_group_size: Number of devices that divide the model among themselves, if not all of them do; see
        `MultiWorkerMirroredStrategy`. One replica ignores it.
      synchronization: `None`, `tfdist.LocalSGD(every=8)` or `tfdist.DiLoCo(every=100)`; see
        `MultiWorkerMirroredStrategy`. The result equals, bit for bit, that of as many workers with one device each.
      fault_tolerance: Deadlines, by default `tfdist.FaultTolerance()`; the environment overrides them. A single process
        uses only the deadlines for preemption and, under `tfdist run`, for the watchdog.

    Attributes:
      synchronization: As given.
      fault_tolerance: The deadlines in use.

    Raises:
      ValueError: If no codec has the given name, `model_sharding` is unknown, `shard_group_size` is given without
        `model_sharding`, groups of this size are not possible, `compression` or `model_sharding` is given with
        `cross_device_ops` that do not reduce by collectives, `synchronization` does not go with another argument, or an
        environment variable is not a valid deadline.
      TypeError: If `compression` is a function with other arguments, or `synchronization` has another type.
    """

    def __init__(
        self,
        devices=None,
        cross_device_ops=None,
        *,
        compression=None,
        time_exchanges=False,
        model_sharding=None,
        shard_group_size=None,
        synchronization=None,
        fault_tolerance=None,
    ):
        check_synchronization(synchronization, model_sharding, compression)
        if synchronization is not None and synchronization.tolerate_lost_workers:
            raise ValueError(
                "MirroredStrategy has one worker, so it cannot go on without lost workers, but synchronization="
                f"{synchronization!r} has tolerate_lost_workers. Leave it out, or use MultiWorkerMirroredStrategy."
            )
        check_model_sharding(model_sharding)
        check_shard_group_size(shard_group_size, model_sharding)
        self.fault_tolerance = (fault_tolerance or FaultTolerance()).with_environment()
        self.model_sharding, self.shard_group_size = model_sharding, shard_group_size
        self.synchronization = synchronization
        warn_if_one_of_many(never_joins=True)
        return_if_divided(model_sharding)
        devices = devices or local_devices()
        self._take_collective_keys()
        extended = _MirroredExtended(self, devices=devices, cross_device_ops=cross_device_ops)
        keep_unless_sharded(model_sharding)
        tf.distribute.Strategy.__init__(self, extended)
        extended.shard(model_sharding, shard_group_size)
        extended.compress(compression, time_exchanges)
        extended.train_locally(synchronization)
        self._make_reports()
        if self.num_replicas_in_sync > 1:
            watch_models_outside(workers=1)
        watchdog.start_alone(self)


class _MirroredExtended(ReplicatedExtended, tf_internals.MirroredExtended):
    @property
    def _crosses_border(self):
        return self._num_replicas_in_sync > 1

    def _make_collective_ops_with_fallbacks(self):
        ops = super()._make_collective_ops_with_fallbacks()
        if not isinstance(ops, tf_internals.CollectiveAllReduce):
            return ops
        return Collectives(self._devices, len(self._devices), self._communication_options, self._collective_keys)

    def _get_cross_device_ops(self, value):
        # TensorFlow keeps int32 in host memory, which GPU collectives cannot access.
        first = self._local_results(value)[0]
        if getattr(first, "dtype", None) == tf.int32 and any("GPU" in device for device in self._devices):
            return self._on_host
        return self._cross_device_ops

    @functools.cached_property
    def _on_host(self):
        return tf.distribute.ReductionToOneDevice()
