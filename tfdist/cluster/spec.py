"""TF_CONFIG as a checked value: the workers of the cluster, and the worker that is this process."""

import dataclasses
import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cluster.address import is_digits, split_address
from tfdist.cluster.schedulers import BASE_PORT, addresses_on, mpi_place, slurm_place, slurm_port
from tfdist.errors import TFConfigError
from tfdist.readable_numbers import counted

DEVICES_PER_WORKER_VARIABLE = "TFDIST_DEVICES_PER_WORKER"
"""The environment variable that tells the strategy in a worker how many logical devices to make."""

_ROLES = ("chief", "worker", "evaluator")
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """A cluster of synchronous workers, seen from one of them.

    Args:
      jobs: For each role ("chief", "worker", "evaluator") the addresses "host:port" of its tasks, by index.
      task_type: The role of this process, "chief" or "worker".
      task_index: The index of this process within its role.

    Raises:
      TFConfigError: If these arguments do not describe a valid cluster.
    """

    jobs: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)
    task_type: str
    task_index: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "jobs", _without_empty_roles(self.jobs))
        _check_jobs(self.jobs)
        object.__setattr__(self, "jobs", {role: tuple(addresses) for role, addresses in self.jobs.items()})
        _check_addresses(self.jobs)
        _check_task(self.jobs, self.task_type, self.task_index)

    @property
    def num_workers(self) -> int:
        """The number of processes that train together: the chief and the workers, not the evaluator."""
        return len(self.training_addresses)

    @property
    def worker_id(self) -> int:
        """The position of this process among the training processes, chief first."""
        chiefs = len(self.jobs.get("chief", ()))
        return self.task_index if self.task_type == "chief" else chiefs + self.task_index

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files for all workers: the chief, or worker 0 if there is no chief."""
        return self.worker_id == 0

    @property
    def address(self) -> str:
        """The "host:port" of this process."""
        return self.jobs[self.task_type][self.task_index]

    @property
    def workers_on_host(self) -> list[int]:
        """The workers on this worker's host, including this worker."""
        hosts = [_canonical(split_address(address)[0]) for address in self.training_addresses]
        return [worker for worker, host in enumerate(hosts) if host == hosts[self.worker_id]]

    @property
    def slot(self) -> int:
        """This worker's number among the workers of its host, from 0; TFDIST_SLOT in a cluster of several hosts."""
        return self.workers_on_host.index(self.worker_id)

    @property
    def training_addresses(self) -> tuple[str, ...]:
        """The addresses of all training processes, by worker."""
        return (*self.jobs.get("chief", ()), *self.jobs.get("worker", ()))

    def describe(self) -> str:
        """Describes this process in a few words: "worker 1 of 4 at 10.0.0.2:2222"."""
        task = f" (task {self.task_type} {self.task_index})" if "chief" in self.jobs else ""
        return f"worker {self.worker_id} of {self.num_workers}{task} at {self.address}"

    @classmethod
    def local(cls, num_workers: int, task_index: int, ports: Sequence[int]) -> "ClusterSpec":
        """Returns a cluster of workers on this machine.

        Args:
          num_workers: Number of workers.
          task_index: Index of this process among the workers.
          ports: One free port for each worker, as `free_ports` returns them.

        Raises:
          TFConfigError: If the number of ports differs from `num_workers`, or `task_index` is out of range.
        """
        if len(ports) != num_workers:
            raise TFConfigError(
                f"A local cluster needs one port per worker, but {counted(num_workers, 'worker')} got "
                f"{counted(len(ports), 'port')} ({_listed(ports)}). Use `free_ports({num_workers})`."
            )
        return cls({"worker": tuple(f"127.0.0.1:{port}" for port in ports)}, "worker", task_index)

    @classmethod
    def from_slurm(cls, environ: Mapping[str, str] | None = None, *, base_port: int | None = None) -> "ClusterSpec":
        """Returns the cluster of this process's Slurm step, with one worker for each task.

        Args:
          environ: The environment, `os.environ` if None.
          base_port: The port of the first worker on each host; further workers there use the following ports. `None`
            derives a port from the job and the step, 12345 or above.

        Raises:
          TFConfigError: If `srun` did not start this process as a task of a step, the tasks are not placed host by
            host, or the job has several components.
        """
        environ = os.environ if environ is None else environ
        rank, hosts = slurm_place(environ)
        port = slurm_port(environ, hosts) if base_port is None else base_port
        return cls({"worker": tuple(addresses_on(hosts, port))}, "worker", rank)

    @classmethod
    def from_mpi(
        cls, hosts: Sequence[str] | str, environ: Mapping[str, str] | None = None, *, base_port: int | None = None
    ) -> "ClusterSpec":
        """Returns the cluster of the processes that `mpirun` started, with one worker for each process.

        Args:
          hosts: The hosts in the order of ranks, since MPI tells a process only ranks. The format is that of
            `mpirun -H`: "node1", or "node1:4" for four processes; a list, or one string with commas.
          environ: The environment, `os.environ` if None.
          base_port: The first worker's port on each host; the next workers there use the next ports. `None`: 12345.

        Raises:
          TFConfigError: If MPI did not start this process, or `hosts` has a different number of processes than MPI.
        """
        rank, each = mpi_place(os.environ if environ is None else environ, hosts)
        return cls({"worker": tuple(addresses_on(each, BASE_PORT if base_port is None else base_port))}, "worker", rank)

    @classmethod
    def from_json(cls, text: str) -> "ClusterSpec":
        """Reads the text of a TF_CONFIG.

        Args:
          text: The JSON text. Keys other than "cluster", "task" and "rpc_layer" are ignored.

        Raises:
          TFConfigError: If the text is not a TF_CONFIG, or names a cluster that cannot train together.
        """
        return cls._from_config(_parse(text))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "ClusterSpec | None":
        """Reads TF_CONFIG from the environment.

        Args:
          environ: The environment, `os.environ` if None.

        Returns:
          The cluster, or None for a process that trains alone: TF_CONFIG is unset, empty or has no cluster.

        Raises:
          TFConfigError: If the cluster cannot train together, or is missing although other entries suggest one.
        """
        text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
        if not text.strip():
            return None
        config = _parse(text)
        return cls._from_config(config) if config["cluster"] else None

    @classmethod
    def _from_config(cls, config: dict[str, Any]) -> "ClusterSpec":
        if not config["cluster"]:
            raise TFConfigError(
                f"TF_CONFIG names no cluster. List every worker's address, as in {_EXAMPLE}; "
                f"to train in a single process, leave TF_CONFIG unset."
            )
        task = config.get("task")
        if not isinstance(task, dict) or "type" not in task or "index" not in task:
            raise TFConfigError(
                f'TF_CONFIG needs a `task` with "type" and "index" saying which member of the cluster this process is, '
                f"got {_shown(task)}. Write it as in {_EXAMPLE}."
            )
        return cls(config["cluster"], task["type"], _parse_index(task))

    def to_tf_config(self) -> dict[str, Any]:
        """Returns the TF_CONFIG of this process as an object."""
        return {
            "cluster": {role: list(addresses) for role, addresses in self.jobs.items()},
            "task": {"type": self.task_type, "index": self.task_index},
        }

    def to_json(self) -> str:
        """Returns the TF_CONFIG of this process as JSON text."""
        return json.dumps(self.to_tf_config())


