"""A group of worker processes on this machine: started together, watched, ended together."""

import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tfdist.cluster import DEVICES_PER_WORKER, ClusterSpec, free_ports
from tfdist.errors import ClusterError

__all__ = ["WorkerExit", "WorkerGroup", "describe_exit"]

_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, since between fork and exec little may be done
_terminal = threading.Lock()


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
      index: Which worker.
      returncode: Its exit code, or minus the number of the signal that killed it.
    """

    index: int
    returncode: int

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def describe(self) -> str:
        """Says how it ended: "worker 1 was killed by SIGKILL"."""
        return f"worker {self.index} {describe_exit(self.returncode)}"


class WorkerGroup:
    """Processes that run one command, each a member of one TF_CONFIG cluster.

    A worker leads a session of its own, so that what it starts ends with it; a worker whose parent is killed is killed
    by the kernel. Standard input is closed to all workers.

    Args:
      command: What each worker runs.
      num_workers: How many workers.
      log_dir: Where `worker-<index>.log` files go. Worker 0 writes to this process's own output instead, unless `tee`.
      devices_per_worker: Logical devices that the strategy makes in each worker; None leaves the environment as it is.
      tee: Whether to print all workers' lines, with "[worker <index>] " before each, beside the log files.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        log_dir: pathlib.Path,
        devices_per_worker: int | None = None,
        tee: bool = False,
    ):
        self._command = list(command)
        self._num_workers = num_workers
        self._log_dir = log_dir
        self._devices_per_worker = devices_per_worker
        self._tee = tee
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._pumps: dict[int, threading.Thread] = {}
        self._first_failure: WorkerExit | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The workers that had not ended at the last `poll`."""
        return tuple(self._running)

    @property
    def first_failure(self) -> WorkerExit | None:
        """The failure that came first; those after it may be its consequences."""
        return self._first_failure

    def log_path(self, index: int) -> pathlib.Path | None:
        """The log file of a worker, None if its output goes straight to this process's."""
        return self._log_dir / f"worker-{index}.log" if index > 0 or self._tee else None

    def start(self) -> None:
        """Starts all workers.

        Call it in the main thread: the kernel ends the workers with the thread that started them.

        Raises:
          OSError: If a log file cannot be written.
          ClusterError: If a process cannot be started, or there are no free ports.
        """
        ports = free_ports(self._num_workers)
        paths = [self.log_path(index) for index in range(self._num_workers)]
        logs: list[IO[bytes] | None] = []
        try:
            logs = [path.open("wb") if path else None for path in paths]
            for index, log in enumerate(logs):
                self._start_worker(index, ClusterSpec.local(self._num_workers, index, ports), log)
        except BaseException:
            self.kill()
            raise
        finally:
            if not self._tee:
                for log in logs:
                    if log:
                        log.close()  # the worker has its own copy
        if self._tee:  # after the last start: forking while threads run is not safe
            for index, log in enumerate(logs):
                self._start_pump(index, log)

    def poll(self) -> WorkerExit | None:
        """Takes note of workers that ended since, and ends what they left running.

        Returns:
          The first failure so far, if any.
        """
        ended = [self._reap(index) for index in list(self._running) if _has_ended(self._running[index])]
        failed = [each for each in ended if each.returncode != 0]
        if failed and self._first_failure is None:
            self._first_failure = min(failed, key=_doubt)
        return self._first_failure

    def wait(self, until: Callable[[], bool] = lambda: False) -> WorkerExit | None:
        """Waits until all workers ended, one failed, or `until()` is true.

        Returns:
          The first failure, if any.
        """
        while self.poll() is None and self._running and not until():
            time.sleep(_POLL_SECONDS)
        return self._first_failure

    def stop(
        self, signum: int = signal.SIGTERM, *, grace_seconds: float, hurry: Callable[[], bool] = lambda: False
    ) -> None:
        """Ends all workers: a signal, a grace, then SIGKILL, since SIGTERM alone does not end a TensorFlow worker.

        Args:
          signum: The signal to start with.
          grace_seconds: How long a worker may take to end by itself.
          hurry: Asked again and again; once true, the grace is over.
        """
        deadline = time.monotonic() + grace_seconds
        for process in self._running.values():
            os.killpg(process.pid, signum)
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

    def _start_worker(self, index: int, spec: ClusterSpec, log: IO[bytes] | None) -> None:
        output = subprocess.PIPE if self._tee else log
        try:
            self._running[index] = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env=_worker_env(os.environ, spec, self._devices_per_worker),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ClusterError(
                f"Worker {index} of {self._num_workers} could not be started as {self._command}: {error}. "
                f"Use fewer workers, or raise the limits of this machine (`ulimit -a`)."
            ) from error

    def _start_pump(self, index: int, log: IO[bytes] | None) -> None:
        source = self._running[index].stdout
        if source is None or log is None:
            raise ClusterError(f"Worker {index} has no output to read. This is a bug in tfdist.")
        self._pumps[index] = threading.Thread(target=_pump, args=(index, source, log), daemon=True)
        self._pumps[index].start()

    def _reap(self, index: int) -> WorkerExit:
        process = self._running.pop(index)
        # Before its end is taken note of, the number of its group cannot belong to anyone else.
        os.killpg(process.pid, signal.SIGKILL)
        returncode = process.wait()
        if index in self._pumps:
            self._pumps.pop(index).join(_DRAIN_SECONDS)
        return WorkerExit(index, returncode)


def _doubt(failure: WorkerExit) -> bool:
    """Whether a failure may be the consequence of another seen with it: a killed worker fails or aborts the others."""
    return failure.returncode > 0 or failure.returncode == -signal.SIGABRT


def describe_exit(returncode: int) -> str:
    """Says in words how a process ended: "ended with exit code 3", "was killed by SIGKILL"."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-returncode}"


def _worker_env(environ: Mapping[str, str], spec: ClusterSpec, devices_per_worker: int | None) -> dict[str, str]:
    # Unbuffered, so that a killed worker's last words are in its log.
    env = {"PYTHONUNBUFFERED": "1", **environ, "TF_CONFIG": spec.to_json()}
    if devices_per_worker is not None:
        env[DEVICES_PER_WORKER] = str(devices_per_worker)
    return env


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is gone, without taking note: its number stays reserved."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _pump(index: int, source: IO[bytes], log: IO[bytes]) -> None:
    """Copies a worker's lines to its log file and, with its name before each, to the terminal."""
    terminal: IO[bytes] | None = sys.stdout.buffer
    with source, log:
        for line in source:
            log.write(line)
            log.flush()
            try:
                if terminal:
                    with _terminal:
                        terminal.write(b"[worker %d] " % index + line.rstrip(b"\n") + b"\n")
                        terminal.flush()
            except OSError:
                terminal = None  # the reader is gone (`| head`), but the worker must not block on a full pipe
