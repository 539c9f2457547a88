"""The strategy for many workers, each with one or several devices."""

import atexit
import contextlib
import functools
import os
import random
import re
import socket
import time
import weakref
import zlib

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist._compat import dataset_internals, keras_internals, keras_stack, tf_internals
from tfdist.cluster import ClusterSpec, check_bindable
from tfdist.cluster.launch_check import warn_if_one_of_many
from tfdist.errors import ClusterError, TFConfigError
from tfdist.faults import FaultTolerance, preemption, rendezvous, watchdog
from tfdist.faults.chief_liveness import watch_chief
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.creation_watch import CreationWatch
from tfdist.faults.peer_liveness import PeerLiveness
from tfdist.faults.shutdown import leave_together
from tfdist.faults.stall_diagnosis import meeting_of, unlike_calls
from tfdist.faults.worker_agreement import WorkerAgreement
from tfdist.network.tls import Tls
from tfdist.strategies import distributed_variables
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.collectives.collective_launcher import carrier_of
from tfdist.strategies.collectives.peer_connections import connect
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.compression import Codec
from tfdist.strategies.compression_policy import policy_of
from tfdist.strategies.datasets import BalancedDataset
from tfdist.strategies.model_description import described_compile, described_layers
from tfdist.strategies.outside_scope import watch_models_outside
from tfdist.strategies.replicated import ReplicatedStrategy, StrategyUse
from tfdist.strategies.replicated_extended import ReplicatedExtended
from tfdist.strategies.row_comparison import CUSTOM_LOOP, RowComparison, RowsRead
from tfdist.strategies.step_report import host_of
from tfdist.strategies.tensor_origin import Origin, origins_of, sizes_of
from tfdist.strategies.virtual_devices import make_virtual_devices

# Different processors round equal steps with smaller differences; another file or epoch makes larger ones.
_ROUNDING = 1e-3

_CALLS = ("fit", "evaluate", "predict")  # Workers exchange the index of a call.

# Keras' callbacks that write files. Every worker would run them.
_WRITERS = (
    *(keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger),
    *(keras.callbacks.ModelCheckpoint, keras.callbacks.TensorBoard),
)

# TensorFlow sends tensors in strings of this many bytes, by default 4096: see grpc_worker_service.cc. From 128 KiB on,
# glibc's threshold, the kernel would map and clear new memory for each string.
_CHUNK_BYTES = 1 << 16
# Once all workers are there, TensorFlow connects them within seconds. It gets the rest of the start timeout, but at
# least 10 s, and at most 60 s or a fifth of that timeout if longer. TensorFlow itself gives up after 0.7 of this time.
_CONNECT_SECONDS, _REGISTER_PART = (10.0, 60.0), 0.7
_TRANSPORTS = ("auto", "tensorflow")
_TLS_ERROR = (
    "TLS needs the workers' own connections, but {why}. Give each worker a certificate for its host in TF_CONFIG, from "
    "the authority in TFDIST_TLS_CA, and open the hosts' ports to each other; or unset the variables TFDIST_TLS_*, and "
    "protect the network by other means."
)
_LINES_SECONDS = 10.0  # For making the workers' own connections, which are optional.


