"""A group of worker processes on this machine: started together, watched, ended together."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError
from tfdist.launch.process_guard import ProcessGuard
from tfdist.launch.signals import hear_of_children
from tfdist.launch.worker_output import WorkerOutput

__all__ = ["WorkerExit", "WorkerGroup", "describe_exit", "log_path"]

_SLOT = "TFDIST_SLOT"  # tells the workers of one machine apart, also when some are left out
_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_KILL_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, since between fork and exec little may be done


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
      index: Which worker.
      returncode: Its exit code, or minus the number of the signal that killed it.
      pid: The number of its process.
      time: When its end was noticed, in seconds since the epoch.
    """

    index: int
    returncode: int
    pid: int
    time: float


class WorkerGroup:
    """Processes that run one command, each a member of one TF_CONFIG cluster.

    A worker leads a session of its own, so that what it starts ends with it. Should this process be killed, the kernel
    kills the workers, and a guard what they started. Standard input is closed to all workers.

    Args:
      command: What each worker runs.
      specs: The cluster, seen from each worker to be started here.
      log_dir: Where `worker-<index>.log` files go. This process also shows the first worker's output, apart from lines
        of libraries and crash dumps.
      env: What is added to the environment of each.
      slots: What TFDIST_SLOT is for each; without, it is not set.
      tee: Whether to print all workers' lines instead, all of them, with "[worker <index>] " before each.
      reported_stack: Gives the traceback that a worker has reported, which is not shown here; empty if there is none.
    """

    def __init__(
        self,
        command: Sequence[str],
        specs: Sequence[ClusterSpec],
        *,
        log_dir: pathlib.Path,
        env: Mapping[str, str] | None = None,
        slots: Sequence[int] | None = None,
        tee: bool = False,
        reported_stack: Callable[[int], str] = lambda worker: "",
    ):
        self._command = list(command)
        self._specs = list(specs)
        self._log_dir = log_dir
        self._env = dict(env or {})
        self._slots = slots
        self._tee = tee
        self._reported_stack = reported_stack
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._outputs: dict[int, WorkerOutput] = {}
        self._guard: ProcessGuard | None = None
        self._exits: list[WorkerExit] = []
        self._not_started: int | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The workers that had not ended at the last `poll`."""
        return tuple(self._running)

    @property
    def pids(self) -> Mapping[int, int]:
        """The numbers of their processes, by worker."""
        return {index: process.pid for index, process in self._running.items()}

    @property
    def exits(self) -> tuple[WorkerExit, ...]:
        """The workers that had ended at the last `poll`, as they were noticed."""
        return tuple(self._exits)

    @property
    def not_started(self) -> int | None:
        """The worker that `start` failed at, if it did."""
        return self._not_started

    def start(self) -> None:
        """Starts all workers.

        Call it in the main thread: the kernel ends the workers with the thread that started them.

        Raises:
          ClusterError: If a process cannot be started, or a log file cannot be written.
        """
        hear_of_children()
        self._guard = ProcessGuard()
        try:
            for place, spec in enumerate(self._specs):
                self._not_started = spec.worker_id
                self._start_worker(spec, {_SLOT: str(self._slots[place])} if self._slots else {})
                self._guard.watch(process.pid for process in self._running.values())
            self._not_started = None
        except BaseException:
            self.kill()
            raise
        for output in self._outputs.values():  # after the last start: forking while threads run is not safe
            output.begin()

    def poll(self) -> None:
        """Takes note of workers that ended since, and ends what they left running."""
        for index in list(self._running):
            if _has_ended(self._running[index]):
                self._reap(index)
        if os.getpid() == 1:
            reap_orphans([process.pid for process in self._running.values()])

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until all workers ended, one with another exit code than 0, or `until()` is true."""
        self.poll()
        while self._running and not any(each.returncode for each in self._exits) and not until():
            time.sleep(_POLL_SECONDS)
            self.poll()

    def stop(self, signum: int | None, *, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends all workers: a signal, a grace, then SIGKILL, since SIGTERM alone does not end a TensorFlow worker.

        The signal is for the workers alone, and not for what they started, which they need to save: a pool of processes
        that loses one, say, makes them wait for data that never come.

        Args:
          signum: The signal to start with; None sends none, to workers that are about to end.
          grace_seconds: How long a worker may take to end by itself.
          hurry: Asked again and again; once true, the grace is over.
        """
        deadline = time.monotonic() + grace_seconds
        if signum is not None:
            for process in self._running.values():
                os.kill(process.pid, signum)
        self.poll()
        while self._running and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_SECONDS)
            self.poll()
        self.kill()

    def kill(self) -> None:
        """Ends all workers, and what they started, at once."""
        for process in self._running.values():
            os.killpg(process.pid, signal.SIGKILL)
        for index in list(self._running):
            self._reap(index)
        for index in list(self._outputs):  # of one that could not be started
            self._outputs.pop(index).finish(0)
        if self._guard:
            self._guard.close()
            self._guard = None

    def _start_worker(self, spec: ClusterSpec, own_env: Mapping[str, str]) -> None:
        index = spec.worker_id
        is_first = index == self._specs[0].worker_id
        show = "by line" if self._tee else "calm" if is_first else "no"
        # Unbuffered, so that a killed worker's last words are in its log.
        defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        env = {**defaults, **os.environ, **self._env, **own_env, "TF_CONFIG": spec.to_json()}
        try:
            output = self._outputs[index] = WorkerOutput(
                log_path(self._log_dir, index),
                show=show,
                name=f"[worker {index}]",
                reported_stack=functools.partial(self._reported_stack, index),
            )
            self._running[index] = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output.stdout,
                stderr=output.stderr,
                env=env,
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ClusterError(
                f"Worker {index} could not be started as {self._command} with its log in {self._log_dir}: {error}. "
                f"Use fewer workers, or raise the limits of this machine (`ulimit -a`, `df {self._log_dir}`)."
            ) from error

    def _reap(self, index: int) -> None:
        process = self._running.pop(index)
        # Before its end is taken note of, the number of its group cannot belong to anyone else.
        os.killpg(process.pid, signal.SIGKILL)
        try:
            returncode = process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"Worker {index}, process {process.pid}, did not end within {_KILL_SECONDS:g} s of SIGKILL. The kernel "
                f"holds it, often in a file system that does not answer: `cat /proc/{process.pid}/stack` says where."
            ) from error
        if self._guard:
            self._guard.watch(each.pid for each in self._running.values())
        self._exits.append(WorkerExit(index, returncode, process.pid, time.time()))
        self._outputs.pop(index).finish(_DRAIN_SECONDS)


def log_path(log_dir: pathlib.Path, index: int) -> pathlib.Path:
    """The log file of a worker."""
    return log_dir / f"worker-{index}.log"


def describe_exit(returncode: int) -> str:
    """Says in words how a process ended: "ended with exit code 3", "was killed by SIGKILL"."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-returncode}"


def reap_orphans(own: Collection[int]) -> None:
    """Takes note of the end of children that this process has not started, which the first of a container inherits.

    Without it they stay as zombies. The ends of its own children are left to those who wait for them.

    Args:
      own: The process numbers of its own children.
    """
    with contextlib.suppress(ChildProcessError):  # no child at all
        # The first that has ended; an own one is taken note of by the next `poll`, which then goes on with the others.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _die_with_parent(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the kernel was asked
        os._exit(1)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is gone, without taking note: its number stays reserved."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
