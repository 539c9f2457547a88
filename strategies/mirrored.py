"""One worker, several devices."""

import functools

import tensorflow as tf

from tfdist import _tf
from tfdist.cluster.launch_check import warn_if_one_of_many
from tfdist.faults import FaultTolerance, watchdog
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.outside_scope import watch_models_outside
from tfdist.strategies.replicated import ReplicatedStrategy
from tfdist.strategies.replicated_extended import ReplicatedExtended
from tfdist.strategies.virtual_devices import local_devices


class MirroredStrategy(ReplicatedStrategy, tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` under which every feature of Keras 3 gives what one device would give.

    Args:
      devices: Device strings, such as `["GPU:0", "GPU:1"]`. By default all GPUs, else all logical CPUs.
      cross_device_ops: As in TensorFlow. The default reduces by collectives. With any other, gradients cannot be
        exchanged inside a branch: `gradient_accumulation_steps` and `LossScaleOptimizer` fail as they do in TensorFlow.
      compression: How gradients travel: `None`, the name of a codec such as `"int8"` or `"powersgd(8)"`, a codec of
        `tfdist.compression`, or a function of a gradient's (shape, dtype, position) that gives one of these; of what it
        gives, `min_elements` does not count. Gives bit for bit what as many workers with one device each would give.
      fault_tolerance: Deadlines, a `tfdist.FaultTolerance`; by default those of its defaults and the environment. Of
        one process they are those of the watchdog, which watches it under `tfdist run`, and of preemption.

    Attributes:
      fault_tolerance: The deadlines that hold.

    Raises:
      ValueError: If no codec has that name, `cross_device_ops` does not reduce by collectives, or an environment
        variable is no deadline.
      TypeError: If `compression` is a function of other arguments.
    """

    def __init__(self, devices=None, cross_device_ops=None, *, compression=None, fault_tolerance=None):
        self.fault_tolerance = (fault_tolerance or FaultTolerance()).with_environment()
        warn_if_one_of_many(never_joins=True)
        devices = devices or local_devices()
        self._take_collective_keys()
        extended = _MirroredExtended(self, devices=devices, cross_device_ops=cross_device_ops)
        tf.distribute.Strategy.__init__(self, extended)
        extended.compress(compression)
        self._make_reports()
        if self.num_replicas_in_sync > 1:
            watch_models_outside(workers=1)
        watchdog.start_alone(self)


class _MirroredExtended(ReplicatedExtended, _tf.MirroredExtended):
    @property
    def _crosses_border(self):
        return self._num_replicas_in_sync > 1

    def _make_collective_ops_with_fallbacks(self):
        ops = super()._make_collective_ops_with_fallbacks()
        if not isinstance(ops, _tf.CollectiveAllReduce):
            return ops
        return Collectives(self._devices, len(self._devices), self._communication_options, self._collective_keys)

    def _get_cross_device_ops(self, value):
        # TensorFlow keeps int32 in host memory, where GPU collectives do not reach.
        first = self._local_results(value)[0]
        if getattr(first, "dtype", None) == tf.int32 and any("GPU" in device for device in self._devices):
            return self._on_host
        return self._cross_device_ops

    @functools.cached_property
    def _on_host(self):
        return tf.distribute.ReductionToOneDevice()
