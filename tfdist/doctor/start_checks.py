"""The cheap checks at the start of each job of `tfdist run`, which other parts of the start do not make.

The cluster spec checks itself, each worker checks its name and port (`tfdist.cluster.ports`), the rendezvous compares
specs and versions, and `BackupAndRestore` writes to its folder before it trains.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
import threading

from absl import logging

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import is_loopback, split_address
from tfdist.doctor.check import FAILURE
from tfdist.doctor.machine_facts import local_addresses
from tfdist.doctor.resource_checks import LEAST_DISK, MIB, memory_verdict
from tfdist.launch.memory_limit import free_memory
from tfdist.network.listening import addresses_of


def warn_at_start(spec: ClusterSpec | None, log_dir: pathlib.Path | None, workers: int) -> None:
    """Logs a warning if memory or the disk for logs is almost full, or the address in TF_CONFIG is of another machine.

    Args:
      spec: The cluster, seen from this process; None if all workers are on this machine.
      log_dir: Folder of the logs; None for the folder of temporary files.
      workers: Number of workers that start on this machine.
    """
    if spec is not None and not os.environ.get("KUBERNETES_SERVICE_HOST"):  # There a service may have the address.
        # A name server may take seconds to answer, and the start does not wait for it.
        threading.Thread(target=_warn_of_address, args=(spec,), name="tfdist-address", daemon=True).start()
    with contextlib.suppress(OSError, ValueError):
        free = free_memory()
        if memory_verdict(free, workers) == FAILURE:
            logging.warning(
                "Only %d MiB of memory are free on this machine for %d worker(s), and each needs some 400 MiB for "
                "TensorFlow alone. End other programs, or use fewer workers.",
                *(free // MIB, workers),
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
    found, own = addresses_of(host), local_addresses()
    if found and own and not any(each in own or is_loopback(each) for each in found):
        logging.warning(
            "%s is no address of this machine, which has %s. If this is the wrong host, give it the index of its own "
            "address in TF_CONFIG; behind NAT all is well. `tfdist doctor` on all hosts tells.",
            *(host, ", ".join(own)),
        )
