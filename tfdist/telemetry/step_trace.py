"""A trace of chosen steps by TensorFlow's profiler, for TensorBoard."""

import tensorflow as tf
from absl import logging


class StepTrace:
    """Traces some training steps of this process.

    Args:
      folder: The run folder of this worker for TensorBoard.
      first: First step to trace, counted from 1 in this process.
      last: Last step to trace.
    """

    def __init__(self, folder: str, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder, first, last
        self._is_on = self._is_done = False

    def before_step(self, number: int) -> None:
        """Starts the profiler if the step `number` is to be traced."""
        if self._is_done or self._is_on or number < self._first:
            return
        try:
            tf.profiler.experimental.start(self._folder)
            self._is_on = True
        except tf.errors.OpError as error:  # The program profiles something itself.
            self._is_done = True
            logging.warning("The steps %d to %d are not traced: %s", self._first, self._last, error.message)

    def after_step(self, number: int) -> None:
        """Writes the trace after its last step."""
        if self._is_on and number >= self._last:
            self.end()

    def end(self) -> None:
        """Writes the trace, if one is being made."""
        if not self._is_on:
            return
        self._is_on, self._is_done = False, True
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            logging.warning("The trace of steps %d to %d was not written: %s", self._first, self._last, error.message)
