"""Functions run in many worker processes on this machine, each a member of one TF_CONFIG cluster.

The parent starts a fresh interpreter for each worker and talks to it over a socket pair:

    parent                                worker
      how this program was started   →     import the main module, make the devices
      pickled (fn, args, kwargs)     →     call
                                     ←     _Returned, or _Raised

A worker that loses its parent ends itself. All its output goes to a nameless file, which needs no clean-up.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import IO, Any, TypeVar

from tfdist.cluster import DEVICES_PER_WORKER, ClusterSpec, free_ports
from tfdist.errors import WorkerError, WorkerTimeoutError
from tfdist.launch.failures import is_consequence
from tfdist.launch.group import describe_exit

__all__ = ["WorkerPool", "run_workers"]

T = TypeVar("T")

_OUTPUT_LINES = 100
_GRACE_SECONDS = 1.0  # after the first failure, for others that may hold its cause
_POLL_SECONDS = 0.25
_DUMP_SECONDS = 0.5  # for a worker to write its stacks
_PR_SET_PDEATHSIG = 1


def run_workers(
    fn: Callable[..., T],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices_per_worker: int = 1,
    timeout_seconds: float = 180.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Calls a function once in each of several fresh worker processes.

    Args:
      fn: A function at the top of a module, which each worker imports.
      num_workers: How many workers.
      args: Arguments of `fn`, the same for every worker; TF_CONFIG tells a worker which one it is.
      kwargs: Keyword arguments of `fn`.
      devices_per_worker: Logical CPU devices in each worker.
      timeout_seconds: How long all of it may take, the start of the workers included.
      env: Environment variables for the workers, beside those of this process.

    Returns:
      What `fn` returned, by worker.

    Raises:
      TypeError: If `fn` or its arguments cannot be sent to another process.
      WorkerError: If a worker failed. `__cause__` is what it raised.
      WorkerTimeoutError: If a worker did not return in time.
    """
    with WorkerPool(num_workers, devices_per_worker, timeout_seconds=timeout_seconds, env=env) as pool:
        return pool.run(fn, *args, **(kwargs or {}))


