"""The `extended` half of the strategy for many workers: how variables are made, and how workers are connected."""

import contextlib
import functools
import re
import socket
import weakref
from typing import ClassVar

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals, keras_stack, tf_internals
from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import split_address
from tfdist.errors import ClusterError
from tfdist.faults import beside_steps
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.creation_watch import CreationWatch
from tfdist.faults.worker_comparison import WorkerComparison
from tfdist.network.peer_bytes import PeerBytes
from tfdist.network.tls import Tls
from tfdist.strategies.auto_compression import Auto
from tfdist.strategies.cluster_join import join
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.collectives.collective_launcher import carrier_of
from tfdist.strategies.collectives.exchange_groups import ExchangeGroups
from tfdist.strategies.collectives.peer_connections import connect
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.compression import Codec
from tfdist.strategies.local_steps.synchronization import described, remedy_of_early_start
from tfdist.strategies.replicated_extended import ReplicatedExtended

# TensorFlow sends tensors in strings of this many bytes, by default 4096: see grpc_worker_service.cc. From 128 KiB on,
# glibc's own threshold, the kernel would map and clear new memory for each string.
_CHUNK_BYTES = 1 << 16
_TLS_ERROR = (
    "TLS needs the workers' own connections, but {why}. Give each worker a certificate for its host in TF_CONFIG, from "
    "the authority in TFDIST_TLS_CA, and open the hosts' ports to each other; or unset the variables TFDIST_TLS_*, and "
    "protect the network by other means."
)
_CONNECT_SECONDS = 10.0  # For making the workers' own connections, which are optional.


