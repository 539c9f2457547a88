"""Writes output of workers to standard output or error of this process."""

import os
import threading
import time

_writing = threading.Lock()  # Standard output and error are often the same terminal.


class OutputTarget:
    """A descriptor that shows output until its reader is gone (`| head`).

    Args:
      descriptor: The descriptor; None shows nothing.

    Attributes:
      wrote_at: When output was last shown, in seconds of the monotonic clock.
    """

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor
        self.wrote_at = time.monotonic()

    def write(self, data: bytes) -> None:
        """Shows output. Without data, does not wait for a blocked terminal."""
        if self._descriptor is None or not data:
            return
        self.wrote_at = time.monotonic()
        with _writing:
            if not write_all(self._descriptor, data):
                self._descriptor = None

    def end(self) -> None:
        """Notes that the worker writes no more."""


def write_all(descriptor: int, data: bytes) -> bool:
    """Writes all bytes to a descriptor. Returns whether this succeeded."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return False
    return True
