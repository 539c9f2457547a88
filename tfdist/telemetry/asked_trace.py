"""A trace of the next steps by TensorFlow's profiler, when the worker gets SIGUSR2."""

import threading
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from tfdist.events.asked_by_signal import call_no_more, call_when_asked

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
        self._tracing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self) -> bool:
        """Begins to listen for the signal. Returns whether it will be heard."""
        self._is_over.clear()
        return call_when_asked(self._trace_in_thread)

    def end(self) -> None:
        """Writes the trace that is being made, and listens no more."""
        call_no_more(self._trace_in_thread)
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _trace_in_thread(self) -> None:
        thread = threading.Thread(target=self._trace, name="tfdist-trace", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _trace(self) -> None:
        if not self._tracing.acquire(blocking=False):
            return  # A trace is being made.
        try:
            tf.profiler.experimental.start(self._folder)
            # The step that runs now is traced in part.
            self._wait_for(self._count() + 1 + self._steps)
            tf.profiler.experimental.stop()
            logging.info("The trace of %d steps is in %s.", self._steps, self._folder)
        except tf.errors.OpError as error:  # The program profiles something itself, or the disk is full.
            logging.warning("The next %d steps are not traced: %s", self._steps, error.message)
        finally:
            self._tracing.release()

    def _wait_for(self, steps: int) -> None:
        deadline = time.monotonic() + _LONGEST_SECONDS
        while self._count() < steps and time.monotonic() < deadline and not self._is_over.wait(_POLL_SECONDS):
            pass
