"""`MultiWorkerMirroredStrategy`: the strategy for many workers, each with one or several devices."""

import atexit
import functools
import socket
import sys
import weakref
import zlib
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import dataset_internals, keras_internals, keras_stack, tf_internals
from tfdist.cluster import ClusterSpec
from tfdist.cluster.launch_check import warn_if_one_of_many
from tfdist.errors import ClusterError
from tfdist.faults import FaultTolerance, watchdog
from tfdist.faults.stall_suspect import meeting_of, unlike_calls
from tfdist.faults.straggler_watch import StragglerWatch
from tfdist.readable_numbers import counted
from tfdist.strategies import distributed_variables
from tfdist.strategies.balanced_dataset import BalancedDataset
from tfdist.strategies.cluster_join import first_exchange, share_seed
from tfdist.strategies.collectives.exchange_groups import check_exchange_group_size
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.shard_groups import check_shard_group_size
from tfdist.strategies.compression_policy import policy_of
from tfdist.strategies.elastic.elastic_start import cluster_by_itself
from tfdist.strategies.elastic.elastic_training import ElasticTraining
from tfdist.strategies.freed_memory import keep_unless_sharded, return_if_divided
from tfdist.strategies.local_steps.synchronization import check_synchronization
from tfdist.strategies.model_description import described_compile, described_layers
from tfdist.strategies.multi_worker_extended import MultiWorkerExtended
from tfdist.strategies.outside_scope import watch_models_outside
from tfdist.strategies.replicated import ReplicatedStrategy, StrategyUse
from tfdist.strategies.row_comparison import CUSTOM_LOOP, RowComparison, RowsRead
from tfdist.strategies.sharding.state_creation import check_model_sharding
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