def is_chief() -> bool:
    """Returns whether this process writes checkpoints and logs for all workers.

    A process that trains alone is its own chief, so a script needs no special case for it. An evaluator, which does not
    train, is never the chief.

    Raises:
      TFConfigError: If TF_CONFIG names a cluster that cannot train together.
    """
    if _is_evaluator(os.environ.get("TF_CONFIG", "")):
        return False
    spec = ClusterSpec.from_env()
    return spec is None or spec.is_chief


def _is_evaluator(text: str) -> bool:
    task = _parse(text).get("task") if text.strip() else None
    return isinstance(task, dict) and task.get("type") == "evaluator"


def _parse(text: str) -> dict[str, Any]:
    """Returns the JSON object in `text`, with a `cluster` that is an object (empty if missing)."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        raise TFConfigError(
            f"TF_CONFIG must be JSON, but at line {error.lineno}, column {error.colno} (near {around!r}): {error.msg}. "
            f"Write it as in {_EXAMPLE}, with double quotes inside and, in a shell, single quotes around."
        ) from error
    except (ValueError, RecursionError) as error:  # Thousands of digits, or deeply nested brackets.
        raise TFConfigError(
            f"TF_CONFIG must be JSON of a few lists and objects, but it has {len(text)} characters, and Python cannot "
            f"read them ({str(error).partition(':')[0]}). It begins with {text[:40]!r}. Write it as in {_EXAMPLE}."
        ) from error
    if not isinstance(config, dict):
        raise TFConfigError(f"TF_CONFIG must be a JSON object, got {_shown(config)}. Write it as in {_EXAMPLE}.")
    config.setdefault("cluster", {})
    if not isinstance(config["cluster"], dict):
        raise TFConfigError(
            f"TF_CONFIG needs a `cluster` that maps roles to addresses, got {_shown(config['cluster'])}. "
            f"Write it as in {_EXAMPLE}."
        )
    if not config["cluster"]:
        _check_alone(config)
    if config.get("rpc_layer", "grpc") != "grpc":
        raise TFConfigError(
            f'TF_CONFIG may have only "grpc" as `rpc_layer`, got {_shown(config["rpc_layer"])}. '
            f"Leave `rpc_layer` out: the workers talk over gRPC."
        )
    return config


def _check_alone(config: dict[str, Any]) -> None:
    """Rejects a TF_CONFIG that was meant to have a cluster: otherwise each worker would train alone, unnoticed."""
    task = config["task"] if isinstance(config.get("task"), dict) else {}
    is_first = task.get("type", "worker") in ("chief", "worker") and str(task.get("index", 0)) == "0"
    odd = [key for key, value in config.items() if key != "cluster" and _is_like_cluster(key, value)]
    odd += [] if is_first else ["task"]
    if odd:
        raise TFConfigError(
            f"TF_CONFIG needs every worker's address under `cluster`, which is missing or empty, but has "
            f"{_shown({odd[0]: config[odd[0]]})}. Write it as in {_EXAMPLE}; to train in a single process, leave "
            f"TF_CONFIG unset."
        )


def _is_like_cluster(key: str, value: Any) -> bool:
    """Returns whether a TF_CONFIG key seems to mean `cluster`: its name is similar, or its value contains addresses."""
    try:
        has_addresses = isinstance(value, dict | list) and re.search(r'"[^":/]+:[0-9]+"', json.dumps(value))
    except RecursionError:
        has_addresses = None
    is_named = key.lower() in ("cluster", "clusters") or ("cluster" in key.lower() and isinstance(value, dict | list))
    return is_named or bool(has_addresses)


def _parse_index(task: dict[str, Any]) -> int:
    """Returns the index in TF_CONFIG's `task`. Digits in quotes count: environment variables in a manifest are text."""
    index = task["index"]
    if isinstance(index, str) and is_digits(index):
        return int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        return index
    raise TFConfigError(
        f"TF_CONFIG needs a whole number as the task's index, got {_shown(index)} in task {_shown(task)}. "
        f"Count the tasks of one type from 0."
    )