class MultiWorkerExtended(ReplicatedExtended, tf_internals.CollectiveAllReduceExtended):
    """The internal methods of `MultiWorkerMirroredStrategy`: connects workers, makes variables, joins the cluster.

    Attributes:
      carried_bytes: Function that returns the bytes that steps exchanged over the workers' own connections; `None`
        without these.
      sent_and_received_bytes: Function that returns the bytes sent to peers, and those received from them: those over
        these connections, or, where TensorFlow's collectives carry sums of CPUs, those of all connections to peers.
        It returns `None` if the kernel does not tell; it is `None` if the bytes are unknown, as with GPUs.
      link_speeds: Record of the speeds of these connections; `None` without them.
    """

    # A process joins its cluster once. TensorFlow would join again for a second strategy, at another moment on each
    # worker, and lose the collectives between these moments.
    _has_joined = False
    # The workers' own connections of this process, or `None` and the reason for the failure, by the groups for which it
    # has tried to connect; `None` for connections to all peers.
    _connected: ClassVar[dict[ExchangeGroups | None, tuple[PeerExchange | None, str]]] = {}
    _peers = _exchange_groups = None
    carried_bytes = sent_and_received_bytes = link_speeds = None

    @property
    def _crosses_border(self):
        return self._num_workers > 1

    def of_all_workers(self, numbers):
        """Returns the integers of all workers, in the order of workers: one each, or lists of equal length."""
        own = tf.one_hot(self._id_in_cluster, self._num_workers, dtype=tf.int64)
        said = tf.tensordot(own, tf.constant(numbers, tf.int64), 0)
        with beside_steps.waiting_for_all("`fit`, `evaluate`, `predict` and the distribution of datasets"):
            return self._container_strategy().reduce("SUM", said, axis=None).numpy().tolist()

    def gathered(self, state):
        """Returns the whole value of a `ShardedState`, outside of a step; all workers must read it."""
        if self._num_workers == 1:
            return super().gathered(state)
        with beside_steps.waiting_for_all("reads of the state of a sharded optimizer, as by `model.save`"):
            return super().gathered(state)

    def looked_up(self, table, ids, dtype):
        """Returns rows of a `ShardedTable`, outside of a step; all workers must call it."""
        if self._num_workers == 1:
            return super().looked_up(table, ids, dtype)
        with beside_steps.waiting_for_all("calls of a ShardedEmbedding outside of steps"):
            return super().looked_up(table, ids, dtype)

    def waiting_for_synchronization(self):
        """The context of a synchronization outside of steps, for which all workers must come."""
        if self._num_workers == 1:
            return super().waiting_for_synchronization()
        return beside_steps.waiting_for_all("`strategy.synchronize()`, ends of epochs, and `evaluate` and `predict`")

    def write_files_on_chief(self, is_chief):
        """Sets whether this worker writes files, if TensorFlow does not know the other workers."""
        self._is_chief = is_chief

    def exchange_in_groups(self, group_size):
        """Makes exchanges go in two levels, by an argument of the strategy; called once, before `connect_peers`.

        Raises:
          ValueError: If there are no such groups, or exchanges do not use the workers' own connections.
        """
        spec, strategy = ClusterSpec.from_env(), self._container_strategy()
        self._exchange_groups = ExchangeGroups.of(group_size, spec.training_addresses if spec else ())
        if self._exchange_groups is None:
            return
        why = self._why_not_own_connections(strategy.transport)
        if why is None and len(self._devices) > 1:
            why = "workers with several devices each exchange sums over TensorFlow's collectives"
        if why is None and self.model_sharding is not None:
            why = "model_sharding exchanges parts of weights, for which `shard_group_size` makes groups"
        if why is not None:
            raise ValueError(
                "`exchange_group_size` is for sums over the workers' own connections, but "
                f"{why}. Leave one of the two out."
            )
        self._cross_device_ops.exchange_in(self._exchange_groups)

    def exchange_beside_steps(self, synchronization):
        """Makes exchanges that run beside steps, if `synchronization` lets steps overlap with them.

        Called once, after `exchange_in_groups`. Devices of one worker and GPUs exchange in steps: beside them two
        exchanges could wait for each other.
        """
        is_possible = self._num_workers > 1 and len(self._devices) == 1 and "CPU" in self._devices[0]
        if is_possible and getattr(synchronization, "overlap_steps", 0):
            self._collectives_beside = self._collectives_of(self._devices, is_beside=True)
            if self._exchange_groups is not None:
                self._collectives_beside.exchange_in(self._exchange_groups)

    def connect_peers(self, transport):
        """Makes steps exchange over the workers' own connections if all can connect; GPUs use TensorFlow's collectives.

        Raises:
          ClusterError: If TLS is configured, but TensorFlow's collectives would carry the exchanges.
        """
        tls, problem = Tls.from_env(), ""
        why = self._why_not_own_connections(transport)
        if why is None:
            self._peers, problem = self._own_connections(warns=tls is None)
        if tls and why is None and len(self._devices) > 1:
            why = "workers with several devices each exchange sums over TensorFlow's collectives"
        if tls and (why or self._peers is None):
            raise ClusterError(_TLS_ERROR.format(why=why or problem))
        if self._peers is not None:
            self._cross_device_ops.use(self._peers)
            if self._collectives_beside is not None:
                self._collectives_beside.use(self._peers)
            if self._exchange_groups is not None or (self.parts is not None and self.parts.groups is not None):
                self.of_all_workers(0)  # Until all workers know the groups, none may send to a group.
            if len(self._devices) == 1:  # Otherwise TensorFlow's collectives carry all sums.
                self.carried_bytes = self._peers.carried_bytes
                self.sent_and_received_bytes = self._peers.sent_and_received_bytes
                self.link_speeds = self._peers.link_speeds()
        if self.sent_and_received_bytes is None and "CPU" in self._devices[0]:
            self.sent_and_received_bytes = self._count_by_kernel()

    def _own_connections(self, warns):
        """Returns connections that serve this strategy, made once in a process; or `None` and the reason for that."""
        known = MultiWorkerExtended._connected
        if None in known:  # Connections to all peers serve any groups.
            return known[None]
        if self._exchange_groups not in known:
            known[self._exchange_groups] = peers, problem = self._connect_workers()
            if peers is None and warns:
                logging.warning(
                    "The exchanges of a step go over gRPC, which takes more processor time, since the workers can "
                    "connect only at the ports of TF_CONFIG: %s. Open the hosts' other ports to each other.",
                    problem,
                )
        return known[self._exchange_groups]

    def _count_by_kernel(self):
        """Returns a function that returns the bytes sent to peers and received, with those of TensorFlow."""
        ports = [split_address(each)[1] for each in ClusterSpec.from_env().training_addresses]
        own = ports.pop(self._id_in_cluster)
        of_tensorflow = PeerBytes(own, ports)
        connected = [peers for peers, _ in MultiWorkerExtended._connected.values() if peers is not None]

        def count():
            counted = of_tensorflow.sent_and_received()
            if counted is None:
                return None
            return tuple(map(sum, zip(counted, *(each.sent_and_received_bytes() for each in connected), strict=True)))

        return count

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
        """Connects workers with each other. Returns the connections, or `None` and the reason for the failure."""
        addresses = ClusterSpec.from_env().training_addresses
        names = [f"worker {worker} at {address}" for worker, address in enumerate(addresses)]
        connections, problem = {}, "see the logs of its peers"
        peers, subject, groups = None, "connections", self._exchange_groups
        if groups is not None:
            peers, subject = groups.peers_of(self._id_in_cluster), f"connections in groups of {groups.size}"
        try:
            connections = connect(self.board, addresses, _CONNECT_SECONDS, peers, subject)
        except (OSError, ClusterError) as error:
            problem = str(error)
        if all(self.of_all_workers(int(bool(connections)))):
            return PeerExchange(self._id_in_cluster, connections, names), ""
        for connection in connections.values():
            connection.close()
        return None, f"{names[self._id_in_cluster]} on {socket.gethostname()} cannot connect to its peers: {problem}"

    @functools.cached_property
    def creations(self):
        """Counts the variables that this worker makes, so that the watchdog notices workers with different models."""
        return beside_steps.Creations()

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
        """Numbers, such as learning rates, that this worker gave its optimizers, to compare; the chief's are used."""
        return weakref.WeakKeyDictionary()

    def _described_variable(self, kwargs):
        """Describes type, shape and maker of a variable to be made, without and with its name, to compare workers.

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
        if not MultiWorkerExtended._has_joined:
            remedy = remedy_of_early_start(self._container_strategy().synchronization)
            join(cluster_resolver, options, super()._initialize_multi_worker, remedy)
            MultiWorkerExtended._has_joined = True
        else:
            self._std_server_started = True
            super()._initialize_multi_worker(cluster_resolver)
        self.board = CoordinationStore(self._id_in_cluster, self._num_workers)
        self.agreement = WorkerComparison(self.board, options.start_timeout_seconds)
        if self._num_workers > 1:  # Before the first collective, which would wait for ever if setups differ.
            strategy = self._container_strategy()
            transport = self._why_not_own_connections(strategy.transport) or "own connections"
            names = ("model_sharding", "shard_group_size", "exchange_group_size")
            options = {"compression": _described(strategy.compression), "transport": transport}
            options |= {name: repr(getattr(strategy, name)) for name in names}
            options["synchronization"] = described(strategy.synchronization)
            self.agreement.on_setup(len(self._devices), options)
        self._install_collectives()

    def _update_config_proto(self, config_proto):
        config = super()._update_config_proto(config_proto)
        config.experimental.recv_buf_max_chunk = _CHUNK_BYTES
        return config

    def _install_collectives(self):
        self._cross_device_ops = self._collectives_of(self._devices)
        # A worker's only CPU is also its host. One object serves both, since TensorFlow treats both as one group and
        # the keys of a group are counted once.
        alone = len(self._devices) == 1 and "CPU" in self._devices[0]
        self._host_cross_device_ops = self._cross_device_ops if alone else self._collectives_of([self._worker_device])

    def _collectives_of(self, devices, is_beside=False):
        size, worker = len(devices) * self._num_workers, self._id_in_cluster if self._num_workers > 1 else 0
        return Collectives(devices, size, self._communication_options, self._collective_keys, worker, is_beside)


def _is_local(device, worker_device):
    asked, spec = tf.DeviceSpec.from_string(worker_device or "/device:CPU:0"), tf.DeviceSpec.from_string(device.name)
    return (spec.job, spec.task) == (asked.job, asked.task) or asked.job is None


def _described(compression):
    """Describes the `compression` argument equally in every process, so without memory addresses."""
    while isinstance(compression, functools.partial):
        compression = compression.func
    if compression is None or isinstance(compression, str | Codec | Auto):
        return repr(compression)
    return getattr(compression, "__qualname__", type(compression).__qualname__)
