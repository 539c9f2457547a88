"""A fragment of the weights that travels to all replicas and comes back averaged, while training goes on."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tfdist.strategies.collectives.abort_probe import raise_if_aborted
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.local_steps.averaging import average, share_of
from tfdist.strategies.local_steps.background_exchanges import BackgroundExchanges
from tfdist.strategies.local_steps.outer_update import OuterUpdate, merged
from tfdist.strategies.local_steps.own_thread import apart
from tfdist.strategies.local_steps.travel_times import TravelTimes
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.step import Step, current_step


class TravellingFragment:
    """The changes and statistics that one fragment of the weights sends to all replicas, and their averages.

    It departs after a step and arrives a fixed number of steps later. In between `exchange` puts averages over all
    replicas in the place of the replica's own values: in a thread, while steps compute, or in the step of the arrival.

    Args:
      strategy: The strategy.
      background: Runs exchanges beside steps; `None` if they run in the steps of arrivals.

    Attributes:
      times: How long the fragment travelled in the background, and how long steps waited for it.
      outer: The outer updates of the fragment.
      statistics: Statistics that travel with the fragment.
      travels: Whether the fragment has departed and not arrived, bool [], by replica of this worker.
      is_awaited: Whether it lacks the averages, as far as steps know, bool [], likewise.
      numbers: Number of rows that the replica has trained on, and above 0 if its worker asks all workers to stop:
        float32 [2], likewise. The exchange puts their sums over all replicas here.
    """

    def __init__(self, strategy: Any, background: BackgroundExchanges | None):
        self._strategy, self._background = strategy, background
        self.times = TravelTimes()
        self.outer: list[OuterUpdate] = []
        self.statistics: list[Any] = []
        self._copies: list[list[tf.Variable]] = []  # Copies of statistics, by statistic and replica.
        self._functions: dict[tuple[int, int], Callable[[], Any]] = {}
        self._error: Exception | None = None
        self.travels: list[tf.Variable] = []
        self.is_awaited: list[tf.Variable] = []
        self.numbers: list[tf.Variable] = []
        apart(self._make_variables)

    def _make_variables(self) -> None:
        for device in self._strategy.extended.worker_devices:
            with tf.device(host_of(device)):
                self.travels.append(tf.Variable(False, trainable=False))
                self.is_awaited.append(tf.Variable(False, trainable=False))
                self.numbers.append(tf.Variable(tf.zeros([2]), trainable=False))
        with tf.device("CPU:0"):  # One element for each exchange in the background: whether it has succeeded.
            self._done = tf.queue.FIFOQueue(-1, [tf.bool])

    def include_statistics(self, statistics: Sequence[Any]) -> None:
        """Makes statistics travel with this fragment."""
        self.statistics += statistics
        self._copies += [apart(functools.partial(_copies, statistic.values)) for statistic in statistics]

    def state(self) -> dict[str, tf.Variable]:
        """Returns the variables of this worker's replicas, by names that are equal in each run."""
        kinds = {"travels": self.travels, "is_awaited": self.is_awaited, "numbers": self.numbers}
        kinds |= {f"statistics/{place}": copies for place, copies in enumerate(self._copies)}
        return {f"{name}@{i}": each for name, of_each in kinds.items() for i, each in enumerate(of_each)}

    def depart(self, step: Step, rows: tf.Tensor, asks_to_stop: Any) -> tf.Tensor:
        """Takes along the present changes, and starts their exchange. Returns a tensor that exists afterwards."""
        replica = step.replica
        numbers = tf.stack([tf.cast(rows, tf.float32), tf.cast(asks_to_stop, tf.float32)])
        taken = [self.numbers[replica].assign(numbers)]
        for copies, statistic in zip(self._copies, self.statistics, strict=True):
            taken.append(copies[replica].assign(statistic.values[replica].read_value()))
        for outer in self.outer:
            taken += outer.depart(replica)
        taken += [each[replica].assign(True) for each in (self.travels, self.is_awaited)]
        if self._background is None:
            return tf.constant(True)
        start = functools.partial(self._start, self._function())
        with tf.control_dependencies([tf.convert_to_tensor(each) for each in taken]):
            return tf.numpy_function(start, [], tf.bool)

    def exchange(self, step: Step) -> tf.Tensor:
        """Puts averages over all replicas in the place of the replica's own values. All replicas must call it.

        Costs an exchange of two numbers, then one of the changes, and one of statistics.
        """
        replica, reducer = step.replica, self._strategy.extended.reducer_beside
        numbers = self.numbers[replica].read_value()
        request = ReductionRequest(tf.distribute.ReduceOp.SUM, [numbers])
        (totals,) = reducer.reduce(request, step)
        share = share_of(numbers[0], totals[0])
        average(step, [copies[replica] for copies in self._copies], share, reducer)
        for outer in self.outer:
            outer.exchange(step, share)
        self.numbers[replica].assign(totals)
        return tf.constant(True)

    def arrive(self, step: Step) -> tf.Tensor:
        """Awaits the averages, and applies them.

        Returns:
          float32 []: above 0 if any worker asked to stop when the fragment departed.
        """
        replica = step.replica
        has_averages = tf.cond(
            self.is_awaited[replica], functools.partial(self._await, step), lambda: tf.constant(True)
        )
        with tf.control_dependencies([has_averages]):
            stops = self.numbers[replica].read_value()[1]
            averages = [copies[replica].read_value() for copies in self._copies]
            totals = [outer.averages(replica) for outer in self.outer]
        for statistic, value in zip(self.statistics, averages, strict=True):
            own = statistic.values[replica]
            own.assign(merged(own.read_value(), value))
        for outer, changes in zip(self.outer, totals, strict=True):
            outer.apply_late(step, changes)
        self.travels[replica].assign(False)
        self.is_awaited[replica].assign(False)
        return stops

    def _await(self, step: Step) -> tf.Tensor:
        if self._background is None:
            return self.exchange(step)
        with tf.control_dependencies([tf.numpy_function(self._begin_wait, [], tf.bool)]):
            # An operation without a thread of its own, since the exchange may need all threads of TensorFlow.
            has_succeeded = tf.raw_ops.QueueDequeueV2(handle=self._done.queue_ref, component_types=[tf.bool])[0]
        return tf.cond(has_succeeded, lambda: tf.constant(True), self._fail)

    def _begin_wait(self) -> bool:
        self.times.begin_wait()
        return True

    def _fail(self) -> tf.Tensor:
        extended = self._strategy.extended
        handle = extended._cross_device_ops.untouched(0).handle
        token = tf.raw_ops.Reshape(tensor=handle, shape=tf.constant([], tf.int32))
        with tf.control_dependencies([raise_if_aborted(extended._id_in_cluster, token)]):
            return tf.numpy_function(self._raise, [], tf.bool)

    def _raise(self) -> bool:
        assert self._error is not None
        raise self._error

    def _function(self) -> Callable[[], Any]:
        """Returns a function that exchanges what travels, for the present outer updates and statistics."""
        present = len(self.outer), len(self.statistics)
        if present not in self._functions:
            self._functions[present] = apart(self._traced)
        return self._functions[present]

    def _traced(self) -> Callable[[], Any]:
        on_replica = tf.autograph.experimental.do_not_convert(lambda: self.exchange(cast(Step, current_step())))

        def on_all():
            return tf.distribute.Strategy.run(self._strategy, on_replica)

        return tf.function(on_all, autograph=False).get_concrete_function()

    def _start(self, function: Callable[[], Any]) -> bool:
        assert self._background is not None
        self.times.depart()
        self._background.start(functools.partial(self._run, function))
        return True

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:  # On any error, which the step of the arrival raises.
            self._error = error
        self.times.end()
        with tf.device("CPU:0"):
            self._done.enqueue(self._error is None)

    def await_averages(self) -> None:
        """Awaits an exchange in the background, outside of a step. Steps then do not await it."""
        if self._background is None or not self.is_awaited[0].numpy():
            return
        if not self._done.dequeue():
            self._raise()
        self.is_awaited[0].assign(False)

    def continue_travelling(self) -> None:
        """Starts the exchange of a fragment that was restored on its way, without averages."""
        if self._background is not None and self.is_awaited[0].numpy():
            self._start(self._function())


def _copies(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Makes a variable for the value of each variable, on the same device."""
    made = []
    for variable in variables:
        with tf.device(variable.device):
            made.append(tf.Variable(variable.read_value(), trainable=False))
    return made
