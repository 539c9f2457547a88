"""The worker processes of one variant: starts them on their hosts, gives them orders, and ends them in any case."""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Any, Protocol

from benchmarks.peers.messages import Answer, Failure, Order
from tfdist.cluster import DEVICES_PER_WORKER_VARIABLE, ClusterSpec
from tfdist.launch.worker_group import describe_exit

# A worker computes on one thread, so that the other worker has a core too.
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}

_ROOT = pathlib.Path(__file__).parents[2]
_GRACE_SECONDS = 2.0  # Time after the first failure in which another worker may report its cause.
_MESSAGE_LENGTH = 240
_PRINTED_BYTES = 1 << 16  # Of the end of a worker's output: the stacks of an abort take more than 10,000.
_ABORTED = "Fatal Python error"  # Python's handler prints this before the stacks of all threads.
_PR_SET_PDEATHSIG = 1
_NICE = -15
_LIBC = ctypes.CDLL(None)  # Loaded here, since few operations are safe between fork and exec.
# Parts of errors that a worker raises because another one failed.
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError", "Connection closed by peer")


class GroupError(RuntimeError):
    """A group of workers failed or missed its deadline. The message is one line; `details` is the workers' output."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class Host(Protocol):
    """A machine that runs a worker, such as a host of `benchmarks.netlab`."""

    address: str
    interface: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the host."""


class _Worker:
    def __init__(self, host: Host, spec: ClusterSpec, packages: str | None, environment: Mapping[str, str]):
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        # For temporary files that TensorFlow would remove at exit: workers are killed before that.
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist-benchmark-", ignore_cleanup_errors=True)
        self.connection, remote = Pipe()
        environ = {
            **os.environ,
            **THREADS,
            "TF_CONFIG": spec.to_json(),
            "TMPDIR": self._folder.name,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONFAULTHANDLER": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "GLOO_SOCKET_IFNAME": host.interface,
            "BENCHMARK_INTERFACE": host.interface,
            **environment,
        }
        environ.pop(DEVICES_PER_WORKER_VARIABLE, None)
        with remote:
            arguments = [str(remote.fileno()), *([packages] if packages else [])]
            self.process = subprocess.Popen(
                host.command([sys.executable, "-u", "-m", "benchmarks.peers.worker", *arguments]),
                cwd=_ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                pass_fds=[remote.fileno()],
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        _go_first(self.process.pid)

    def receive(self) -> Answer | Failure:
        try:
            answer: Answer | Failure = self.connection.recv()
            return answer
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_SECONDS)
            self.kill()
            end = describe_exit(self.process.wait())
            printed = self.printed()
            return Failure(f"a worker {end}: {last_words(printed)}", printed)

    def printed(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), _PRINTED_BYTES, max(0, size - _PRINTED_BYTES)).decode(errors="replace")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()
        self.output.close()
        self._folder.cleanup()


class Group:
    """Workers of one variant, one on each host. Use it in the main thread, as a context manager.

    Args:
      hosts: The hosts of the workers.
      ports: A free TCP port on each host.
      peer: The module of this folder that trains.
      options: Further arguments of its `prepare`.
      packages: A folder with Python packages that precede the installed ones.
      environment: Environment variables of the workers, beside those of this process.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        ports: Sequence[int],
        peer: str,
        options: Mapping[str, Any],
        packages: str | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self._peer, self._options = peer, tuple(options.items())
        addresses = tuple(f"{host.address}:{port}" for host, port in zip(hosts, ports, strict=True))
        self._workers: list[_Worker] = []
        try:
            for index, host in enumerate(hosts):
                spec = ClusterSpec({"worker": addresses}, "worker", index)
                self._workers.append(_Worker(host, spec, packages, environment or {}))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def train(
        self,
        model: str,
        *,
        alone: bool,
        warmup: int,
        steps: int,
        timeout_seconds: float,
        dilation: float = 1.0,
        renew: bool = False,
    ) -> list[Answer]:
        """Trains on all workers at once.

        Args:
          model: A name in `MODELS`.
          alone: Whether each worker trains alone, without an exchange.
          warmup: Number of steps before those that count, at least 1.
          steps: Number of steps that count.
          timeout_seconds: Deadline of all workers, in seconds.
          dilation: How many times as long an emulated accelerator needs.
          renew: Whether the workers make their models anew.

        Returns:
          One answer per worker.

        Raises:
          GroupError: If a worker failed or missed the deadline. All workers are ended.
        """
        deadline = time.monotonic() + timeout_seconds
        order = Order(self._peer, self._options, model, alone, warmup, steps, dilation, renew)
        try:
            for worker in self._workers:
                with contextlib.suppress(OSError):  # If the worker has ended, `receive` reports how.
                    worker.connection.send(order)
            answers, failures = self._gather(deadline)
            if failures:
                cause = min(failures, key=lambda each: any(word in each.summary for word in _CONSEQUENCES))
                raise GroupError(_one_line(cause.summary), cause.trace)
            if len(answers) < len(self._workers):
                late = "\n".join(worker.printed() for worker in self._workers)
                raise GroupError(
                    f"{len(answers)} of {len(self._workers)} workers answered in {timeout_seconds:g} s", late
                )
            return answers
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _gather(self, deadline: float) -> tuple[list[Answer], list[Failure]]:
        waiting = {worker.connection: worker for worker in self._workers}
        answers: list[Answer] = []
        failures: list[Failure] = []
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), remaining):
                reply = waiting.pop(ready).receive()  # type: ignore[index]
                if isinstance(reply, Failure):
                    failures.append(reply)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                else:
                    answers.append(reply)
        return answers, failures


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_LENGTH else line[: _MESSAGE_LENGTH - 1] + "…"


def last_words(printed: str) -> str:
    """The most informative line: the last one with an error, else the last one, before the stacks of an abort."""
    before = printed.partition(_ABORTED)[0]
    lines = [line.strip() for line in (before.strip() or printed.partition("\n")[0]).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "what()" in line]
    return (telling or lines or ["it printed nothing"])[-1]


def _go_first(pid: int) -> None:
    """Raises the priority of a new process, so that other load disturbs it less. Without root it has no effect."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        # With autogroups the kernel divides time between sessions, and a process's priority only counts in its session.
        pathlib.Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
