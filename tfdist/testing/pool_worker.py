"""Runs in a worker process of a `WorkerPool`: prepares the process, then answers calls until the parent exits."""

import contextlib
import ctypes
import faulthandler
import functools
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tfdist.cluster import ClusterSpec
from tfdist.testing.worker_replies import Raised, Returned

_PR_SET_PDEATHSIG = 1

_importing_main = False


def is_importing_main() -> bool:
    """Returns whether this process is a worker that is importing the parent's main module, so must start no pool."""
    return _importing_main


def serve(fd: int, num_devices: int, deadly_parent: int | None) -> None:
    """Runs a worker process of a `WorkerPool`, which answers the parent's calls. Does not return.

    Args:
      fd: File descriptor of the connection to the parent.
      num_devices: Number of logical CPU devices to create.
      deadly_parent: Process id of the parent if the worker must die with the parent's main thread, otherwise None.
    """
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
        if isinstance(reply, Returned):  # If preparation failed, answers each call with that failure.
            reply = _answer(index, functools.partial(_call, message))
            _remove_generated()
        connection.send_bytes(pickle.dumps(reply))


def _die_with_parent(parent: int | None) -> None:
    """Asks the kernel to kill this worker process when the thread that started it ends.

    A closed pipe also shows the parent's death, but Python notices it only with the GIL, and TensorFlow holds the GIL
    while a strategy waits for its peers. Used only for a main thread: another thread may end before its pool does.
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
    """Copies the parent's import path, arguments and main module into this worker process, then creates its devices."""
    global _importing_main
    _importing_main = True
    multiprocessing.spawn.prepare(pickle.loads(program))
    _importing_main = False
    if num_devices > 1:
        from tfdist.testing.local_devices import virtual_devices

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


def _remove_generated() -> None:
    """Removes files that AutoGraph generated and loaded. AutoGraph removes them at exit, but workers are killed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError):
                os.remove(str(module.__file__))


def _answer(index: int, call: Callable[[], Any]) -> Returned | Raised:
    try:
        return Returned(index, _pickled_value(call()))
    except BaseException as error:  # Includes SystemExit, which the parent must learn of.
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        trace = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Raised(index, type(error).__name__, summary, trace, pickled)


def _pickled_value(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"A worker's function must return a value that can be pickled, got {type(value).__name__}: {error}. "
            f"Return plain values or arrays."
        ) from error
