"""The worker's side of a `WorkerPool`: prepares the process, then answers calls until the parent is gone."""

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
    """Whether this process is a worker that imports the parent's main module."""
    return _importing_main


def serve(fd: int, num_devices: int, deadly_parent: int | None) -> None:
    """Runs a worker; does not return.

    Args:
      fd: Of the connection to the parent.
      num_devices: Logical CPU devices to make.
      deadly_parent: The process with whose main thread this one is to die, if any.
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
        if isinstance(reply, Returned):  # else this process could not be prepared, which is the answer to any call
            reply = _answer(index, functools.partial(_call, message))
            _remove_generated()
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
    """Removes what AutoGraph has written, and has loaded: it does so at exit, before which workers are killed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError):
                os.remove(str(module.__file__))


def _answer(index: int, call: Callable[[], Any]) -> Returned | Raised:
    try:
        return Returned(index, _pickled_value(call()))
    except BaseException as error:  # SystemExit too: the parent must hear of it
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
            f"A worker's function must return what can be pickled, got {type(value).__name__}: {error}. "
            f"Return plain values or arrays."
        ) from error
