"""The start of a worker that goes on without lost workers: its cluster, the greeting of worker 0, the supervisor."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError
from tfdist.members_record import MembersRecord
from tfdist.package_version import version_of
from tfdist.run_files import ATTEMPT, RunFiles
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.shared_seed import random_states, take_random_states
from tfdist.strategies.local_steps.synchronization import Synchronization, described

_PACKAGES = ("tfdist", "tensorflow", "keras")


def cluster_by_itself(cluster_resolver: Any) -> ClusterSpec | None:
    """Returns the cluster of a process that runs TensorFlow by itself; `None` if it is the only worker.

    Raises:
      ValueError: If a resolver is given: only TF_CONFIG describes the cluster here.
    """
    if cluster_resolver is not None:
        raise ValueError(
            "With tolerate_lost_workers TF_CONFIG describes the cluster, but a cluster_resolver was given. Leave one "
            "of the two out."
        )
    cluster = ClusterSpec.from_env()
    return cluster if cluster is not None and cluster.num_workers > 1 else None


def setup_of_worker(synchronization: Synchronization, devices: int, cluster: ClusterSpec) -> dict[str, Any]:
    """Returns what must be equal on all workers, as JSON."""
    versions = {package: version_of(package) for package in _PACKAGES}
    addresses = list(cluster.training_addresses)
    return {
        "addresses": addresses,
        "synchronization": described(synchronization),
        "devices": devices,
        "versions": versions,
    }


def greeting_of(setup: Mapping[str, Any]) -> Message:
    """Returns the first message of worker 0 to each worker that connects."""
    return Message("greeting", {"setup": setup, "random": random_states()})


def take_greeting(greeting: Message, setup: Mapping[str, Any], worker: int) -> None:
    """Takes the random states of worker 0.

    Raises:
      ClusterError: If worker 0 has another setup.
    """
    said = greeting.fields
    own, others = setup["addresses"], said["setup"]["addresses"]
    if own != others:
        raise ClusterError(
            f"All workers need the same cluster in TF_CONFIG, but worker 0 has {', '.join(others)}, and worker "
            f"{worker} has {', '.join(own)}. Give all workers the same addresses in the same order."
        )
    if said["setup"] != setup:
        raise ClusterError(
            f"All workers must make equal strategies with equally many devices and versions, but worker 0 has "
            f"{said['setup']}, and worker {worker} {setup}. Start the same script on all workers."
        )
    take_random_states(said["random"])


def write_members(record: MembersRecord, start_seconds: float) -> None:
    """Tells the supervisor that the job goes on without lost workers, and its members. Raises `OSError` if it fails."""
    files = RunFiles.of_worker()
    if files is not None:
        record = dataclasses.replace(record, start_seconds=start_seconds)
        files.tell_of_members(int(os.environ.get(ATTEMPT, "0")), record)
