"""The clock of the only replica of a job on a GPU, whose steps TensorFlow launches ahead of their computation."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.host_device import launched
from tfdist.strategies.collectives.stopwatch import last_number
from tfdist.strategies.step_clock import AGREES, ASKED, BEGIN, Clock, tensors_of
from tfdist.strategies.step_phases import StepPhases, divide_on_gpu


class AheadClock(Clock):
    """A clock that lets TensorFlow launch a step while the GPU computes the step before.

    A copy between host and GPU, or a control dependency between them, waits for all kernels that the GPU has been
    given. So the graph of a step has none. A thread waits for the GPU instead, with a copy that is no part of the step.
    At the end of each step, the host waits until the GPU has computed the step before. The GPU then has the kernels of
    one step to compute, and the times that a report tells are those of the step before.
    """

    def __init__(self, device: str):
        super().__init__(device)
        self._is_on_gpu = True
        with tf.device(self.host):
            # The step does not read this variable. Otherwise its kernels would wait until the time is noted.
            self._requests = tf.Variable(tf.zeros([AGREES + 1], tf.float64), trainable=False)
        with tf.device(device):
            self._result = tf.Variable(tf.zeros([], tf.float64), trainable=False)  # A number of the newest step.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-gpu-clock")
        self._pending: Future[StepPhases] | None = None
        self._computed_before = 0.0
        self._call = -1  # Number of the call of the step before.

    def mark(self, moment: int, after: Any = ()) -> tf.Tensor:
        """Notes the time when the host has launched the operations of the tensors in `after`.

        Returns:
          A tensor that exists once the time is noted.
        """
        if moment in (ASKED, AGREES):
            return self._note(moment, [], [], self._requests)
        return self.known(moment, after)

    def trained(self, logs: Any, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """Marks the end of a step for `phases_before`, see `Clock.trained`.

        Returns:
          A tensor on the host that exists once the operations of the step are launched. The backward pass makes the
          gradient of the first variable last, so its update is taken as the last of the step.
        """
        results = [*tensors_of(logs), *(tf.convert_to_tensor(each) for each in variables[:1])]
        number = last_number(self._device, results)
        assigned = None if number is None else self._result.assign(number, read_value=False)
        return launched(self._device, [*results, *([] if assigned is None else [assigned])])

    @property
    def is_computing(self) -> bool:
        """Whether the GPU still computes a step whose operations are launched. Callable in any thread."""
        pending = self._pending
        return pending is not None and not pending.done()

    def read(self) -> np.ndarray:
        """Returns the times of all moments, float64. Python calls it, in any thread."""
        with tf.device(self.host):
            times, requests = self.times.numpy(), self._requests.numpy()
        times[[ASKED, AGREES]] = requests[[ASKED, AGREES]]
        return times

    def compute_seconds(self) -> tf.Tensor:
        """Returns 0: the step is not yet computed."""
        return tf.constant(0.0)

    def input_seconds(self) -> tf.Tensor:
        """Returns 0: the step is not yet computed."""
        return tf.constant(0.0)

    def phases_before(self, moments: np.ndarray, call: int) -> StepPhases:
        """Waits until the GPU has computed the step before, and returns its phases; 0 if it was of another call.

        Args:
          moments: Times of the present step, whose operations the host has launched.
          call: Number of the running call of `fit` or another method.
        """
        with tf.device(self.host):  # Otherwise a copy to the GPU and back would wait for the step.
            asked = float(self._requests.numpy()[ASKED])
        pending, self._pending = self._pending, self._thread.submit(self._computed, asked, float(moments[BEGIN]))
        phases = None if pending is None else pending.result()
        is_of_call, self._call = call == self._call, call
        return phases if phases is not None and is_of_call else StepPhases(0.0, 0.0, 0.0, 0.0)

    def _computed(self, asked: float, begin: float) -> StepPhases:
        self._result.numpy()  # Waits for the GPU.
        before, self._computed_before = self._computed_before, time.time()
        return divide_on_gpu(before, asked, begin, self._computed_before)
