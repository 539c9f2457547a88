"""The facts that a worker tells the chief in `tfdist doctor`: about its machine, and about its contact with peers."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

NO_SUCH_NAME, REFUSED, SILENT, UNREACHABLE = "name", "refused", "silent", "unreachable"
STRANGER, MISMATCH, OTHER_TASK = "stranger", "mismatch", "other task"
"""Why a worker has no contact with a peer: its name does not resolve; nothing listens at its port; no answer; no route;
another program answers; its secret or TLS differs; another task of `tfdist doctor` answers."""


@dataclasses.dataclass(frozen=True)
class FolderFacts:
    """A folder into which a worker will write.

    Attributes:
      purpose: Purpose of the folder: "backups", "logs" or "temporary files".
      path: Path of the folder.
      free_bytes: Free bytes for this user.
      problem: Why a small file cannot be written there; empty if it can.
    """

    purpose: str
    path: str
    free_bytes: int
    problem: str


@dataclasses.dataclass(frozen=True)
class WorkerFacts:
    """The facts about one worker and its machine that need no peer.

    Attributes:
      worker: Index of the worker in its own TF_CONFIG.
      addresses: Addresses of all workers in its TF_CONFIG.
      token: A random name of this process.
      host: Name of its host.
      machine: Names the running kernel. Containers of one machine share it.
      network: Names the network of the process on this machine. Containers usually have one each.
      local_addresses: IP addresses of its network, without loopback.
      names: IP addresses of each host name in TF_CONFIG. A name that does not resolve is missing.
      name_problems: Why names do not resolve.
      port_problem: Why its own port cannot be used; empty if it can.
      security: How connections are protected: "secret and TLS", "secret", "TLS" or "none".
      versions: Versions of Python and packages; empty for a package that is missing.
      script: SHA-256 of the script, or the reason why it cannot be read; empty if none was named.
      settings: Short hashes of environment variables that should be equal on all workers. Values are not told.
      folders: Folders into which the worker will write.
      remote_backups: URL of the backup folder; empty if it is on a disk, or if there is none.
      free_memory: Free bytes of memory, -1 if unknown.
      gpus: Number of GPUs that it sees.
      gpu_problem: Why GPUs cannot be counted; empty if they can.
      cores: Number of logical processors that it may use.
      processors: Their numbers on its machine.
    """

    worker: int
    addresses: tuple[str, ...]
    token: str
    host: str
    machine: str
    network: str
    local_addresses: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    name_problems: Mapping[str, str]
    port_problem: str
    security: str
    versions: Mapping[str, str]
    script: str
    settings: Mapping[str, str]
    folders: tuple[FolderFacts, ...]
    remote_backups: str
    free_memory: int
    gpus: int
    gpu_problem: str
    cores: int
    processors: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PeerContact:
    """The outcome of a worker's attempts to connect to a peer, or to itself, at its address in TF_CONFIG.

    Attributes:
      peer: Index of the peer in the worker's TF_CONFIG.
      problem: Kind of the problem, one of the constants of this module; empty after a full conversation.
      detail: The problem in words.
      token: Token of the process that answered; empty if none did.
      round_trip: Shortest round trip in seconds; 0 if not measured.
      clock_ahead: Seconds by which the peer's clock is ahead of the worker's.
      other_port: Whether a second, free port of the peer can be reached too; None if not tried.
    """

    peer: int
    problem: str = ""
    detail: str = ""
    token: str = ""
    round_trip: float = 0.0
    clock_ahead: float = 0.0
    other_port: bool | None = None


def from_message(kind: type[T], message: Any) -> T | None:
    """Returns the dataclass `kind` in an untrusted JSON value; None if fields are missing or have other types."""
    try:
        return typing.cast(T, _read(kind, message))
    except (TypeError, ValueError, KeyError):
        return None


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{name: _read(hint, value[name]) for name, hint in hints.items()})
    if origin is tuple:  # A list, after the way through JSON.
        return tuple(_read(arguments[0], each) for each in (value if type(value) is tuple else _of_type(list, value)))
    if origin is Mapping or getattr(origin, "__name__", "") == "Mapping":
        return {_of_type(str, key): _read(arguments[1], each) for key, each in _of_type(dict, value).items()}
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _read(arguments[0], value)
    if kind is float:
        return float(_of_type(float, float(_of_type(int, value)) if type(value) is int else value))
    return _of_type(kind, value)


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"needs {kind.__name__}")
    return value
