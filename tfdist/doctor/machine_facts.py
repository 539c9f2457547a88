"""Gathers the facts about this worker and its machine for `tfdist doctor`. Each takes at most a few seconds."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import ipaddress
import os
import pathlib
import platform
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import split_address
from tfdist.doctor.worker_facts import FolderFacts, WorkerFacts
from tfdist.errors import ClusterError
from tfdist.launch.gpu_discovery import find_gpus
from tfdist.launch.memory_limit import free_memory
from tfdist.package_version import version_of

T = TypeVar("T")

_FACT_SECONDS = 4.0  # For name servers, drivers and file systems, which may not answer.
_PROBE_BYTES = 1 << 18
# Variables that may differ between workers, or have secret values.
_OWN_SETTINGS = re.compile(
    r"TF_CONFIG|TF_CPP_.*|TF_GRPC_REUSE_PORT|TFDIST_(SLOT|RUN_DIR|ATTEMPT|HELD_PORTS|CACHE|TLS_.*)"
    r"|.*(SECRET|TOKEN|PASSWORD|CREDENTIAL).*"
)
_SETTINGS = re.compile(r"(TF|TFDIST|XLA|KERAS)_[A-Z0-9_]+")


@dataclasses.dataclass(frozen=True)
class FactRequest:
    """The files and folders of a job that the facts are about.

    Attributes:
      script: Script of the job, or None.
      log_dir: Folder for logs; None for the folder of temporary files.
      backup_dir: Folder for backups, which may be a URL as that of a bucket; None for no backups.
    """

    script: pathlib.Path | None = None
    log_dir: pathlib.Path | None = None
    backup_dir: str | None = None

    @property
    def backups(self) -> pathlib.Path | None:
        """The folder for backups; `None` without one on a disk."""
        return pathlib.Path(self.backup_dir) if self.backup_dir and not is_url(self.backup_dir) else None

    @property
    def folders(self) -> Mapping[str, pathlib.Path]:
        """The folders on disks that a worker writes to, by purpose."""
        named = {"logs": self.log_dir, "backups": self.backups}
        given = {purpose: path for purpose, path in named.items() if path is not None}
        return {"temporary files": _temporary_folder(), **given}


def is_url(path: str) -> bool:
    """Whether a path is on remote storage, such as `gs://bucket/folder`."""
    return "://" in path


def existing(path: pathlib.Path) -> pathlib.Path:
    """Returns a folder, or the innermost existing one in which it would be made."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))


def gather(
    spec: ClusterSpec, request: FactRequest, *, token: str, port_problem: str, security: str, environ: Mapping[str, str]
) -> WorkerFacts:
    """Returns the facts about this worker. Facts that cannot be had within a few seconds are reported as problems."""
    hosts = list(dict.fromkeys(split_address(address)[0] for address in spec.training_addresses))
    names = {host: in_time(functools.partial(_addresses_of, host)) for host in hosts}
    folders = {
        purpose: in_time(functools.partial(folder_facts, purpose, path)) for purpose, path in request.folders.items()
    }
    gpus, found = in_time(lambda: _count_gpus(environ)), {host: result() for host, result in names.items()}
    gpu_count, gpu_problem = gpus() or (0, f"the driver did not answer within {_FACT_SECONDS:g} s")
    resolved = {host: each or ((), f"no answer within {_FACT_SECONDS:g} s") for host, each in found.items()}
    return WorkerFacts(
        worker=spec.worker_id,
        addresses=spec.training_addresses,
        token=token,
        host=socket.gethostname(),
        machine=_machine(),
        network=_network(),
        local_addresses=local_addresses(),
        names={host: addresses for host, (addresses, _) in resolved.items() if addresses},
        name_problems={host: problem for host, (_, problem) in resolved.items() if problem},
        port_problem=port_problem,
        security=security,
        versions=versions(),
        script=script_hash(request.script) if request.script else "",
        settings=settings(environ),
        folders=tuple(
            result() or FolderFacts(purpose, str(request.folders[purpose]), 0, "the file system does not answer")
            for purpose, result in folders.items()
        ),
        remote_backups=request.backup_dir if request.backup_dir and is_url(request.backup_dir) else "",
        free_memory=_free_memory(),
        gpus=gpu_count,
        gpu_problem=gpu_problem,
        cores=len(os.sched_getaffinity(0)),
        processors=tuple(sorted(os.sched_getaffinity(0))),
    )


def _temporary_folder() -> pathlib.Path:
    """Returns the folder for temporary files that is asked for. `tempfile` passes over a folder that is full."""
    asked = [value for name in ("TMPDIR", "TEMP", "TMP") if (value := os.environ.get(name))]
    return pathlib.Path(asked[0] if asked else "/tmp")


def in_time(function: Callable[[], T]) -> Callable[[], T | None]:
    """Starts a function in a thread. The returned function waits for the result; None after a few seconds."""
    results: list[T] = []
    deadline = time.monotonic() + _FACT_SECONDS
    thread = threading.Thread(target=lambda: results.append(function()), name="tfdist-fact", daemon=True)
    thread.start()

    def result() -> T | None:
        thread.join(max(0.0, deadline - time.monotonic()))
        return results[0] if results else None

    return result


def _addresses_of(host: str) -> tuple[tuple[str, ...], str]:
    """Returns the IP addresses of a host name, and why there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found)), ""


def _count_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    try:
        return len(find_gpus(environ).devices), ""
    except ClusterError as error:
        return 0, str(error)


def local_addresses() -> tuple[str, ...]:
    """Returns the IP addresses of this machine or container, without loopback and link-local addresses."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        routes = pathlib.Path("/proc/self/net/fib_trie").read_text()
        found += re.findall(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL", routes)
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/self/net/if_inet6").read_text().splitlines()
        found += [str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in lines]
    addresses = [ipaddress.ip_address(each) for each in dict.fromkeys(found)]
    return tuple(str(each) for each in addresses if not each.is_loopback and not each.is_link_local)


def _machine() -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _network() -> str:
    with contextlib.suppress(OSError):
        return f"{_machine()} {os.stat('/proc/self/ns/net').st_ino}"
    return _machine()


def versions() -> Mapping[str, str]:
    """Returns the versions of Python and of the packages that all workers need alike. Loads none of them."""
    found = {"python": platform.python_version()}
    for package in ("tfdist", "tensorflow", "keras", "numpy"):
        found[package] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = version_of(package)
    return found


def script_hash(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a script, or why it cannot be read."""
    try:
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"


def settings(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Returns short hashes of the environment variables that should be equal on all workers."""
    named = {name: value for name, value in environ.items() if _SETTINGS.fullmatch(name) and value}
    return {
        name: hashlib.sha256(f"{name}={value}".encode()).hexdigest()[:8]
        for name, value in named.items()
        if not _OWN_SETTINGS.fullmatch(name)
    }


def folder_facts(purpose: str, path: pathlib.Path) -> FolderFacts:
    """Writes a temporary file to a folder, or to the folder in which it would be made, and returns the outcome."""
    present, problem, free = existing(path), "", 0
    try:
        free = shutil.disk_usage(present).free
        with tempfile.TemporaryFile(dir=present, prefix=".tfdist-doctor-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return FolderFacts(purpose, str(path), free, problem)


def _free_memory() -> int:
    try:
        return free_memory()
    except (OSError, ValueError):
        return -1
