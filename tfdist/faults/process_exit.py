"""Ends a process with a given exit code, without waiting for TensorFlow's shutdown."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys

_code: int | None = None


def end_with(code: int, *, if_none: bool = False) -> None:
    """Makes this process end with an exit code after all `atexit` functions registered after this module's import.

    TensorFlow's shutdown takes seconds, and may take forever after collectives have failed.

    Args:
      code: The exit code.
      if_none: Whether to keep a code that was given before.
    """
    global _code
    if _code is None or not if_none:
        _code = code


def _end() -> None:
    if _code is not None:
        for child in multiprocessing.active_children():
            child.kill()
        logging.shutdown()
        flush()
        os._exit(_code)


def flush() -> None:
    """Writes out what standard output and error still hold, before the process ends without clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


atexit.register(_end)  # Registered at import, so that it runs among the last.
