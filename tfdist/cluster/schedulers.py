"""Reads this process's rank and the hosts of all processes from Slurm or MPI."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.cluster.address import checked_port, is_digits
from tfdist.errors import TFConfigError
from tfdist.readable_numbers import counted

BASE_PORT = 12345
"""The default port of the first worker on each machine."""

MPI_RANKS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables of Open MPI, MVAPICH and MPICH: from the number of processes to the rank of this process."""

# The first 17 steps of 17 consecutive jobs have different ports, all below Linux' range for outgoing connections. If
# other steps share ports on one host, the later step is rejected.
_PORTS_A_STEP, _STEPS, _STEPS_A_JOB = 64, 300, 17


def slurm_place(environ: Mapping[str, str]) -> tuple[int, list[str]]:
    """Returns the rank of this process in its Slurm step, and the host of each task.

    Raises:
      TFConfigError: If this process is not a task of a step, or the tasks are not placed host by host.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID")
    missing = [name for name in names if not environ.get(name, "").strip()]
    if missing:
        raise TFConfigError(
            f"Each task needs Slurm's description of its step, but {', '.join(missing)} is not set here. Start the "
            f"tasks by `srun`, also from a batch script."
        )
    if environ.get("SLURM_HET_SIZE", "").strip():
        raise TFConfigError(
            f"A step must have one component, since Slurm does not tell the hosts of several, but this job has "
            f"{environ['SLURM_HET_SIZE']} (SLURM_HET_SIZE). Give each task a TF_CONFIG; or start all in one component, "
            f"by `srun --het-group=0 env -u SLURM_HET_SIZE tfdist run --slurm train.py`."
        )
    nodes = _read("SLURM_STEP_NODELIST", environ, expand_hosts)
    counts = _read("SLURM_STEP_TASKS_PER_NODE", environ, expand_counts)
    if len(nodes) != len(counts):
        raise TFConfigError(
            f"Slurm must give a number of tasks for each host, but SLURM_STEP_NODELIST {environ[names[0]]} has "
            f"{len(nodes)} and SLURM_STEP_TASKS_PER_NODE {environ[names[1]]} has {len(counts)}. Leave both as `srun` "
            f"sets them."
        )
    hosts = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    if _as_number(environ.get("SLURM_STEP_NUM_TASKS", "")) not in (None, len(hosts)):
        raise TFConfigError(
            f"The numbers of tasks must agree, but SLURM_STEP_NUM_TASKS is {environ['SLURM_STEP_NUM_TASKS']} and "
            f"SLURM_STEP_TASKS_PER_NODE {environ[names[1]]} has {len(hosts)}. Leave both as `srun` sets them."
        )
    rank = _rank("SLURM_PROCID", environ, len(hosts))
    _check_by_host(environ, rank, [node for node, count in enumerate(counts) for _ in range(count)])
    return rank, hosts


def slurm_port(environ: Mapping[str, str], hosts: Sequence[str]) -> int:
    """Returns the port of the first task on each host, different for jobs and steps that run at the same time.

    Raises:
      TFConfigError: If a host has more tasks than ports.
    """
    host = max(dict.fromkeys(hosts), key=hosts.count)
    if hosts.count(host) > _PORTS_A_STEP:
        raise TFConfigError(
            f"A step has {_PORTS_A_STEP} ports on a host, but {host} has {hosts.count(host)} tasks. Give each step "
            f"that runs at the same time its own base port, such as `--base-port 20000`."
        )
    job, step = (_as_number(environ.get(name, "")) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return BASE_PORT + _PORTS_A_STEP * ((job * _STEPS_A_JOB + step) % _STEPS)


def _check_by_host(environ: Mapping[str, str], rank: int, nodes: Sequence[int]) -> None:
    """Rejects Slurm tasks that are not placed host by host; `nodes` has the expected node of each task."""
    here = [task for task, node in enumerate(nodes) if node == nodes[rank]]
    told = [_as_number(task) for task in environ.get("SLURM_GTIDS", "").split(",")]
    node = _as_number(environ.get("SLURM_NODEID", ""))
    if node not in (None, nodes[rank]) or (None not in told and set(told) != set(here)):
        raise TFConfigError(
            f"Tasks must be numbered host by host, and {environ['SLURM_STEP_NODELIST']} has "
            f"{environ['SLURM_STEP_TASKS_PER_NODE']} tasks, but task {rank} is on host number "
            f"{environ.get('SLURM_NODEID', '?')}, with tasks {environ.get('SLURM_GTIDS', '?')}. Start the tasks by "
            f"`srun --distribution=block`."
        )


def mpi_place(environ: Mapping[str, str], hosts: Sequence[str] | str) -> tuple[int, list[str]]:
    """Returns the MPI rank of this process, and the host of each process; see `ClusterSpec.from_mpi`."""
    size = next((name for name in MPI_RANKS if environ.get(name, "").strip()), None)
    if size is None:
        raise TFConfigError(
            f"A process of MPI needs its rank, but none of {', '.join(MPI_RANKS)} is set. Start it by `mpirun`."
        )
    hosts = hosts.split(",") if isinstance(hosts, str) else hosts
    expanded = []
    for host in hosts:
        name, colon, count = host.partition(":")
        if not name or (colon and not _as_number(count)):
            raise TFConfigError(
                f'A host of MPI must be like "node1" or, for four processes, "node1:4", got {host!r}. Give the hosts '
                f"of `mpirun -H` in the same order."
            )
        expanded += [name] * int(count or 1)
    if _as_number(environ[size]) != len(expanded):
        raise TFConfigError(
            f"MPI has set {size}={environ[size]}, but there is room for {counted(len(expanded), 'process')} on "
            f"{','.join(hosts)}. Give the hosts of `mpirun -H` in the same order."
        )
    return _rank(MPI_RANKS[size], environ, len(expanded)), expanded


def addresses_on(hosts: Sequence[str], base_port: int) -> list[str]:
    """Returns the address of each worker. The ports on each host count up from `base_port`.

    Raises:
      TFConfigError: If a port is not valid.
    """
    try:
        places = [hosts[:index].count(host) for index, host in enumerate(hosts)]
        return [f"{host}:{checked_port(base_port + place)}" for host, place in zip(hosts, places, strict=True)]
    except ValueError as error:
        raise TFConfigError(
            f"Workers of a host get ports from {base_port} on, but {error}. Lower the base port."
        ) from error


def _rank(name: str, environ: Mapping[str, str], size: int) -> int:
    """Returns the rank of this process from a scheduler's variable, checked against `size`, the number of processes."""
    rank = _as_number(environ.get(name, ""))
    if rank is None or rank >= size:
        raise TFConfigError(
            f"{name} must be from 0 to {size - 1}, got {environ.get(name)!r}. Leave it as the scheduler sets it."
        )
    return rank


