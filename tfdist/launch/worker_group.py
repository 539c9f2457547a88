"""Starts, watches and ends a group of worker processes on this machine together."""

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
from tfdist.launch.output_target import OutputTarget
from tfdist.launch.process_guard import ProcessGuard
from tfdist.launch.stop_signals import hear_of_children
from tfdist.launch.worker_output import WorkerOutput
from tfdist.run_files import log_path

SLOT = "TFDIST_SLOT"  # Distinguishes the workers of a machine, also after some are left out.
_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_KILL_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # Loaded here, since little code is safe between fork and exec.


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """The end of a worker process: its exit code and when the end was noticed.

    Attributes:
      index: Id of the worker.
      returncode: Exit code of the worker, or minus the number of the signal that killed it.
      pid: Process id of the worker.
      time: Time when the end was noticed, in seconds since the epoch.
    """

    index: int
    returncode: int
    pid: int
    time: float


class WorkerGroup:
    """Processes that run the same command, each a member of one TF_CONFIG cluster.

    Each worker leads its own session, so that its child processes end with it. If this process is killed, the kernel
    kills the workers, and a guard process kills their children. Workers have no standard input.

    Args:
      command: Command that each worker runs.
      specs: Cluster spec of each worker to be started here.
      log_dir: Folder for the `worker-<index>.log` files. This process also shows the first worker's output, except
        lines of libraries and crash dumps.
      env: Variables to add to the environment of each worker.
      slots: Value of TFDIST_SLOT for each worker. Without it, TFDIST_SLOT is not set.
      env_of_slot: Returns variables to add to the environment of the worker with this slot.
      tee: Whether to print all lines of all workers instead, each after "[worker <index>] ".
      quiet: Whether to show no output of workers.
      reported_stack: Returns the traceback that a worker has reported, which is not shown here, or an empty string.
      target: See `WorkerOutput`.
    """

    def __init__(
        self,
        command: Sequence[str],
        specs: Sequence[ClusterSpec],
        *,
        log_dir: pathlib.Path,
        env: Mapping[str, str] | None = None,
        slots: Sequence[int] | None = None,
        env_of_slot: Callable[[int], Mapping[str, str]] = lambda slot: {},
        tee: bool = False,
        quiet: bool = False,
        reported_stack: Callable[[int], str] = lambda worker: "",
        target: Callable[[int | None], OutputTarget] = OutputTarget,
    ):
        self._command = list(command)
        self._specs = list(specs)
        self._log_dir = log_dir
        self._env = dict(env or {})
        self._slots = slots
        self._env_of_slot = env_of_slot
        self._tee, self._quiet = tee, quiet
        self._reported_stack = reported_stack
        self._target = target
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._outputs: dict[int, WorkerOutput] = {}
        self._guard: ProcessGuard | None = None
        self._exits: list[WorkerExit] = []
        self._not_started: int | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The indices of the workers whose processes still ran at the last `poll`."""
        return tuple(self._running)

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the running workers, by worker."""
        return {index: process.pid for index, process in dict(self._running).items()}  # Other threads ask too.

    @property
    def exits(self) -> tuple[WorkerExit, ...]:
        """The exits of the workers that had ended at the last `poll`, in the order in which they were noticed."""
        return tuple(self._exits)

    @property
    def not_started(self) -> int | None:
        """The index of the worker that `start` could not start, or None."""
        return self._not_started

    def start(self) -> None:
        """Starts all workers.

        Call it in the main thread: the kernel kills the workers when the thread that started them ends.

        Raises:
          ClusterError: If a process cannot be started, a log file cannot be written, or no thread can copy the output.
        """
        hear_of_children()
        self._guard = ProcessGuard()
        try:
            for place, spec in enumerate(self._specs):
                self._not_started = spec.worker_id
                self._start_worker(spec, self._own_env(self._slots[place]) if self._slots else {})
                self._guard.watch(process.pid for process in self._running.values())
            for index in self._outputs:  # After the last start, since forking with running threads is unsafe.
                self._not_started = index
                self._copy_output(index)
            self._not_started = None
        except BaseException:
            self.kill()
            raise

    def forget(self, index: int) -> WorkerExit:
        """Removes the exit of a worker, which is to start again or is not needed any more, and returns it."""
        gone = next(each for each in self._exits if each.index == index)
        self._exits.remove(gone)
        return gone

    def start_again(self, index: int) -> None:
        """Starts a worker again that has ended, with the same cluster spec. Its log goes on.

        Raises:
          ClusterError: If the process cannot be started.
        """
        place = next(i for i, spec in enumerate(self._specs) if spec.worker_id == index)
        try:
            self._start_worker(self._specs[place], self._own_env(self._slots[place]) if self._slots else {})
            if self._guard:
                self._guard.watch(process.pid for process in self._running.values())
            self._copy_output(index)
        except ClusterError:
            if index in self._running:
                self._reap(index)
                self.forget(index)
            if index in self._outputs:
                self._outputs.pop(index).finish(0)
            raise

    def poll(self) -> None:
        """Records workers that have ended since the last `poll`, and kills child processes that they left running.

        Also gives terminals of workers the present size of the real one.
        """
        for index in list(self._running):
            if has_ended(self._running[index]):
                self._reap(index)
        for output in self._outputs.values():
            output.follow_size()
        if os.getpid() == 1:
            reap_orphans([process.pid for process in self._running.values()])

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until all workers have ended, a worker has ended with a nonzero exit code, or `until()` is true."""
        self.poll()
        while self._running and not any(each.returncode for each in self._exits) and not until():
            time.sleep(_POLL_SECONDS)
            self.poll()

    def stop(self, signum: int | None, *, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends all workers: a signal, a grace period, then SIGKILL, since SIGTERM does not end a TensorFlow worker.

        Only the workers receive the signal. They need their child processes to save: if, say, a process pool lost a
        process, the worker would wait for data that never comes.

        Args:
          signum: The first signal; None sends no signal, for workers that are about to end.
          grace_seconds: Time for the workers to end by themselves.
          hurry: Called repeatedly. Once it returns true, the grace period is over.
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
        """Kills all workers and their child processes at once."""
        for process in self._running.values():
            os.killpg(process.pid, signal.SIGKILL)
        for index in list(self._running):
            self._reap(index)
        for index in list(self._outputs):  # The outputs of a worker that could not be started.
            self._outputs.pop(index).finish(0)
        if self._guard:
            self._guard.close()
            self._guard = None

    def _own_env(self, slot: int) -> dict[str, str]:
        return {SLOT: str(slot), **self._env_of_slot(slot)}

    def _start_worker(self, spec: ClusterSpec, own_env: Mapping[str, str]) -> None:
        index = spec.worker_id
        is_first = index == self._specs[0].worker_id
        show = "by line" if self._tee else "calm" if is_first and not self._quiet else "no"
        # Unbuffered, so that the log of a killed worker contains its last output.
        defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        env = {**defaults, **os.environ, **self._env, **own_env, "TF_CONFIG": spec.to_json()}
        try:
            output = self._outputs[index] = WorkerOutput(
                log_path(self._log_dir, index),
                show=show,
                name=f"[worker {index}]",
                reported_stack=functools.partial(self._reported_stack, index),
                target=self._target,
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

    def _copy_output(self, index: int) -> None:
        try:
            self._outputs[index].begin()
        except RuntimeError as error:  # No thread can be started.
            raise ClusterError(
                f"The output of worker {index} could not be copied: {error}. Use fewer workers, or raise the limit of "
                "processes and threads (`ulimit -u`)."
            ) from error

    def _reap(self, index: int) -> None:
        process = self._running.pop(index)
        # Until `wait` below reaps the process, no other process group can get its id.
        os.killpg(process.pid, signal.SIGKILL)
        try:
            returncode = process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"Worker {index}, process {process.pid}, did not end within {_KILL_SECONDS:g} s of SIGKILL. The kernel "
                f"holds it, often in a file system that does not answer: `cat /proc/{process.pid}/stack` shows where."
            ) from error
        if self._guard:
            self._guard.watch(each.pid for each in self._running.values())
        self._exits.append(WorkerExit(index, returncode, process.pid, time.time()))
        self._outputs.pop(index).finish(_DRAIN_SECONDS)


def describe_exit(returncode: int) -> str:
    """Describes how a process ended: "ended with exit code 3", "was killed by SIGKILL"."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal has no name.
        return f"signal {number}"


def reap_orphans(own: Collection[int]) -> None:
    """Reaps ended children that this process did not start. The first process of a container inherits such children.

    Otherwise they would stay zombies. The function does not reap this process's own children, given by process id.
    """
    with contextlib.suppress(ChildProcessError):  # No children.
        # Stops at an ended child of its own. The next `poll` reaps that child and then continues with the orphans.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _die_with_parent(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent died before the call of `prctl`.
        os._exit(1)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether the process has ended. Does not reap the process, so its id stays reserved."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
