"""Joins this process to its cluster: waits for all workers, connects them within deadlines, and shares the seed."""

import contextlib
import functools
import os
import random
import socket
import time

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.cluster import ClusterSpec, check_bindable
from tfdist.errors import ClusterError, TFConfigError
from tfdist.events import recorder
from tfdist.events.event_file import LOST_PEER
from tfdist.faults import preemption, rendezvous
from tfdist.faults.chief_liveness import watch_chief
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.peer_liveness import PeerLiveness
from tfdist.faults.shutdown import leave_together

# Once all workers are there, TensorFlow connects them within seconds. It gets the rest of the start timeout, but at
# least 10 s, and at most 60 s or a fifth of that timeout if longer. TensorFlow itself gives up after 0.7 of this time.
_CONNECT_SECONDS, _REGISTER_PART = (10.0, 60.0), 0.7


def join(cluster_resolver, options, connect, remedy):
    """Joins this process to its cluster once all workers are there; TensorFlow would wait without a deadline.

    `remedy` says what to change if TensorFlow's runtime has started.
    """
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
            f"{cluster.describe()} on {socket.gethostname()}. {remedy}"
        )
    if tf_internals.context.context().coordination_service is None:
        check_bindable(cluster, pod_seconds=options.start_timeout_seconds)
    if named is None:
        os.environ["TF_CONFIG"] = cluster.to_json()
    deadline = time.monotonic() + options.start_timeout_seconds
    recorder.begin()
    with recorder.starting("rendezvous"):
        connections = rendezvous.meet(cluster, options.start_timeout_seconds)
    least, most = _CONNECT_SECONDS
    most = max(most, options.start_timeout_seconds / 5)
    seconds = max(least, min(most, deadline - time.monotonic()))
    _set_deadlines(cluster_resolver, options, _REGISTER_PART * seconds)
    with recorder.starting("connection to TensorFlow's coordination service"), rendezvous.connecting(cluster, seconds):
        try:
            connect(cluster_resolver)
        except tf.errors.DeadlineExceededError as error:
            raise ClusterError(rendezvous.unconnected(cluster, seconds)) from error
    preemption.give_signals_back()
    if cluster.num_workers > 1:
        board = CoordinationStore(cluster.worker_id, cluster.num_workers)
        addresses = cluster.training_addresses
        liveness = PeerLiveness(connections, addresses, functools.partial(_on_loss, board, addresses))
        leave_together(board, liveness, options.shutdown_timeout_seconds)
        if cluster.worker_id:
            watch_chief(jobs, liveness, board, options.heartbeat_timeout_seconds)
        else:
            board.show_life()


def _on_loss(board, addresses, worker):
    """Makes all collectives fail after a peer's process has ended, and writes what this worker did at this moment."""
    recorder.capture_failure(LOST_PEER, peer=worker)
    board.report_loss(worker, addresses[worker])
    recorder.write_failure(LOST_PEER, peer=worker)


def _check_alike(named, cluster):
    """Checks that TF_CONFIG and the resolver agree, since other code reads the chief from TF_CONFIG."""
    places = [(spec.describe(), ", ".join(spec.training_addresses)) for spec in (named, cluster)]
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
def first_exchange():
    """Context of the first exchange of all workers, before which they only talk to worker 0. Explains its failure."""
    try:
        yield
    except tf.errors.OpError as error:
        cluster = ClusterSpec.from_env()
        addresses = ", ".join(cluster.training_addresses)
        raise ClusterError(
            f"All workers must be able to connect to each other at their addresses in TF_CONFIG ({addresses}), but "
            f"their first exchange failed. This is {cluster.describe()}, on {socket.gethostname()}. Correct the "
            f"addresses, or open these ports between the hosts. TensorFlow's error: {error.message}"
        ) from error


def share_seed(strategy):
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
