"""A process that ends with the code it means, without TensorFlow's last word."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys

__all__ = ["end_with"]

_code: int | None = None


def end_with(code: int, *, if_none: bool = False) -> None:
    """Lets this process end with a code once its `atexit` functions have run, but for those of before this import.

    TensorFlow takes seconds to take its runtime apart, and without end if collectives have failed.

    Args:
      code: Its exit code.
      if_none: Whether to leave a code that was given before.
    """
    global _code
    if _code is None or not if_none:
        _code = code


def _end() -> None:
    if _code is not None:
        for child in multiprocessing.active_children():
            child.kill()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(_code)


atexit.register(_end)  # When imported, to be among the last to run.
