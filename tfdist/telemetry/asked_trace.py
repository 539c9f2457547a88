"""A trace of the next steps by TensorFlow's profiler, when the worker gets SIGUSR2."""

import threading
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from tfdist.events.asked_by_signal import call_no_more, call_when_asked
from tfdist.readable_numbers import counted

_POLL_SECONDS = 0.02
_LONGEST_SECONDS = 600.0  # No trace becomes larger than that, if no step ends.


class AskedTrace:
    """Traces the next training steps of this process at each SIGUSR2, in a thread. Costs nothing before.

    Args:
      folder: The run folder of this worker for TensorBoard.
      steps: Number of whole steps to trace.
      count: Returns the number of training steps so far. Any thread may call it.
    """

    def __init__(self, folder: str, steps: int, count: Callable[[], int]) -> None:
        self._folder, self._steps, self._count = folder, steps, count
        self._is_over = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> bool:
        """Begins to listen for the signal. Returns whether it will be heard."""
        self._is_over.clear()
        return call_when_asked(self._trace_in_thread)

    def end(self) -> None:
        """Writes the trace that is being made, and listens no more."""
        call_no_more(self._trace_in_thread)
        self._is_over.set()
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _trace_in_thread(self) -> None:
        with self._starting:
            if self._is_over.is_set():
                return
            if self._thread is not None and self._thread.is_alive():
                logging.warning("A trace is being made, so this signal starts no other one.")
                return
            self._thread = threading.Thread(target=self._trace, name="tfdist-trace", daemon=True)
            self._thread.start()

    def _trace(self) -> None:
        try:
            tf.profiler.experimental.start(self._folder)
            # The step that runs now is traced in part.
            self._wait_for(self._count() + 1 + self._steps)
            tf.profiler.experimental.stop()
            # A warning, because absl hides lower levels by default.
            logging.warning("The trace of %s is in %s.", counted(self._steps, "step"), self._folder)
        except tf.errors.OpError as error:  # The program profiles something itself, or the disk is full.
            logging.warning("Not traced: the next %s. %s", counted(self._steps, "step"), error.message)

    def _wait_for(self, steps: int) -> None:
        deadline = time.monotonic() + _LONGEST_SECONDS
        while self._count() < steps and time.monotonic() < deadline and not self._is_over.wait(_POLL_SECONDS):
            pass
