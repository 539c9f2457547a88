"""Runs functions in several worker processes on this machine that form one TF_CONFIG cluster.

The parent starts a fresh interpreter for each worker (`worker_handle`) and exchanges messages over a socket pair:

    parent                                worker (`pool_worker`)
      how this program was started   →     import the main module, make the devices
      pickled (fn, args, kwargs)     →     call
                                     ←     Returned, or Raised

A worker exits when its parent exits.
"""

import math
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from tfdist.cluster import ClusterSpec
from tfdist.cluster.ports import HeldPorts, hold_ports
from tfdist.errors import WorkerError, WorkerTimeoutError
from tfdist.launch.stop_signals import hear_of_children
from tfdist.launch.worker_group import describe_exit, has_ended
from tfdist.network.secret import SECRET, new_secret, secret_is_given
from tfdist.readable_numbers import counted
from tfdist.testing.pool_worker import is_importing_main
from tfdist.testing.worker_handle import GRACE_SECONDS, WorkerHandle
from tfdist.testing.worker_replies import Died, Raised, Reply, Returned, doubt

T = TypeVar("T")

_POLL_SECONDS = 0.25
_DUMP_SECONDS, _DUMP_POLL_SECONDS = 10.0, 0.02  # Longest time for workers to print their stacks.


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
      fn: A function at the top level of a module, which each worker imports.
      num_workers: Number of workers.
      args: Arguments of `fn`, the same for every worker. TF_CONFIG contains the worker's own id.
      kwargs: Keyword arguments of `fn`.
      devices_per_worker: Number of logical CPU devices in each worker.
      timeout_seconds: Time limit, including the start of the workers.
      env: Environment variables for the workers, in addition to the variables of this process.

    Returns:
      Return values of `fn`, in the order of the workers.

    Raises:
      TypeError: If `fn` or its arguments cannot be sent to another process.
      WorkerError: If a worker failed. `__cause__` is the exception of that worker.
      WorkerTimeoutError: If a worker did not return in time.
    """
    with WorkerPool(num_workers, devices_per_worker, timeout_seconds=timeout_seconds, env=env) as pool:
        return pool.run(fn, *args, **(kwargs or {}))


class WorkerPool:
    """Worker processes on this machine, which form one cluster and serve many calls of a test.

    Saves the seconds that TensorFlow takes to start. Each worker stays one process, and TensorFlow creates its
    collective runtime once per process, so create the strategy in a function decorated with `functools.cache`. A
    failure kills all workers, since a failed collective makes a process unusable. The next `run` starts new workers.

    Use the pool as a context manager. Create it in the main thread: workers started from another thread outlive a
    killed parent while TensorFlow holds the GIL.

    Args:
      num_workers: Number of workers.
      devices_per_worker: Number of logical CPU devices in each worker.
      timeout_seconds: Time limit of one `run`, including the start of the workers.
      env: Environment variables for the workers, in addition to the variables of this process. TF_CPP_MIN_LOG_LEVEL is
        2 and CUDA_VISIBLE_DEVICES is -1 in the workers, unless set here or in this process.

    Raises:
      ValueError: If a number is not positive, or `env` contains TF_CONFIG.
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
        self._workers: list[WorkerHandle] = []
        self._ports: HeldPorts | None = None
        self._closed = False

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Calls `fn(*args, **kwargs)` once in each worker process, all at the same time, as `run_workers` does.

        Raises:
          ValueError: If the pool is closed. Other errors are those of `run_workers`.
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
            returned = [reply for reply in replies if isinstance(reply, Returned)]
            if len(returned) < len(replies):
                raise self._error([reply for reply in replies if not isinstance(reply, Returned)])
            if len(returned) < self._num_workers:
                raise self._timeout_error({reply.index for reply in returned})
            return [reply.load() for reply in sorted(returned, key=lambda reply: reply.index)]
        except BaseException:  # Includes KeyboardInterrupt: the results of running calls are no longer needed.
            self._kill()
            raise

    def close(self) -> None:
        """Kills the worker processes at once, because TensorFlow may not react to SIGTERM."""
        self._closed = True
        self._kill()

    def _start(self) -> None:
        if is_importing_main():
            raise WorkerError(
                "A worker must not start workers while it imports the main module. In the script that was started, put "
                'the call under `if __name__ == "__main__":`, since every worker imports that script.'
            )
        hear_of_children()
        ports = self._ports = hold_ports(self._num_workers)
        env = self._env if secret_is_given({**os.environ, **self._env}) else {**self._env, SECRET: new_secret()}
        for index in range(self._num_workers):
            spec = ClusterSpec.local(self._num_workers, index, ports.numbers)
            self._workers.append(WorkerHandle(spec, self._devices_per_worker, {**env, **ports.env}))

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        self._workers = []
        if self._ports:
            self._ports.close()
            self._ports = None

    def _gather(self, deadline: float) -> list[Reply]:
        """Waits for every worker's reply to a call, until the deadline or `GRACE_SECONDS` after the first failure.

        Looks for replies once more after the deadline, as this process may have been stopped in the meantime.
        """
        replies: list[Reply] = []
        waiting, remaining = list(self._workers), math.inf
        while waiting and remaining > 0:
            remaining = max(0.0, deadline - time.monotonic())
            ready = wait([worker.connection for worker in waiting], min(remaining, _POLL_SECONDS))
            for worker in list(waiting):
                # A process forked by the worker can keep the pipe open, so check the worker too.
                if worker.connection in ready or has_ended(worker.process):
                    reply = worker.receive()
                    replies.append(reply)
                    waiting.remove(worker)
                    if not isinstance(reply, Returned):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    def _error(self, failures: list[Raised | Died]) -> WorkerError:
        """Returns the error of a failed call: that of the worker whose failure most likely caused the others."""
        first = min(failures, key=doubt)
        cause: BaseException | None = None
        if isinstance(first, Raised):
            what = f"raised {first.summary}\n\n--- traceback of worker {first.index}\n{first.trace.rstrip()}"
            cause = first.load()
        else:
            what = f"{describe_exit(first.returncode)} without an exception. See its output."
        error = WorkerError(f"Worker {first.index} of {self._num_workers} {what}\n{self._outputs()}")
        error.__cause__ = cause
        return error

    def _timeout_error(self, finished: set[int]) -> WorkerTimeoutError:
        late = [worker for worker in self._workers if worker.index not in finished]
        for worker in late:
            worker.dump_stacks()
        deadline = time.monotonic() + _DUMP_SECONDS
        while not all(worker.has_dumped_stacks() for worker in late) and time.monotonic() < deadline:
            time.sleep(_DUMP_POLL_SECONDS)
        names = ", ".join(f"worker {worker.index}" for worker in late)
        return WorkerTimeoutError(
            f"{counted(self._num_workers, 'worker')} must end within {self._timeout_seconds:g} s, still running: "
            f"{names}. See the stacks in their output, or raise timeout_seconds if they need more time.\n"
            f"{self._outputs()}"
        )

    def _outputs(self) -> str:
        return "".join(
            f"\n--- last output of worker {worker.index}\n{worker.output_tail().rstrip() or '(none)'}\n"
            for worker in self._workers
        )


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
            f"The arguments of {name} cannot be sent to a worker: {error}. Pass plain values or arrays, and make all "
            f"other objects inside the function."
        ) from error