def expand_hosts(text: str) -> list[str]:
    """Returns the host names in a Slurm list such as "node[01-03,07],gpu1".

    Raises:
      ValueError: If `text` is not such a list.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        raise ValueError(f"its commas or brackets do not match: {text!r}")
    return [name for part in parts for name in _expand(part)]


def _expand(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if not match:
        return [part]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not is_digits(first) or (dash and not is_digits(last)):
            raise ValueError(f"[{ranges}] has {each!r}, which is neither a number nor a range")
        if dash and int(last) < int(first):
            raise ValueError(f"[{ranges}] has {each!r}, which ends before it begins")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{head}{number}{rest}" for number in numbers for rest in _expand(tail)]


def expand_counts(text: str) -> list[int]:
    """Returns the numbers in a Slurm list, such as tasks of each node: `"2(x3),1"` becomes `[2, 2, 2, 1]`.

    Raises:
      ValueError: If `text` is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not match:
            raise ValueError(f"{part!r} is not a number of tasks such as 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _read(name: str, environ: Mapping[str, str], expand: Callable[[str], list[Any]]) -> list[Any]:
    try:
        return expand(environ[name].strip())
    except ValueError as error:
        raise TFConfigError(f"{name} cannot be read: {error}. Leave it as `srun` sets it.") from error


def _as_number(text: str) -> int | None:
    return int(text) if is_digits(text) else None