class MultiWorkerMirroredStrategy(ReplicatedStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` under which Keras 3 works and gives the results of one device.

    Create it before anything else in the program: TensorFlow joins the cluster when its runtime starts. Each worker
    uses all its GPUs or, without GPUs, its logical CPU devices (one by default). All workers must have the same number
    of devices.

    Args:
      cluster_resolver: As in TensorFlow. By default TF_CONFIG describes the cluster and this worker; without TF_CONFIG
        there is one worker. A given resolver sets TF_CONFIG if unset, for code that reads the chief there.
      communication_options: As in TensorFlow.
      compression: How to compress gradients between workers: `None`, a codec of `tfdist.compression` or its name, such
        as `"int8"` or `"powersgd(8)"`. A function of (shape, dtype, path) may choose one of these for each
        gradient, alike on all workers and regardless of `min_elements`. The path is that of the Keras variable, such as
        "sequential/dense/kernel", the name of a `tf.Variable`, or empty if the variable is not known.
      time_exchanges: Whether `communication.traffic()` has the seconds of coding and exchanging compressed gradients.
        Measuring them slows steps down, most of all with fast codecs. Without `compression` it has no effect.
      transport: How CPU workers exchange the tensors of a step; equal on all workers. `"auto"`: over their own
        connections if possible, with TLS if TFDIST_TLS_CERT, TFDIST_TLS_KEY and TFDIST_TLS_CA are set.
        `"tensorflow"`: only over TensorFlow's collectives, which need no ports beside those of TF_CONFIG.
      fault_tolerance: Deadlines, by default `tfdist.FaultTolerance()`; the environment overrides them.

    Attributes:
      compression: As given.
      transport: As given.
      fault_tolerance: The deadlines in use.

    Raises:
      TFConfigError: If TF_CONFIG is not a cluster spec that this process can join, or differs from the resolver's.
      ClusterError: If a worker is late, or has another cluster, other versions or another number of devices.
      ValueError: If no codec or transport has the given name, or an environment variable is not a valid deadline.
      TypeError: If `compression` is a function with other arguments.
    """

    def __init__(
        self,
        cluster_resolver=None,
        communication_options=None,
        *,
        compression=None,
        time_exchanges=False,
        transport="auto",
        fault_tolerance=None,
    ):
        policy_of(compression)  # Checks the argument before any worker waits for its peers.
        if transport not in _TRANSPORTS:
            raise ValueError(f"`transport` must be one of {', '.join(map(repr, _TRANSPORTS))}, got {transport!r}.")
        self.fault_tolerance = (fault_tolerance or FaultTolerance()).with_environment()
        self.compression = compression
        self.transport = transport
        if cluster_resolver is None and ClusterSpec.from_env() is None:
            warn_if_one_of_many()
            # TensorFlow's own resolver would read an empty TF_CONFIG as JSON.
            cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        make_virtual_devices()
        self._take_collective_keys()
        options = communication_options or tf_internals.CommunicationOptions()
        extended = _MultiWorkerExtended(self, cluster_resolver=cluster_resolver, communication_options=options)
        tf.distribute.Strategy.__init__(self, extended)
        extended.compress(compression, time_exchanges)
        self._make_reports()
        if extended._num_workers > 1:
            with _first_exchange():
                self.reduce("SUM", tf.ones([]), axis=None)  # Each worker receives from a peer, unlike in a broadcast.
                _share_seed(self)
            extended.connect_peers(transport)
            watchdog.start(self, extended.board, extended.creations, extended.carried_bytes)
            self.reports.rows_read = RowsRead(host_of(extended.worker_devices[0]))
            watch_models_outside(extended._num_workers)
            self._use = StrategyUse()  # Without the exchanges above, which are not the user's.
            if extended.should_checkpoint:
                atexit.register(_warn_if_unused, self._use, extended._num_workers, type(self).__name__)
        else:
            watchdog.start_alone(self)

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """See `ReplicatedStrategy.distribute_datasets_from_function`."""
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        if self.extended._num_workers > 1 and isinstance(dataset, BalancedDataset):
            self.extended.agreement.on_sharding(dataset_fn.described(), dataset_fn.shown())
        elif self.extended._num_workers > 1:
            dataset_internals.set_cardinality(dataset, self._longest(int(dataset.cardinality)))
        return dataset

    def _check_scope(self, step):
        super()._check_scope(step)
        if self.extended._num_workers > 1:
            held = functools.partial(distributed_variables.checksums, distributed_variables.variables_of(step.model))
            codecs = self.communication.described_codecs(step.model) if self.communication else []
            self.extended.agreement.on_model(step.model, held, codecs)

    def _compare_model(self, model):
        if self.extended._num_workers == 1 or model is None or model in self._described:
            return
        self._described.add(model)
        described = [*described_layers(model), *self._described_compile(model)]
        if not self._is_alike(described):
            self.extended.agreement.on_description(described)

    def _described_compile(self, model):
        optimizer = getattr(model, "optimizer", None)
        given = [] if optimizer is None else self.extended.given_to_optimizers.get(optimizer, [])
        return [*described_compile(model), *given]

    @functools.cached_property
    def _described(self):
        return weakref.WeakSet()

    def _begin_fit(self, model, fit):
        if self.extended._num_workers == 1:
            return
        if self.extended.should_checkpoint:
            _warn_of_writers(fit.callbacks)
        on_all = [type(each).__name__ for each in fit.callbacks if getattr(each, "runs_on_all_workers", False)]
        arguments = [*fit.arguments, f"{', '.join(on_all) or 'none'} of the callbacks that run on all workers"]
        compiled = self._described_compile(model)  # Not cached, since a model may be compiled again.
        if not self._is_alike([arguments, compiled]):
            self.extended.agreement.on_fit(arguments)
            self.extended.agreement.on_description(compiled)
        if self.extended.agreement.has_compared(model):
            self._check_still_alike(model)
        sharding = getattr(keras_internals.dataset_of(keras_stack.epochs_of_beginning_fit()), "sharding", None)
        if sharding is not None and not self._is_alike(sharding.serialize()):
            self.extended.agreement.on_position(sharding.described_state())

    def _check_still_alike(self, model):
        held = distributed_variables.held_alike(distributed_variables.variables_of(model))
        # Random states may differ if only the chief draws random numbers.
        held = [each for each in held if not isinstance(each.value, distributed_variables.RandomStateVariable)]
        checksums = distributed_variables.checksums(held)
        own = [int(value, 16) for _, value in checksums]
        # A collective compares the values, so that late or missing workers are handled as in the next step.
        if self._is_alike(own):
            return
        unlike = _places_where(self.extended.of_all_workers(own), lambda values: len(set(values)) > 1)
        are_far = [int(self._is_far_apart(held[place])) for place in unlike]
        far = _places_where(self.extended.of_all_workers(are_far), any)
        if far:
            self.extended.agreement.on_values([checksums[unlike[place]] for place in far])
        if self.extended.should_checkpoint:
            logging.warning("The workers round differently: their values of model %r are no longer equal.", model.name)

    def _check_batches(self, epochs, dataset):
        adapter = epochs.data_adapter
        last = adapter.partial_batch_size if keras_internals.source_of(epochs) == "arrays" else None
        batches, described_data = adapter.num_batches or 0, _described_data(dataset, last)
        call = self.reports.activity.call
        own = [batches, _crc(described_data), _CALLS.index(call.name) if call and call.name in _CALLS else 0]
        *_, names = zip(*(everyone := self.extended.of_all_workers(own)), strict=True)
        if len(set(names)) > 1:
            raise ClusterError(unlike_calls({i: meeting_of(_CALLS[name], call.number) for i, name in enumerate(names)}))
        if len({batches for batches, *_ in everyone}) > 1 and not epochs.steps_per_epoch:
            described = ", ".join(
                f"worker {worker} has {batches or 'an unknown number'}" for worker, (batches, *_) in enumerate(everyone)
            )
            raise ClusterError(
                f"All workers read the same data and take their rows of each batch, so they must have equally many "
                f"batches, but {described}. This is worker {self.extended._id_in_cluster} on {socket.gethostname()}. "
                "Give all workers the same data and `batch_size`, which counts the rows of all workers; or set "
                "steps_per_epoch. If each worker shall read its own data, use `distribute_datasets_from_function`."
            )
        if len({rest for _, rest, _ in everyone}) > 1:
            self.extended.agreement.on_data(described_data)

    def _compare_rows(self, dataset, epochs):
        purpose = keras_stack.purpose() if epochs else CUSTOM_LOOP
        source = keras_internals.source_of(epochs) if epochs else "dataset"
        if source == "dataset":
            origins = origins_of(dataset)
        else:
            origin = Origin.GRAPH if source == "arrays" else Origin.PYTHON
            origins = [origin] * len(tf.nest.flatten(dataset.element_spec))
        size = int(dataset.cardinality())
        is_endless = epochs.steps_per_epoch is not None if epochs else size == tf.data.UNKNOWN_CARDINALITY
        is_endless |= size == tf.data.INFINITE_CARDINALITY
        return RowComparison(
            self.extended.agreement, origins, purpose, is_endless, self.reports.rows_read, purpose == "fit"
        )

    def _is_alike(self, what):
        """Whether `what` is equal on all workers. Costs an exchange of one number."""
        return len(set(self.extended.of_all_workers(_crc(what)))) == 1

    def _is_far_apart(self, variable):
        """Whether the values of a variable differ between workers by more than processors round differently."""
        own = tf.cast(variable.value.values[0], tf.float64)
        mean = self.reduce("SUM", own, axis=None) / self.extended._num_workers
        tolerance = _ROUNDING if variable.value.dtype.is_floating else 0
        # Not `>`: every comparison with NaN is false, and NaN must count as far apart.
        return not bool(tf.reduce_max(tf.abs(own - mean)) <= tolerance * tf.reduce_max(tf.abs(mean)))

    def _longest(self, batches: int) -> int:
        everyone = self.extended.of_all_workers(batches)
        return min(everyone) if min(everyone) < 0 else max(everyone)  # Negative: unknown or infinite.


class _MultiWorkerExtended(ReplicatedExtended, tf_internals.CollectiveAllReduceExtended):
    # A process joins its cluster once. TensorFlow would join again for a second strategy, at another moment on each
    # worker, and lose the collectives between these moments.
    _has_joined = False
    # Whether this process has tried to connect to its peers; the transport; the reason for the failure.
    _has_tried, _peers, _problem = False, None, ""
    # Function that returns the bytes that steps exchanged over the workers' own connections; None without these.
    carried_bytes = None

    @property
    def _crosses_border(self):
        return self._num_workers > 1

    def of_all_workers(self, numbers):
        """Gathers integers from all workers, by worker: one each, or lists of equal length."""
        own = tf.one_hot(self._id_in_cluster, self._num_workers, dtype=tf.int64)
        said = tf.tensordot(own, tf.constant(numbers, tf.int64), 0)
        with watchdog.waiting_for_all("`fit`, `evaluate`, `predict` and the distribution of datasets"):
            return self._container_strategy().reduce("SUM", said, axis=None).numpy().tolist()

    def connect_peers(self, transport):
        """Sends the exchanges of a step over the workers' own connections if all can connect; not from GPUs.

        Raises:
          ClusterError: If TLS is configured, but TensorFlow's collectives would carry the exchanges.
        """
        cls, tls = _MultiWorkerExtended, Tls.from_env()
        why = self._why_not_own_connections(transport)
        if why is None and not cls._has_tried:
            cls._has_tried = True
            cls._peers, cls._problem = self._connect_workers()
            if cls._peers is None and tls is None:
                logging.warning(
                    "The exchanges of a step go over gRPC, which takes more processor time, since the workers can "
                    "connect only at the ports of TF_CONFIG: %s. Open the hosts' other ports to each other.",
                    cls._problem,
                )
        if tls and why is None and len(self._devices) > 1:
            why = "workers with several devices each exchange sums over TensorFlow's collectives"
        if tls and (why or cls._peers is None):
            raise ClusterError(_TLS_ERROR.format(why=why or cls._problem))
        if why is None and cls._peers is not None:
            self._cross_device_ops.use(cls._peers)
            if len(self._devices) == 1:  # Otherwise TensorFlow's collectives carry all sums.
                self.carried_bytes = cls._peers.carried_bytes

    def _why_not_own_connections(self, transport):
        """The reason why TensorFlow's collectives must carry this strategy's exchanges, or `None`."""
        if transport == "tensorflow":
            return "transport='tensorflow' does not use them"
        if "CPU" not in self._devices[0]:
            return "GPUs exchange over TensorFlow's collectives"
        if self._communication_options.timeout_seconds:
            return "`communication_options` has a `timeout_seconds`, which only TensorFlow's collectives support"
        return None

    def _connect_workers(self):
        """Connects all workers with each other. Returns the transport, or `None` and the reason of the failure."""
        addresses = rendezvous.addresses_of(ClusterSpec.from_env())
        names = [f"worker {worker} at {address}" for worker, address in enumerate(addresses)]
        lines, problem = {}, "see the logs of its peers"
        try:
            lines = connect(self.board, addresses, _LINES_SECONDS)
        except (OSError, ClusterError) as error:
            problem = str(error)
        if all(self.of_all_workers(int(bool(lines)))):
            return PeerExchange(self._id_in_cluster, lines, names), ""
        for line in lines.values():
            line.close()
        return None, f"{names[self._id_in_cluster]} on {socket.gethostname()} cannot connect to all peers: {problem}"

    @functools.cached_property
    def creations(self):
        """Counts the variables that this worker makes."""
        return watchdog.Creations()

    def _create_variable(self, next_creator, **kwargs):
        if keras_stack.makes_for_comparison():  # Only the worker that saves makes this temporary object.
            return next_creator(**kwargs)
        self.check_in_company()
        compared = contextlib.nullcontext()
        if self._num_workers > 1:
            compared = self._creation_watch.making(*self._described_variable(kwargs))
        with compared, self.creations.one_more():
            return super()._create_variable(next_creator, **kwargs)

    @functools.cached_property
    def _creation_watch(self):
        return CreationWatch(self.board, self.agreement.next_name("variable"))

    @functools.cached_property
    def given_to_optimizers(self):
        """This worker's own values of each optimizer's numbers. All workers use the chief's values."""
        return weakref.WeakKeyDictionary()

    def _described_variable(self, kwargs):
        """Describes type, shape and maker of a variable to be made, without and with its name.

        Records the value in `given_to_optimizers` if an optimizer makes the variable from a float number.
        """
        value, maker = kwargs.get("initial_value"), next(iter(keras_internals.open_scopes()), None)
        made = keras_stack.variable_being_made()
        shape = tf.TensorShape(getattr(value, "shape", None) if made is None else made.shape)
        dtype = tf.as_dtype(kwargs.get("dtype") or getattr(value, "dtype", None) or tf.float32).name
        is_number = isinstance(value, tf_internals.EagerTensor) and value.shape.rank == 0
        if isinstance(maker, keras.optimizers.Optimizer) and is_number and value.dtype.is_floating:
            numbers = self.given_to_optimizers.setdefault(maker, [])
            name = re.sub(r"_\d+$", "", str(kwargs.get("name")))  # Without the number that makes names unique.
            numbers.append(f"{name}={float(value)} in the optimizer {type(maker).__name__}")
        made_by = "" if maker is None else f", made by {type(maker).__name__}"
        kind = f"{dtype}{'' if shape.rank is None else list(shape)}{made_by}"
        return kind, f"{'a variable' if made is None else repr(made.name)}, {kind}"

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        dtype, given = kwargs.get("dtype"), kwargs.get("initial_value")
        carrier = carrier_of(dtype)
        if replica_id or carrier is None or self._num_workers == 1:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)

        def carried():
            value = given() if callable(given) else given
            return tf.cast(getattr(value, "wrapped_value", value), carrier)  # A value from a checkpoint is wrapped.

        kwargs |= {"dtype": carrier, "initial_value": carried}
        make = super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        return lambda: tf.cast(make(), dtype)

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
        options = self._container_strategy().fault_tolerance
        if not _MultiWorkerExtended._has_joined:
            _join(cluster_resolver, options, super()._initialize_multi_worker)
            _MultiWorkerExtended._has_joined = True
        else:
            self._std_server_started = True
            super()._initialize_multi_worker(cluster_resolver)
        self.board = CoordinationStore(self._id_in_cluster, self._num_workers)
        self.agreement = WorkerAgreement(self.board, options.start_timeout_seconds)
        if self._num_workers > 1:  # Before the first collective, which would wait for ever if setups differ.
            strategy = self._container_strategy()
            transport = self._why_not_own_connections(strategy.transport) or "own connections"
            self.agreement.on_setup(len(self._devices), _described(strategy.compression), transport)
        self._install_collectives()

    def _update_config_proto(self, config_proto):
        config = super()._update_config_proto(config_proto)
        config.experimental.recv_buf_max_chunk = _CHUNK_BYTES
        return config

    def _install_collectives(self):
        def collectives(devices):
            size = len(devices) * self._num_workers
            worker = self._id_in_cluster if self._num_workers > 1 else 0
            return Collectives(devices, size, self._communication_options, self._collective_keys, worker)

        self._cross_device_ops = collectives(self._devices)
        # A worker's only CPU is also its host. One object serves both, since TensorFlow treats both as one group and
        # the keys of a group are counted once.
        alone = len(self._devices) == 1 and "CPU" in self._devices[0]
        self._host_cross_device_ops = self._cross_device_ops if alone else collectives([self._worker_device])


def _crc(what):
    return zlib.crc32(repr(what).encode())


def _described_data(dataset, last):
    """Properties of the data that must be equal on all workers, known before any worker reads it."""
    leaves = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    kinds = [f"tensors of {leaf.dtype.name}{leaf.shape}" for leaf in leaves if isinstance(leaf, tf.TensorSpec)]
    sizes = [f"{size} elements in a stage of the pipeline" for size in sizes_of(dataset)]
    return [f"{last or 'all'} rows in the last batch", *sizes, *kinds]


def _places_where(of_all_workers, holds):
    """The positions in the workers' lists at which `holds` is true of all workers' values."""
    return [place for place, said in enumerate(zip(*of_all_workers, strict=True)) if holds(said)]


def _is_local(device, worker_device):
    asked, spec = tf.DeviceSpec.from_string(worker_device or "/device:CPU:0"), tf.DeviceSpec.from_string(device.name)
    return (spec.job, spec.task) == (asked.job, asked.task) or asked.job is None


def _described(compression):
    """Describes `compression` equally in every process, so without memory addresses."""
    while isinstance(compression, functools.partial):
        compression = compression.func
    if compression is None or isinstance(compression, str | Codec):
        return repr(compression)
    return getattr(compression, "__qualname__", type(compression).__qualname__)


def _join(cluster_resolver, options, connect):
    """Connects the workers once all are there, since TensorFlow would wait for them without a deadline."""
    if cluster_resolver.task_type not in ("chief", "worker"):
        connect(cluster_resolver)
        return
    jobs = tf_internals.multi_worker_util.normalize_cluster_spec(cluster_resolver.cluster_spec()).as_dict()
    cluster = ClusterSpec(jobs, cluster_resolver.task_type, cluster_resolver.task_id)
    named = ClusterSpec.from_env()
    if named is not None:
        _check_alike(named, cluster)
    if tf_internals.runtime_has_started() and tf_internals.context.context().coordination_service is None:
        raise ClusterError(
            "A strategy of many workers must be made before TensorFlow's runtime starts, since the runtime joins the "
            "cluster when it starts, but a tensor, a variable, a layer or a dataset was made before. This is "
            f"{cluster.describe()} on {socket.gethostname()}. Move `tfdist.MultiWorkerMirroredStrategy()` to the top "
            "of the program, right after the imports."
        )
    if tf_internals.context.context().coordination_service is None:
        check_bindable(cluster, pod_seconds=options.start_timeout_seconds)
    if named is None:
        os.environ["TF_CONFIG"] = cluster.to_json()
    deadline = time.monotonic() + options.start_timeout_seconds
    lines = rendezvous.meet(cluster, options.start_timeout_seconds)
    least, most = _CONNECT_SECONDS
    most = max(most, options.start_timeout_seconds / 5)
    seconds = max(least, min(most, deadline - time.monotonic()))
    _set_deadlines(cluster_resolver, options, _REGISTER_PART * seconds)
    with rendezvous.connecting(cluster, seconds):
        try:
            connect(cluster_resolver)
        except tf.errors.DeadlineExceededError as error:
            raise ClusterError(rendezvous.unconnected(cluster, seconds)) from error
    preemption.give_signals_back()
    if cluster.num_workers > 1:
        board = CoordinationStore(cluster.worker_id, cluster.num_workers)
        addresses = rendezvous.addresses_of(cluster)
        lifelines = PeerLiveness(lines, addresses, lambda worker: board.report_loss(worker, addresses[worker]))
        leave_together(board, lifelines, options.shutdown_timeout_seconds)
        if cluster.worker_id:
            watch_chief(jobs, lifelines, board, options.heartbeat_timeout_seconds)


def _check_alike(named, cluster):
    """Checks that TF_CONFIG and the resolver agree, since other code reads the chief from TF_CONFIG."""
    places = [(spec.describe(), ", ".join(rendezvous.addresses_of(spec))) for spec in (named, cluster)]
    if places[0] != places[1]:
        said, resolved = (f"{place} (of {addresses})" for place, addresses in places)
        raise TFConfigError(
            f"TF_CONFIG and the strategy's cluster_resolver must name the same worker of the same cluster, but "
            f"TF_CONFIG has {said}, and the resolver has {resolved}. Unset TF_CONFIG, or give no cluster_resolver."
        )


def _set_deadlines(cluster_resolver, options, register_seconds):
    """Sets TensorFlow's deadlines for workers that do not register, and for missing heartbeats."""
    context = tf_internals.context.context()
    if context.coordination_service is not None:
        return
    spec = tf_internals.multi_worker_util.normalize_cluster_spec(cluster_resolver.cluster_spec())
    jobs = [
        tf_internals.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
        for job in ("chief", "worker")
        if job in spec.jobs
    ]
    context.configure_coordination_service(
        service_type="standalone",
        service_leader=tf_internals.multi_worker_util.coordination_leader(spec),
        cluster_register_timeout_in_ms=round(register_seconds * 1000),
        heartbeat_timeout_in_ms=round(options.heartbeat_timeout_seconds * 1000),
        coordinated_jobs=jobs,
    )


@contextlib.contextmanager
def _first_exchange():
    """Explains a failure of the workers' first exchange. Before it, workers only talk to worker 0."""
    try:
        yield
    except tf.errors.OpError as error:
        cluster = ClusterSpec.from_env()
        addresses = ", ".join(rendezvous.addresses_of(cluster))
        raise ClusterError(
            f"All workers must be able to connect to each other at their addresses in TF_CONFIG ({addresses}), but "
            f"their first exchange failed. This is {cluster.describe()}, on {socket.gethostname()}. Correct the "
            f"addresses, or open these ports between the hosts. TensorFlow's error: {error.message}"
        ) from error


def _warn_of_writers(callbacks):
    names = ", ".join(sorted({type(each).__name__ for each in callbacks if type(each) in _WRITERS}))
    if names:
        logging.warning("Keras' own %s writes the same files on all workers. Use the one of tfdist.callbacks.", names)


def _warn_if_unused(use, workers, name):
    """Warns of a forgotten `with strategy.scope():`, since otherwise nothing shows that each worker trained alone."""
    if not use.began:
        logging.warning(
            "%d workers have made a %s whose scope() was never entered, so each worker trained by itself. Make and "
            "compile the model inside `with strategy.scope():`.",
            workers,
            name,
        )


def _share_seed(strategy):
    """Gives all workers the chief's random states where the user set no seed, so that they shuffle alike.

    Keras, tf.data, and generators that use NumPy's global state shuffle before the data is split among the workers.
    With different seeds, workers would split different orders, and an epoch would have some examples twice and others
    never.
    """
    own, _ = tf.compat.v1.random.get_seed(None)
    drawn = tf.random.uniform([], maxval=tf.int32.max, dtype=tf.int64) if own is None else tf.constant(own, tf.int64)
    version, numbers, _ = random.getstate()  # Keras shuffles a `PyDataset` by this state.
    _, of_numpy, position, *_ = np.random.get_state()  # `ImageDataGenerator` uses this state.
    with strategy.scope():
        seed = tf.Variable(drawn, trainable=False)
        state = tf.Variable(tf.constant(numbers, tf.int64), trainable=False)
        numpy_state = tf.Variable(tf.constant([position, *of_numpy], tf.int64), trainable=False)
    if own is None:
        tf.random.set_seed(int(seed.numpy()))
        random.setstate((version, tuple(state.numpy().tolist()), None))
    if own is None and np.random.get_bit_generator().seed_seq is not None:  # It is None once the user has set a seed.
        position, *of_numpy = numpy_state.numpy().tolist()
        np.random.set_state(("MT19937", of_numpy, position, 0, 0.0))