_TRANSPORTS = ("auto", "tensorflow")


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
        as `"int8"` or `"powersgd(8)"`. `"auto"`, or a `tfdist.compression.Auto`, lets tfdist choose by measured steps.
        A function of (shape, dtype, path) may choose one of these for each
        gradient, alike on all workers and regardless of `min_elements`. The path is that of the Keras variable, such as
        "sequential/dense/kernel", the name of a `tf.Variable`, or empty if the variable is not known.
      time_exchanges: Whether `communication.traffic()` has the seconds of coding and exchanging compressed gradients.
        Measuring them slows steps down, most of all with fast codecs. Without `compression` it has no effect.
      transport: How CPU workers exchange the tensors of a step; equal on all workers. `"auto"`: over their own
        connections if possible, with TLS if TFDIST_TLS_CERT, TFDIST_TLS_KEY and TFDIST_TLS_CA are set.
        `"tensorflow"`: only over TensorFlow's collectives, which need no ports beside those of TF_CONFIG.
      model_sharding: `"optimizer"`: each replica keeps its part of the optimizer's state and updates this part of the
        weights. With R replicas the state takes 1 / R of the memory, and a step exchanges as many bytes as without.
        Results and files stay the same. Custom loops then need `distributed_optimizer`. `"parameters"`: each replica
        keeps its part of each large weight too. A step gathers weights where layers read them, and exchanges up to 1.5
        times as many bytes. Equal on all workers.
      shard_group_size: Number of replicas that divide the model among themselves, such as those of a machine or a rack;
        by default all. Each group of consecutive replicas then has the whole model. A step gathers weights within a
        group only, and only parts of gradients travel between groups; with `compression` whole gradients, encoded. It
        must divide the number of devices of a worker, or be a multiple of it that divides the number of replicas. Equal
        on all workers. One replica ignores it.
      exchange_group_size: Number of workers that exchange among themselves first; by default each worker exchanges with
        all others. Then each worker exchanges with the workers of its group, and with those that have its place in
        other groups, and has no connections to the rest. `"auto"` makes groups of about the square root of the number
        of workers, `"host"` groups of those that share a host in TF_CONFIG. Equal on all workers.
      synchronization: How often replicas synchronize. `None`: in each step, by sums of gradients, which gives the
        results of one device. `tfdist.LocalSGD(every=8)` or `tfdist.DiLoCo(every=100)`: each replica trains its own
        weights, and all replicas synchronize after so many steps, at the end of each epoch of `fit`, and before
        `evaluate` and `predict`. In between they exchange nothing. The results are not those of one device.
        `compression` then encodes what DiLoCo exchanges. Equal on all workers. One replica ignores it. With
        `tolerate_lost_workers` TensorFlow runs on each worker by itself, and workers go on without a lost one.
      fault_tolerance: Deadlines, by default `tfdist.FaultTolerance()`; the environment overrides them.

    Attributes:
      compression: As given.
      transport: As given.
      synchronization: As given.
      fault_tolerance: The deadlines in use.
      elastic: Trains with `tolerate_lost_workers`; else `None`.

    Raises:
      TFConfigError: If TF_CONFIG is not a cluster spec that this process can join, or differs from the resolver's.
      ClusterError: If a worker is late, or has another cluster, other versions or another number of devices.
      ValueError: If no codec or transport has the given name, `model_sharding` is unknown, `shard_group_size` is given
        without `model_sharding`, groups of this size or of `exchange_group_size` are not possible, `synchronization`
        does not go with another argument, or an environment variable is not a valid deadline.
      TypeError: If `compression` is a function with other arguments, or `synchronization` has another type.
    """

    def __init__(
        self,
        cluster_resolver=None,
        communication_options=None,
        *,
        compression=None,
        time_exchanges=False,
        model_sharding=None,
        shard_group_size=None,
        exchange_group_size=None,
        synchronization=None,
        transport="auto",
        fault_tolerance=None,
    ):
        check_synchronization(synchronization, model_sharding, compression, exchange_group_size)
        policy_of(compression)  # Checks the argument before any worker waits for its peers.
        if transport not in _TRANSPORTS:
            raise ValueError(f"`transport` must be one of {', '.join(map(repr, _TRANSPORTS))}, got {transport!r}.")
        check_model_sharding(model_sharding)
        check_shard_group_size(shard_group_size, model_sharding)
        check_exchange_group_size(exchange_group_size)
        self.fault_tolerance = (fault_tolerance or FaultTolerance()).with_environment()
        self.compression, self.transport = compression, transport
        self.model_sharding, self.shard_group_size = model_sharding, shard_group_size
        self.synchronization = synchronization
        self.exchange_group_size = exchange_group_size
        return_if_divided(model_sharding)
        tolerates = synchronization is not None and synchronization.tolerate_lost_workers
        elastic_cluster = cluster_by_itself(cluster_resolver) if tolerates else None
        if cluster_resolver is None and ClusterSpec.from_env() is None:
            warn_if_one_of_many()
        if elastic_cluster is not None or (cluster_resolver is None and ClusterSpec.from_env() is None):
            # TensorFlow's own resolver would read an empty TF_CONFIG as JSON.
            cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        make_virtual_devices()
        self._take_collective_keys()
        options = communication_options or tf_internals.CommunicationOptions()
        extended = MultiWorkerExtended(self, cluster_resolver=cluster_resolver, communication_options=options)
        keep_unless_sharded(model_sharding)
        tf.distribute.Strategy.__init__(self, extended)
        extended.shard(model_sharding, shard_group_size)
        if not tolerates:
            extended.exchange_in_groups(exchange_group_size)
        extended.exchange_beside_steps(synchronization)
        extended.compress(compression, time_exchanges)
        extended.train_locally(None if tolerates else synchronization)
        self._make_reports()
        self.reports.are_local = extended.local_training is not None and extended._num_workers > 1
        if extended._num_workers > 1:
            self._meet_peers()
            return
        if elastic_cluster is not None:
            extended.write_files_on_chief(elastic_cluster.is_chief)
            self.elastic = ElasticTraining(synchronization, elastic_cluster, self)
        watchdog.start_alone(self, has_peers=elastic_cluster is not None)

    def row_report(self):
        """Returns the rows that each worker has trained on, with `tolerate_lost_workers`; else `None`."""
        return None if self.elastic is None else self.elastic.report()

    def _meet_peers(self):
        """Makes the first exchange with all workers, connects them, and begins to watch them."""
        extended = self.extended
        with first_exchange():
            self.reduce("SUM", tf.ones([]), axis=None)  # Each worker receives from a peer, unlike in a broadcast.
            share_seed(self)
        extended.connect_peers(self.transport)
        watchdog.start(self, extended.board, extended.creations, extended.carried_bytes)
        self.reports.rows_read = RowsRead(host_of(extended.worker_devices[0]), len(extended.worker_devices))
        self.reports.stragglers = StragglerWatch(
            *(extended.board, ClusterSpec.from_env().training_addresses, extended.link_speeds),
            self.reports.publish_links,
        )
        watch_models_outside(extended._num_workers)
        self._use = StrategyUse()  # Without the exchanges above, which are not the user's.
        if extended.should_checkpoint:
            atexit.register(_warn_if_unused, self._use, extended._num_workers, type(self).__name__)

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """Makes each worker's own dataset, and compares the lengths or settings of all; see `ReplicatedStrategy`."""
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        if self.extended._num_workers > 1 and isinstance(dataset, BalancedDataset):
            self.extended.agreement.on_sharding(dataset_fn.state.settings(), dataset_fn.state.settings_for_errors())
        elif self.extended._num_workers > 1:
            dataset_internals.set_cardinality(dataset, self._longest(int(dataset.cardinality)))
        return dataset

    def _check_scope(self, step):
        super()._check_scope(step)
        if self.extended._num_workers > 1:
            held: Any = functools.partial(
                distributed_variables.checksums, distributed_variables.variables_of(step.model)
            )
            training = self.extended.local_training
            if training is not None and training.has_trained(step.model):  # Restored from a backup.
                held = list
            codecs = functools.partial(self.communication.described_codecs, step.model) if self.communication else list
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
        if self.elastic is not None and self.extended.should_checkpoint:
            _warn_of_writers(fit.callbacks)
        if self.extended._num_workers == 1:
            return
        self.synchronize()
        self.reports.rows_read.forget()
        self.reports.activity.call.at_end.append(self.reports.rows_read.forget)
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
            self.extended.agreement.on_position(sharding.state.of_training())

    def _check_still_alike(self, model):
        is_local = self.extended.local_training is not None  # Each replica then has its own state of optimizers.
        variables = model.variables if is_local else distributed_variables.variables_of(model)
        held = distributed_variables.held_alike(variables)
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
        has_unknown_end = bool(epochs) and not is_endless and epochs.data_adapter.num_batches is None
        return RowComparison(
            *(self.extended.agreement, origins, keras_stack.reader(), purpose, is_endless, self.reports.rows_read),
            compares_passes=purpose == "fit",
            counts_batches=has_unknown_end and purpose in ("evaluate", "predict"),
        )

    def _is_alike(self, what):
        """Whether `what`, by its checksum, is equal on all workers. Costs an exchange of one number."""
        return len(set(self.extended.of_all_workers(_crc(what)))) == 1

    def _is_far_apart(self, variable):
        """Whether the values of a variable differ between workers by more than the rounding of their processors."""
        own = tf.cast(variable.value.values[0], tf.float64)
        mean = self.reduce("SUM", own, axis=None) / self.extended._num_workers
        tolerance = _ROUNDING if variable.value.dtype.is_floating else 0
        # Not `>`: every comparison with NaN is false, and NaN must count as far apart.
        return not bool(tf.reduce_max(tf.abs(own - mean)) <= tolerance * tf.reduce_max(tf.abs(mean)))

    def _longest(self, batches: int) -> int:
        everyone = self.extended.of_all_workers(batches)
        return min(everyone) if min(everyone) < 0 else max(everyone)  # Negative: unknown or infinite.


