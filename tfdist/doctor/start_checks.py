"""The cheap checks at the start of each job of `tfdist run`, which other parts of the start do not make.

The cluster spec checks itself, each worker checks its name and port (`tfdist.cluster.ports`), the rendezvous compares
specs and versions, and `BackupAndRestore` writes to its folder before it trains.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile

from absl import logging

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import is_loopback, split_address
from tfdist.doctor.machine_facts import in_time, local_addresses
from tfdist.doctor.resource_checks import LEAST_DISK, LEAST_MEMORY, MIB
from tfdist.launch.memory_limit import free_memory
from tfdist.network.listening import addresses_of


def warn_at_start(spec: ClusterSpec | None, log_dir: pathlib.Path | None) -> None:
    """Logs a warning if memory or the disk for logs is almost full, or the address in TF_CONFIG is of another machine.

    Args:
      spec: The cluster, seen from this process; None if all workers are on this machine.
      log_dir: Folder of the logs; None for the folder of temporary files.
    """
    if spec is not None and not os.environ.get("KUBERNETES_SERVICE_HOST"):  # There a service may have the address.
        _warn_of_address(spec)
    with contextlib.suppress(OSError, ValueError):
        free = free_memory()
        if free < LEAST_MEMORY:
            logging.warning(
                "Only %d MiB of memory are free on this machine, and each worker needs some 400 MiB for TensorFlow "
                "alone. End other programs, or use fewer workers.",
                free // MIB,
            )
    with contextlib.suppress(OSError):
        folder = log_dir if log_dir and log_dir.is_dir() else pathlib.Path(tempfile.gettempdir())
        free = shutil.disk_usage(folder).free
        if free < LEAST_DISK:
            logging.warning(
                "Only %d MiB are free in %s, where the logs of this run go. Make room, or give another --log-dir.",
                *(free // MIB, folder),
            )


def _warn_of_address(spec: ClusterSpec) -> None:
    host, _ = split_address(spec.address)
    found, own = in_time(lambda: addresses_of(host))() or (), local_addresses()
    if found and own and not any(each in own or is_loopback(each) for each in found):
        logging.warning(
            "%s is no address of this machine, which has %s. If this is the wrong host, give it the index of its own "
            "address in TF_CONFIG; behind NAT all is well. `tfdist doctor` on all hosts tells.",
            *(host, ", ".join(own)),
        )
