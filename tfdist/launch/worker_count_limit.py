"""Computes the largest number of workers that this machine can start."""

import dataclasses
import pathlib
import resource

from tfdist.launch.memory_limit import free_memory
from tfdist.readable_numbers import plural

_FILES_A_WORKER, _FILES_OF_OWN = 6, 64  # Log, pipe ends, a held port. Own files of this process.
_PROCESSES_A_WORKER = 2  # The threads of each process count as well.
_BYTES_A_WORKER = 16 << 20  # An idle Python process. TensorFlow needs some 400 MB.
_PORTS = 50_000


@dataclasses.dataclass(frozen=True)
class WorkerLimits:
    """The resources of this machine that workers share, which limit the number of workers here.

    Attributes:
      files: Number of files that this process may open.
      processes: Number of processes that this user may run.
      memory: Number of free bytes.
    """

    files: int
    processes: int
    memory: int

    @classmethod
    def of_this_machine(cls) -> "WorkerLimits":
        """Returns the resources of this machine: its open files, processes and free memory."""
        try:
            memory = free_memory()
        except (OSError, ValueError):
            memory = 1 << 62
        files = _soft_limit(resource.RLIMIT_NOFILE)
        return cls(files, min(_soft_limit(resource.RLIMIT_NPROC), _most_processes()), memory)


def refusal(workers: int, limits: WorkerLimits) -> str | None:
    """Returns why this machine cannot start this many workers, with the largest possible number, or None if it can.

    Refuses only impossible numbers. Running workers may need many more resources than starting workers.
    """
    most, why = min(
        ((limits.files - _FILES_OF_OWN) // _FILES_A_WORKER, f"a process may open {limits.files} files (`ulimit -n`)"),
        (limits.processes // _PROCESSES_A_WORKER, f"there may be {limits.processes} processes (`ulimit -u`)"),
        (limits.memory // _BYTES_A_WORKER, f"{limits.memory >> 20} MiB of memory are free"),
        (_PORTS, "each needs its own TCP port"),
    )
    if workers <= most:
        return None
    # Not `counted`: both numbers are shown as they are typed, without commas.
    noun = "worker" if most == 1 else plural("worker")
    return f"this machine can start at most {max(most, 0)} {noun}, got {_shown(workers)}: {why}"


def _soft_limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft


def _most_processes() -> int:
    try:
        return int(pathlib.Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return 1 << 22


def _shown(number: int) -> str:
    return str(number) if number < 10**12 else f"a number of {len(str(number))} digits"