def _crc(what):
    return zlib.crc32(repr(what).encode())


def _described_data(dataset, last):
    """Properties of the data that must be equal on all workers, known before any worker reads it."""
    leaves = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    kinds = [f"tensors of {leaf.dtype.name}{leaf.shape}" for leaf in leaves if isinstance(leaf, tf.TensorSpec)]
    sizes = [f"{counted(size, 'element')} in a stage of the pipeline" for size in sizes_of(dataset)]
    return [f"{last or 'all'} rows in the last batch", *sizes, *kinds]


def _places_where(of_all_workers, holds):
    """Returns the indices at which `holds` is true of the entries of all workers; each worker has one list."""
    return [place for place, said in enumerate(zip(*of_all_workers, strict=True)) if holds(said)]


def _warn_of_writers(callbacks):
    names = ", ".join(sorted({type(each).__name__ for each in callbacks if type(each) in _WRITERS}))
    if names:
        logging.warning("Keras' own %s writes the same files on all workers. Use the one of tfdist.callbacks.", names)


def _warn_if_unused(use, workers, name):
    """Warns of a forgotten `with strategy.scope():`, since otherwise nothing shows that each worker trained alone."""
    if not use.began and getattr(sys, "last_value", None) is None:  # An error may have ended the script before.
        logging.warning(
            "%d workers have made a %s whose scope() was never entered, so each worker trained by itself. Make and "
            "compile the model inside `with strategy.scope():`.",
            workers,
            name,
        )