class WorkerPool:
    """Worker processes that live over many calls.

    Saves the seconds that TensorFlow takes to start. A worker is one process all along, and TensorFlow makes its
    collective runtime once in a process: keep the strategy in a function decorated with `functools.cache`. After a
    failure the workers are killed, since a failed collective poisons a process; the next `run` starts new ones.

    Use it as a context manager. Make it in the main thread: workers started from another thread outlive a killed
    parent for as long as TensorFlow holds the interpreter's lock.

    Args:
      num_workers: How many workers.
      devices_per_worker: Logical CPU devices in each worker.
      timeout_seconds: How long one `run` may take, the start of the workers included.
      env: Environment variables for the workers, beside those of this process. TF_CPP_MIN_LOG_LEVEL is 2 and
        CUDA_VISIBLE_DEVICES is -1 unless given here or in this process.

    Raises:
      ValueError: If a number is not positive, or `env` has a TF_CONFIG.
    """

    def __init__(
        self,
        num_workers: int,
        devices_per_worker: int = 1,
        *,
        timeout_seconds: float = 180.0,
        env: Mapping[str, str] | None = None,
    ):
        for name, value in (
            ("num_workers", num_workers),
            ("devices_per_worker", devices_per_worker),
            ("timeout_seconds", timeout_seconds),
        ):
            if value <= 0:
                raise ValueError(f"WorkerPool needs a positive {name}, got {value}.")
        if env and "TF_CONFIG" in env:
            raise ValueError(
                f"WorkerPool gives each worker its own TF_CONFIG, but env has {env['TF_CONFIG']!r}. Leave it out; to "
                f"test another one, set os.environ in the function that runs in the workers."
            )
        self._num_workers = num_workers
        self._devices_per_worker = devices_per_worker
        self._timeout_seconds = timeout_seconds
        self._env = dict(env or {})
        self._workers: list[_Worker] = []
        self._closed = False

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Calls `fn(*args, **kwargs)` once in each worker.

        Args:
          fn: A function at the top of a module, which each worker imports.
          *args: Its arguments, the same for every worker.
          **kwargs: Its keyword arguments.

        Returns:
          What `fn` returned, by worker.

        Raises:
          ValueError: If the pool is closed.
          TypeError: If `fn` or its arguments cannot be sent to another process.
          WorkerError: If a worker failed. `__cause__` is what it raised.
          WorkerTimeoutError: If a worker did not return in time.
        """
        if self._closed:
            raise ValueError("This WorkerPool is closed. Call run inside its `with` block, or make a new pool.")
        deadline = time.monotonic() + self._timeout_seconds
        call = _pickled_call(fn, args, kwargs)
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                worker.send(call)
            replies = self._gather(deadline)
            returned = [reply for reply in replies if isinstance(reply, _Returned)]
            if len(returned) < len(replies):
                raise self._error([reply for reply in replies if not isinstance(reply, _Returned)])
            if len(returned) < self._num_workers:
                raise self._timeout_error({reply.index for reply in returned})
            return [reply.load() for reply in sorted(returned, key=lambda reply: reply.index)]
        except BaseException:  # KeyboardInterrupt too: whatever the workers are doing, nobody waits for it now
            self._kill()
            raise

    def close(self) -> None:
        """Ends the workers, at once: TensorFlow may not answer a politer signal."""
        self._closed = True
        self._kill()

    def _start(self) -> None:
        if _importing_main:
            raise WorkerError(
                "A worker may not start workers while it imports the main module. In the script that was started, put "
                'the call under `if __name__ == "__main__":`, as every worker imports that script.'
            )
        ports = free_ports(self._num_workers)
        for index in range(self._num_workers):
            spec = ClusterSpec.local(self._num_workers, index, ports)
            self._workers.append(_Worker(spec, self._devices_per_worker, self._env))

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _gather(self, deadline: float) -> list["_Reply"]:
        """Waits for a reply of every worker, until the deadline or a grace after the first failure."""
        replies: list[_Reply] = []
        waiting = list(self._workers)
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([worker.connection for worker in waiting], min(remaining, _POLL_SECONDS))
            for worker in list(waiting):
                # A process that a worker forked can hold its end of the pipe open, so look at the worker too.
                if worker.connection in ready or worker.has_ended():
                    reply = worker.receive()
                    replies.append(reply)
                    waiting.remove(worker)
                    if not isinstance(reply, _Returned):
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return replies

    def _error(self, failures: list["_Raised | _Died"]) -> WorkerError:
        """The error for the failure that is most likely the cause of the others; the earliest, if several are."""
        first = min(failures, key=_doubt)
        cause: BaseException | None = None
        if isinstance(first, _Raised):
            what = f"raised {first.summary}\n\n--- traceback of worker {first.index}\n{first.trace.rstrip()}"
            cause = first.load()
        else:
            what = f"{describe_exit(first.returncode)} without an exception. Its output may say why."
        error = WorkerError(f"Worker {first.index} of {self._num_workers} {what}\n{self._outputs()}")
        error.__cause__ = cause
        return error

    def _timeout_error(self, finished: set[int]) -> WorkerTimeoutError:
        late = [worker for worker in self._workers if worker.index not in finished]
        for worker in late:
            worker.dump_stacks()
        time.sleep(_DUMP_SECONDS)
        names = ", ".join(f"worker {worker.index}" for worker in late)
        return WorkerTimeoutError(
            f"After {self._timeout_seconds:g} s, of {self._num_workers} workers still running: {names}. The stacks at "
            f"the end of their output say where; raise timeout_seconds if they only need longer.\n{self._outputs()}"
        )

    def _outputs(self) -> str:
        return "".join(
            f"\n--- last output of worker {worker.index}\n{worker.output_tail().rstrip() or '(none)'}\n"
            for worker in self._workers
        )


@dataclasses.dataclass(frozen=True)
class _Returned:
    index: int
    value: bytes

    def load(self) -> Any:
        """The value, rebuilt in this process."""
        try:
            return pickle.loads(self.value)
        except Exception as error:
            raise WorkerError(
                f"What worker {self.index} returned cannot be rebuilt in this process: {error!r}. "
                f"Return plain values or arrays."
            ) from error


@dataclasses.dataclass(frozen=True)
class _Raised:
    index: int
    kind: str
    summary: str
    trace: str
    error: bytes | None

    def load(self) -> BaseException | None:
        """What the worker raised, if it survives the way here."""
        try:
            error = pickle.loads(self.error) if self.error else None
        except Exception:  # an exception class may do anything when it is rebuilt; the traceback is there as text
            return None
        return error if isinstance(error, BaseException) else None


@dataclasses.dataclass(frozen=True)
class _Died:
    index: int
    returncode: int


_Reply = _Returned | _Raised | _Died


def _doubt(failure: _Raised | _Died) -> int:
    """How likely a failure is the mere consequence of another."""
    if isinstance(failure, _Raised) and is_consequence(failure.kind, failure.summary):
        return 2
    # TensorFlow aborts a process in which nobody is there to hear that a peer is gone.
    return 1 if isinstance(failure, _Died) and failure.returncode == -signal.SIGABRT else 0


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, spec: ClusterSpec, num_devices: int, env: Mapping[str, str]):
        self.index = spec.worker_id
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self.connection, remote = Pipe()
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _start_code(remote.fileno(), num_devices)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[remote.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's; and one kill reaches what the worker started
                env=_worker_env(spec, num_devices, env),
            )
        program = multiprocessing.spawn.get_preparation_data(f"worker {self.index}")
        program.pop("authkey")  # refuses to be pickled outside multiprocessing's own start
        if not os.path.exists(program.get("init_main_from_path", "")):  # standard input: nothing to import
            program.pop("init_main_from_path", None)
        self.send(pickle.dumps(program))

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the worker is gone; `receive` says how
            self.connection.send_bytes(message)

    def receive(self) -> _Reply:
        """The worker's reply, or how it died."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                reply: _Reply = pickle.loads(self.connection.recv_bytes())
                return reply
        self.kill(after_seconds=_GRACE_SECONDS)
        return _Died(self.index, self.process.wait())

    def has_ended(self) -> bool:
        """Whether the worker is gone, without taking note: its number stays reserved, so that `kill` is safe."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def dump_stacks(self) -> None:
        """Lets the worker write where each of its threads is."""
        os.kill(self.process.pid, signal.SIGUSR1)

    def output_tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        # Not `seek`: the position is shared with the worker, which writes there.
        tail = os.pread(self._output.fileno(), 1 << 16, max(0, size - (1 << 16)))
        return "\n".join(tail.decode(errors="replace").splitlines()[-_OUTPUT_LINES:])

    def kill(self, after_seconds: float = 0.0) -> None:
        """Kills the worker and all that it started, unless it ends by itself in time."""
        if self.process.returncode is not None:
            return
        deadline = time.monotonic() + after_seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        self.connection.close()
        self._output.close()


def _worker_env(spec: ClusterSpec, num_devices: int, more: Mapping[str, str]) -> dict[str, str]:
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ}
    env.pop(DEVICES_PER_WORKER, None)  # meant for this process, not for those it starts
    if num_devices > 1:
        env[DEVICES_PER_WORKER] = str(num_devices)
    return {**env, **more, "TF_CONFIG": spec.to_json()}


def _pickled_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        fn_alone = pickle.dumps(fn)
    except Exception as error:
        raise TypeError(
            f"Workers import the function they run, but {name} cannot be sent by name: {error}. Use a function defined "
            f"with `def` at the top of a module, and hand values to it as arguments."
        ) from error
    try:
        return pickle.dumps((fn_alone, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"The arguments of {name} cannot be sent to a worker: {error}. Hand over plain values or arrays, and make "
            f"the rest inside the function."
        ) from error


# From here on: the worker's side.

_importing_main = False


def _start_code(fd: int, num_devices: int) -> str:
    deadly_parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    # The parent's path first, since tfdist may be found only through it.
    return (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; from tfdist.testing import workers; "
        f"workers._serve({fd}, {num_devices}, {deadly_parent})"
    )


def _serve(fd: int, num_devices: int, deadly_parent: int | None) -> None:
    """Runs a worker: prepares the process, then answers calls until the parent is gone."""
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    _die_with_parent(deadly_parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive_calls, args=(connection, calls), name="tfdist-parent", daemon=True).start()
    index = ClusterSpec.from_json(os.environ["TF_CONFIG"]).worker_id
    reply = _answer(index, lambda: _prepare(calls.get(), num_devices))
    while True:
        message = calls.get()
        if isinstance(reply, _Returned):  # else this process could not be prepared, which is the answer to any call
            reply = _answer(index, functools.partial(_call, message))
        connection.send_bytes(pickle.dumps(reply))


def _die_with_parent(parent: int | None) -> None:
    """Asks the kernel to kill this process with the thread that started it.

    Losing the pipe says the same, but needs the interpreter's lock to be heard, and TensorFlow holds that while a
    strategy waits for its peers. Only for a main thread: any other may end while its pool lives.
    """
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)


def _receive_calls(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _prepare(program: bytes, num_devices: int) -> None:
    """Makes this process look like the parent: path, arguments, main module; then makes the devices."""
    global _importing_main
    _importing_main = True
    multiprocessing.spawn.prepare(pickle.loads(program))
    _importing_main = False
    if num_devices > 1:
        from tfdist.testing.devices import virtual_devices

        virtual_devices(num_devices)


def _call(message: bytes) -> Any:
    fn_alone, args, kwargs = pickle.loads(message)
    try:
        fn = pickle.loads(fn_alone)
    except Exception as error:
        raise TypeError(
            f"A worker could not import the function to run: {error!r}. Define it in a module that a fresh interpreter "
            f"can import: not in a notebook, `python -c` or standard input."
        ) from error
    return fn(*args, **kwargs)


def _answer(index: int, call: Callable[[], Any]) -> _Returned | _Raised:
    try:
        return _Returned(index, _pickled_value(call()))
    except BaseException as error:  # SystemExit too: the parent must hear of it
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        trace = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return _Raised(index, type(error).__name__, summary, trace, pickled)


def _pickled_value(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"A worker's function must return what can be pickled, got {type(value).__name__}: {error}. "
            f"Return plain values or arrays."
        ) from error