def _without_empty_roles(jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes roles without addresses, such as an operator's `"ps": []`, unless no chief and no worker would remain."""
    full = {role: addresses for role, addresses in jobs.items() if not isinstance(addresses, list | tuple) or addresses}
    return full if full.keys() & {"chief", "worker"} else jobs


def _check_jobs(jobs: Mapping[str, Any]) -> None:
    for role, addresses in jobs.items():
        if role == "ps":
            raise TFConfigError(
                f"TF_CONFIG may have no parameter servers, since this strategy is synchronous, but `cluster.ps` is "
                f"{_shown(addresses)}. Leave `ps` out of every worker's TF_CONFIG and start only the workers."
            )
        if role not in _ROLES:
            raise TFConfigError(
                f"TF_CONFIG may have only the roles {', '.join(_ROLES)}, got {_shown(role)}. "
                f"List every training process under `cluster.worker`."
            )
        if not isinstance(addresses, list | tuple) or not addresses:
            raise TFConfigError(
                f"TF_CONFIG needs a list of addresses under `cluster.{role}`, got {_shown(addresses)}. "
                f'Give a list such as ["10.0.0.1:2222"], or leave the role out.'
            )
    if len(jobs.get("chief", ())) > 1:
        raise TFConfigError(
            f"TF_CONFIG may have one chief, but `cluster.chief` has {len(jobs['chief'])} addresses "
            f"({_listed(jobs['chief'])}). Keep one and list the others under `cluster.worker`."
        )
    if not jobs.get("chief") and not jobs.get("worker"):
        raise TFConfigError(
            f"TF_CONFIG needs a worker that trains, but its cluster has only {_listed(jobs) or 'no roles'}. "
            f"List every training process under `cluster.worker`."
        )


def _check_addresses(jobs: Mapping[str, tuple[Any, ...]]) -> None:
    """Checks that all workers' addresses differ, and that loopback and other addresses are not mixed."""
    seen: dict[tuple[str, int], str] = {}
    loopback: dict[str, bool] = {}
    for role, addresses in jobs.items():
        for index, address in enumerate(addresses):
            name = f"`cluster.{role}[{index}]`"
            if not isinstance(address, str):
                raise TFConfigError(
                    f'TF_CONFIG needs addresses that are strings "host:port", but {name} is {_shown(address)}. '
                    f"Write the host and the port in one string."
                )
            try:
                host, port = split_address(address)
            except ValueError as error:
                raise TFConfigError(f"TF_CONFIG has a faulty {name}: {error}") from error
            host = _canonical(host)
            if host in ("0.0.0.0", "::"):
                raise TFConfigError(
                    f"TF_CONFIG needs addresses that the other workers can reach, but {name} is {_shown(address)}, "
                    f"which means any interface. Give the machine's own name or IP address."
                )
            if (host, port) in seen:
                raise TFConfigError(
                    f"TF_CONFIG needs a different address for each task, but {seen[host, port]} and {name} ({address}) "
                    f"are the same. Give each process on a machine its own port."
                )
            seen[host, port] = f"{name} ({address})"
            loopback[address] = host == "localhost"
    if any(loopback.values()) and not all(loopback.values()):
        inside = [address for address, is_loopback in loopback.items() if is_loopback]
        outside = [address for address, is_loopback in loopback.items() if not is_loopback]
        raise TFConfigError(
            f"TF_CONFIG names loopback addresses ({_listed(inside)}) beside other hosts ({_listed(outside)}), but on "
            f"each machine loopback means that machine itself. Give every worker an address that all others can reach."
        )


def _check_task(jobs: Mapping[str, tuple[str, ...]], task_type: Any, task_index: Any) -> None:
    task = _shown({"type": task_type, "index": task_index})
    if task_type == "evaluator":
        raise TFConfigError(
            f"TF_CONFIG names task {task}, but an evaluator does not train and cannot join the strategy. Run it "
            f"without TF_CONFIG, as a single process that reads the checkpoints, or make it a worker."
        )
    if not isinstance(task_type, str) or task_type not in jobs:
        raise TFConfigError(
            f"TF_CONFIG names task {task}, but the cluster has only the roles {_listed(jobs)}. "
            f"Give this process one of these as its task's type."
        )
    if not isinstance(task_index, int) or isinstance(task_index, bool):
        raise TFConfigError(
            f"TF_CONFIG needs a whole number as the task's index, got {task}. Count the tasks of one type from 0."
        )
    count = len(jobs[task_type])
    if not 0 <= task_index < count:
        addresses = f"{counted(count, 'address')} ({_listed(jobs[task_type])})"
        way_out = "an index of 0" if count == 1 else f"an index from 0 to {count - 1}"
        raise TFConfigError(
            f"TF_CONFIG names task {task}, but `cluster.{task_type}` has {addresses}. "
            f"Give this process {way_out}, or add its address to every worker's TF_CONFIG."
        )


def _canonical(host: str) -> str:
    """Returns one spelling of a host: "localhost" for every loopback address, since these share their ports."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".")
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return "localhost" if ip.is_loopback else str(ip)


def _shown(value: Any) -> str:
    """Returns `value` as TF_CONFIG would contain it, cut to a readable length for an error."""
    try:
        text = json.dumps(value, default=repr)
    except (RecursionError, ValueError):  # Deeply nested lists.
        text = f"{type(value).__name__} within {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "…"


def _listed(values: Any) -> str:
    """Lists the first few of `values` for an error, since a cluster can have hundreds of addresses."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:8]) + (f", … {len(texts) - 8} more" if len(texts) > 8 else "")
