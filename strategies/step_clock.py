"""The clock of a replica: times of the moments of its current step, noted while the graph runs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.host_device import host_of, launched
from tfdist.strategies.collectives.stopwatch import computed_by, present_time
from tfdist.strategies.step_phases import StepPhases

# In a training step: a batch has arrived; the loss is computed; the share of this replica is known; its gradients are
# computed; the step ends.
BEGIN, LOSS, SHARE, GRADIENTS, END = range(5)
# Index of a scalar that a moment waits for. Grappler regroups products of constants, and may give the name of a factor
# without other readers to another value. Storing the scalar here prevents that. The first of several scalars is enough:
# LOSS waits for one scalar, and most of the tensors that GRADIENTS waits for are no scalars.
_SEEN = 5
# In evaluations: a batch has arrived; its outputs exist and are exchanged next. In all calls, for the watchdog only:
# the graph asks for input; this worker has its input, and workers agree on whether any worker has data left.
EVALUATED, TESTED, ASKED, AGREES = range(6, 10)
_COMPUTED_BEFORE = 10  # GRADIENTS of the step before.
_MOMENTS = 11


class Clock:
    """Times of moments of a replica's current step, such as the arrival of data, in seconds since the epoch."""

    def __init__(self, device: str):
        self._device, self.host = device, host_of(device)
        self._is_on_gpu = "GPU" in device
        with tf.device(self.host):
            self.times = tf.Variable(tf.zeros([_MOMENTS], tf.float64), trainable=False)

    def begin(self, data: Any) -> Any:
        """Notes when the batch `data` of a step has arrived. Returns `data` for operations that start after that.

        Does not wait for a GPU, which may still update weights for the last step. So it does not pause between steps.
        There, operations do not wait for the note, which would cost a copy.
        """
        noted = self.known(BEGIN, data)
        if self._is_on_gpu:
            return data
        with tf.control_dependencies([noted]):
            return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)

    def mark(self, moment: int, after: Any = ()) -> tf.Tensor:
        """Notes the time when the device has computed the tensors in `after`.

        Returns:
          A tensor that exists once the time is noted.
        """
        after = computed_by(self._device, tensors_of(after))
        numbers = [leaf for leaf in after if leaf.shape.rank == 0 and leaf.dtype.is_floating]
        return self._note(moment, after, numbers)

    def known(self, moment: int, after: Any) -> tf.Tensor:
        """Notes the time when the host knows the tensors in `after`. On a GPU they may still have to be computed.

        This suits tensors that come from the host, such as a batch or the result of an exchange. A batch may also be on
        the host.
        """
        if not self._is_on_gpu:
            return self.mark(moment, after)
        tensors = tensors_of(after)
        on_host = [tensor for tensor in tensors if "CPU" in tensor.device]
        on_gpu = [tensor for tensor in tensors if "CPU" not in tensor.device]
        return self._note(moment, [*on_host, *([launched(self._device, on_gpu)] if on_gpu else [])], [])

    def _note(
        self,
        moment: int,
        after: Sequence[tf.Tensor],
        numbers: Sequence[tf.Tensor],
        times: tf.Variable | None = None,
    ) -> tf.Tensor:
        with tf.device(self.host):
            # An identity: TensorFlow leaves out a control dependency of a call on its own argument. The call could then
            # note the time before the argument exists.
            seen = tf.identity(tf.cast(numbers[0], tf.float64)) if numbers else tf.constant(0.0, tf.float64)
            # Made before the block below, where the constant would take the control dependencies and be folded away.
            which = tf.constant([moment, _SEEN])
            with tf.control_dependencies(after):
                return _mark((self.times if times is None else times).handle, which, seen)

    def trained(self, logs: Any, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """Notes, as GRADIENTS, when the only replica of a job has computed the `logs` of a step.

        Args:
          logs: Results of the step. They are ready after the gradients that were marked before.
          variables: The variables that the step has trained.

        Returns:
          A tensor on the host that exists then.
        """
        del variables
        return self.mark(GRADIENTS, logs)

    def phases_before(self, moments: np.ndarray, call: int) -> StepPhases | None:
        """Returns the phases of the step before if the present one is not computed yet, as on a GPU; else `None`.

        Args:
          moments: Times of the present step.
          call: Number of the running call of `fit` or another method.
        """
        del moments, call
        return None

    def evaluates(self, data: Any) -> None:
        """Notes when the batch `data` of an evaluation or prediction has arrived, for the watchdog and reports."""
        self.known(EVALUATED, data)

    def has_evaluated(self, outputs: Any) -> None:
        """Notes when the `outputs` of an evaluation or prediction exist, for the watchdog."""
        self.mark(TESTED, outputs)

    @property
    def is_computing(self) -> bool:
        """Whether the device still computes a step whose end is noted. Callable in any thread."""
        return False

    def read(self) -> np.ndarray:
        """Returns the times of all moments, float64. Python calls it, in any thread."""
        with tf.device(self.host):  # TensorFlow would copy them to a GPU and back.
            return self.times.numpy()

    def compute_seconds(self) -> tf.Tensor:
        """Returns the seconds that the replica computed in this step, without waits for others, float32 []."""
        begin, loss, share, gradients, _ = tf.unstack(self.times.read_value()[:_SEEN])
        waited = tf.where(loss >= begin, tf.maximum(share - loss, 0), 0)
        return tf.cast(gradients - begin - waited, tf.float32)

    def seconds_before(self) -> tf.Tensor:
        """Seconds between the last step and this one, float32 []; 0 without a last step, or after an evaluation."""
        times = self.times.read_value()
        begin, end, evaluated = times[BEGIN], times[END], times[EVALUATED]
        return tf.cast(tf.where((end > 0) & (evaluated < end), tf.maximum(begin - end, 0), 0), tf.float32)

    def input_seconds(self) -> tf.Tensor:
        """Returns the seconds in which the worker itself had no batch for this step, float32 []."""
        times = self.times.read_value()
        begin, end, asked, agrees = times[BEGIN], times[END], times[ASKED], times[AGREES]
        arrived = tf.where((agrees >= asked) & (agrees <= begin), agrees, begin)  # Else this step asks no worker.
        has_asked = (asked >= end) & (asked <= begin) & (asked > 0)
        return tf.cast(tf.where(has_asked, arrived - asked, 0), tf.float32)

    def outside_seconds(self) -> tf.Tensor:
        """Returns the seconds from the end of the step before to the request for input, float32 [].

        A step that gets its batch from Python, as in `train_on_batch`, asks for no input: then until the batch arrives.
        """
        times = self.times.read_value()
        begin, end, asked = times[BEGIN], times[END], times[ASKED]
        until = tf.where((asked >= end) & (asked <= begin), asked, begin)
        return tf.cast(tf.where(end > 0, tf.maximum(until - end, 0), 0), tf.float32)

    def cycle_seconds(self) -> tf.Tensor:
        """Returns the seconds since the last gradient of the step before, float32 []. Called once in a step."""
        with tf.device(self.host):
            times = self.times.read_value()
            now, before = times[GRADIENTS], times[_COMPUTED_BEFORE]
            tf.raw_ops.ResourceScatterUpdate(resource=self.times.handle, indices=_COMPUTED_BEFORE, updates=now)
        return tf.cast(tf.where(before > 0, now - before, 0), tf.float32)

    def end(self, call: Callable[..., Any], value: tf.Tensor) -> None:
        """Calls, in the graph, a function made by `in_order` with a step's report and the times of the step.

        Notes the end of the step afterwards.
        """
        with tf.device(self.host):
            call(self.times.handle, value)


def tensors_of(nest: Any) -> list[tf.Tensor]:
    """Returns the tensors of a nest, and the values of its sparse gradients."""
    leaves = [leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf for leaf in tf.nest.flatten(nest)]
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


# Separate functions with a resource among their inputs. TensorFlow runs stateful operations without a resource one
# after another, also those of two replicas in one graph, and the replicas would then wait for each other for ever.


@tf.function
def _mark(clock, which, seen):
    tf.raw_ops.ResourceScatterUpdate(resource=clock, indices=which, updates=tf.stack([present_time(), seen]))
    return which


def in_order(function: Callable[[np.ndarray, np.ndarray], None]) -> Callable[..., Any]:
    """Returns a function that calls `function` in a graph, in the order of the steps, and then notes their end.

    `function` gets a value and the times of the clock.
    """

    def call_and_tell_time(value, times):
        now = np.float64(time.time())  # TensorFlow makes a Python number a float32 if functions run eagerly.
        function(value, times)
        return now

    @tf.function
    def call(clock, value):
        with tf.control_dependencies([value]):
            times = tf.raw_ops.ReadVariableOp(resource=clock, dtype=tf.float64)
        now = tf.numpy_function(call_and_tell_time, [value, times], tf.float64)
        tf.raw_ops.ResourceScatterUpdate(resource=clock, indices=END, updates=now)

    return call
