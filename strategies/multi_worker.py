"""Many workers, each with one or several devices."""

import contextlib
import socket

import tensorflow as tf

from tfdist import _tf
from tfdist.cluster import ClusterSpec, check_bindable
from tfdist.errors import ClusterError
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.communication import policy_of
from tfdist.strategies.devices import make_virtual_devices
from tfdist.strategies.peek import BalancedDataset
from tfdist.strategies.replication import ReplicatedExtended, ReplicatedStrategy

_START_TIMEOUT_SECONDS = 300


class MultiWorkerMirroredStrategy(ReplicatedStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` under which Keras 3 works, and gives what one device would give.

    Make it first in the program: TensorFlow joins the cluster when its runtime starts. All GPUs of a worker are used,
    or all its logical CPUs. Every worker must have as many.

    Args:
      cluster_resolver: As in TensorFlow. By default TF_CONFIG says who this process is; without it, one worker.
      communication_options: As in TensorFlow.
      compression: How gradients travel between workers: `None`, the name of a codec such as `"int8"`, a codec of
        `tfdist.compression`, or a function of a gradient's (shape, dtype, position) that gives a codec or `None`.

    Raises:
      TFConfigError: If TF_CONFIG is not a cluster spec that this process can join.
      ClusterError: If the workers have unequal numbers of devices.
      ValueError: If no codec has that name.
    """

    def __init__(self, cluster_resolver=None, communication_options=None, *, compression=None):
        policy_of(compression)  # Before anybody waits for other workers.
        spec = ClusterSpec.from_env() if cluster_resolver is None else None
        if spec is not None and _tf.context.context().coordination_service is None:
            check_bindable(spec)
        make_virtual_devices()
        self._take_collective_keys()
        options = communication_options or _tf.CommunicationOptions()
        extended = _MultiWorkerExtended(self, cluster_resolver=cluster_resolver, communication_options=options)
        tf.distribute.Strategy.__init__(self, extended)
        extended.compress(compression)
        self._make_reports()
        if extended._num_workers > 1:
            _share_seed(self)

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """See `ReplicatedStrategy.distribute_datasets_from_function`."""
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        if self.extended._num_workers > 1 and not isinstance(dataset, BalancedDataset):
            _tf.set_cardinality(dataset, self._longest(int(dataset.cardinality)))
        return dataset

    def _longest(self, batches: int) -> int:
        workers, own = self.extended._num_workers, self.extended._id_in_cluster
        everyone = self.reduce("SUM", batches * tf.one_hot(own, workers, dtype=tf.int64), axis=None).numpy().tolist()
        return min(everyone) if min(everyone) < 0 else max(everyone)  # Negative: unknown or without end.


class _MultiWorkerExtended(ReplicatedExtended, _tf.CollectiveAllReduceExtended):
    # A process joins its cluster once. For a second strategy TensorFlow would join again, at another moment on each
    # worker, and collectives between these moments would be lost.
    _has_joined = False

    @property
    def _crosses_border(self):
        return self._num_workers > 1

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind == "CPU":
            count = sum(_is_local(device, worker_device) for device in tf.config.list_logical_devices("CPU"))
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(count))
        return devices, kind

    def _initialize_local(self, cluster_resolver, devices=None):
        super()._initialize_local(cluster_resolver, devices=devices)
        self._install_collectives()

    def _initialize_multi_worker(self, cluster_resolver):
        _set_deadlines(cluster_resolver)
        self._std_server_started = _MultiWorkerExtended._has_joined
        super()._initialize_multi_worker(cluster_resolver)
        _MultiWorkerExtended._has_joined = True
        if self._num_workers > 1:
            self._check_devices()
        self._install_collectives()

    def _check_devices(self):
        """Compares the workers' numbers of devices before the first collective, which would wait for ever."""
        counts = _exchange_text("devices", str(len(self._devices)), self._id_in_cluster, self._num_workers)
        if len(set(counts)) > 1:
            described = ", ".join(f"worker {worker} has {count}" for worker, count in enumerate(counts))
            raise ClusterError(
                f"Every worker must have the same number of devices, but {described}. This is worker "
                f"{self._id_in_cluster} on {socket.gethostname()}. Hide devices by CUDA_VISIBLE_DEVICES, or make as "
                "many logical CPUs on each."
            )

    def _install_collectives(self):
        def collectives(devices):
            size = len(devices) * self._num_workers
            worker = self._id_in_cluster if self._num_workers > 1 else 0
            return Collectives(devices, size, self._communication_options, self._collective_keys, worker)

        self._cross_device_ops = collectives(self._devices)
        # A worker's only device is its host: one object, since TensorFlow takes both for one group and its keys are
        # counted once.
        alone = len(self._devices) == 1 and "CPU" in self._devices[0]
        self._host_cross_device_ops = self._cross_device_ops if alone else collectives([self._worker_device])


def _is_local(device, worker_device):
    asked, spec = tf.DeviceSpec.from_string(worker_device or "/device:CPU:0"), tf.DeviceSpec.from_string(device.name)
    return (spec.job, spec.task) == (asked.job, asked.task) or asked.job is None


def _set_deadlines(cluster_resolver):
    """Bounds the wait for workers that never come, which TensorFlow would wait an hour for."""
    context = _tf.context.context()
    if context.coordination_service is not None:
        return
    spec = _tf.multi_worker_util.normalize_cluster_spec(cluster_resolver.cluster_spec())
    jobs = [
        _tf.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
        for job in ("chief", "worker")
        if job in spec.jobs
    ]
    context.configure_coordination_service(
        service_type="standalone",
        service_leader=_tf.multi_worker_util.coordination_leader(spec),
        cluster_register_timeout_in_ms=_START_TIMEOUT_SECONDS * 1000,
        coordinated_jobs=jobs,
    )


def _exchange_text(name: str, text: str, own: int, workers: int) -> list[str]:
    """What each worker says under `name`, by worker; through the coordination service, once in a process."""
    context = _tf.context.context()
    with contextlib.suppress(tf.errors.AlreadyExistsError):
        context.set_config_key_value(f"tfdist/{name}/{own}", text)
    texts = []
    for worker in range(workers):
        try:
            texts.append(context.get_config_key_value(f"tfdist/{name}/{worker}", _START_TIMEOUT_SECONDS * 1000))
        except tf.errors.OpError as error:
            raise ClusterError(
                f"Worker {own} on {socket.gethostname()} waited {_START_TIMEOUT_SECONDS} s for worker {worker} to say "
                f"its {name}: {error.message}. See the log of worker {worker}."
            ) from error
    return texts


def _share_seed(strategy):
    """Gives all workers the chief's global seed where the user set none, so that they shuffle alike.

    Keras and tf.data shuffle before the data is split among the workers. With seeds of their own, workers would split
    different orders, and examples would be seen twice or not at all in an epoch.
    """
    if tf.compat.v1.random.get_seed(None)[0] is not None:
        return
    with strategy.scope():
        seed = tf.Variable(tf.random.uniform([], maxval=tf.int32.max, dtype=tf.int32), trainable=False)
    tf.random.set_seed(int(seed.numpy()))
