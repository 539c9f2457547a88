"""Reads the call stack of this thread, to find out who calls, and of all threads to report it."""

import gc
import hashlib
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = [
    "caller",
    "calls_of_threads",
    "frame_of",
    "frames",
    "is_called_by_library",
    "owner_of_caller",
    "site_of",
]


_reading = threading.Lock()


def frames() -> Iterator[FrameType]:
    """Yields the frames of this thread's call stack, from the calling function outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller() -> FrameType:
    """Returns the frame that called the caller of the calling function."""
    return sys._getframe(3)


def owner_of_caller(module: Any) -> Any:
    """Returns `self` of the frame that called the caller of the calling function, if `module` has its code; or `None`.

    A function inside of a method has the `self` of the method, if it uses it.
    """
    frame = sys._getframe(3)
    return frame.f_locals.get("self") if frame.f_globals.get("__name__") == module.__name__ else None


def site_of(frame: FrameType | None) -> str:
    """Returns a call site, to tell one `fit` from another: hashes of code and offset of a frame and its callers."""
    callers = []
    while frame is not None:
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has no qualified name here.
        code = hashlib.sha256(name.encode() + frame.f_code.co_code).hexdigest()[:12]
        callers.append(f"{code}:{frame.f_lasti}")
        frame = frame.f_back
    return "/".join(reversed(callers))


def frame_of(*functions: Any) -> FrameType | None:
    """Returns the innermost running call of one of `functions` in this thread, or `None`. Decorators are removed."""
    codes = {inspect.unwrap(function).__code__ for function in functions}
    return next((frame for frame in frames() if frame.f_code in codes), None)


def calls_of_threads() -> dict[int, list[tuple[str, int, str]]]:
    """Returns the stack of each thread, innermost first: file, line, function. Several threads may call it at a time.

    Reading the frames of a running thread is unsafe: creating a frame object can start a garbage collection. There, a
    finalizer may let the other thread run on, and its frame is gone. So the garbage collector is off meanwhile.
    faulthandler is no alternative: in CPython 3.11 it reads the list of threads without its lock, while threads of
    TensorFlow enter Python.
    """
    with _reading:  # Otherwise one thread could enable the collector while another reads, or leave it disabled.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return {
                ident: [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(innermost)]
                for ident, innermost in sys._current_frames().items()
            }
        finally:
            if was_enabled:
                gc.enable()


def is_called_by_library() -> bool:
    """Returns whether the caller was called from TensorFlow, Keras or tfdist, and not from a user's code.

    Without it: a user's step that divides a sum over replicas by the number of replicas is not refused.
    """
    module = caller().f_globals.get("__name__", "")
    if module.startswith("tensorflow.python.autograph"):  # Runs a user's code.
        return False
    return module.split(".")[0] in ("keras", "tensorflow", "tfdist")
