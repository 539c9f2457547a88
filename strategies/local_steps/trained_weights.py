"""The weights that a model trains by local steps, when they are due for a synchronization, and how they synchronize."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.local_steps.averaging import average, share_of, times_share
from tfdist.strategies.local_steps.background_exchanges import BackgroundExchanges
from tfdist.strategies.local_steps.fragments import check_suffice, deal_out, has_arrived, is_due
from tfdist.strategies.local_steps.outer_update import OuterUpdate
from tfdist.strategies.local_steps.own_thread import apart
from tfdist.strategies.local_steps.synchronization import DiLoCo, Synchronization
from tfdist.strategies.local_steps.travelling_fragment import TravellingFragment
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.step import Step, current_step, replicas

_SUM = tf.distribute.ReduceOp.SUM


class TrainedWeights:
    """The weights that one model, or one loop of the user, trains by local steps.

    Each replica counts its steps, and the rows it has trained on since the last synchronization. All replicas take
    equally many steps, so all synchronize after the same step without asking each other.

    Args:
      synchronization: How often to synchronize, and how.
      strategy: The strategy.
      background: Runs exchanges beside steps; `None` if all run in steps.

    Attributes:
      taken: Number of all steps, int64 [], by replica of this worker.
      period: Number of steps since all fragments were synchronized together, int64 [], likewise.
      steps: Number of steps since the last synchronization of each fragment, int64 [fragments], likewise.
      rows: Rows that the replica has trained on since then, int64 [fragments], likewise.
      weights: The trainable weights, as Keras variables, in the order in which steps first updated them.
      statistics: Other weights that steps assign, such as those of BatchNormalization.
      outer: The outer updates of DiLoCo, for the weights of each optimizer and fragment; empty for LocalSGD.
      travelling: The changes of each fragment on their way, with the `overlap_steps` of DiLoCo; else empty.
    """

    def __init__(self, synchronization: Synchronization, strategy: Any, background: BackgroundExchanges | None = None):
        self._every = synchronization.every
        self._start_step = synchronization.start_step
        self._diloco = synchronization if isinstance(synchronization, DiLoCo) else None
        self._fragments = 1 if self._diloco is None else self._diloco.fragments
        self._overlap_steps = 0 if self._diloco is None else self._diloco.overlap_steps
        self._strategy = strategy
        self.weights: list[Any] = []
        self.statistics: list[Any] = []
        self.outer: list[OuterUpdate] = []
        travelling = range(self._fragments if self._overlap_steps else 0)
        self.travelling = [TravellingFragment(strategy, background) for _ in travelling]
        self._functions: dict[tuple[int, int, bool], Callable[..., Any]] = {}
        devices = strategy.extended.worker_devices
        self.taken, self.period = apart(lambda: [_counters(devices, []) for _ in range(2)])
        self.steps, self.rows = apart(lambda: [_counters(devices, [self._fragments]) for _ in range(2)])

    def include(self, weights: Sequence[Any]) -> None:
        """Adds the weights that an optimizer is about to update, if they are new."""
        known = {id(each.value) for each in self.weights}
        new = [each for each in weights if id(each.value) not in known]
        self.weights += new
        if new and self._diloco is not None:
            check_suffice(len(new), self._fragments)
            dealt = deal_out([each.shape.num_elements() for each in (weight.value for weight in new)], self._fragments)
            for fragment, places in enumerate(dealt):
                own = [new[place] for place in places]
                made = apart(functools.partial(OuterUpdate, self._diloco, own, fragment, self._strategy))
                self.outer.append(made)
                if self.travelling:
                    self.travelling[fragment].outer.append(made)

    def begin_update(self, step: Step) -> None:
        """Keeps a copy of the weights, before the first update of an optimizer since the last synchronization."""
        for outer in self.outer:
            outer.begin(step.replica)

    def averaged_at_first(self, step: Step, gradients: list[Any]) -> list[Any]:
        """Returns gradients averaged over replicas in the first `start_step` steps, and unchanged later."""
        if not self._start_step:
            return gradients
        kept = [tf.nest.flatten(gradient, expand_composites=True) for gradient in gradients]

        def averaged():
            share = 1 / replicas() if step.model is None else _share(step, step.rows)
            weighted = [times_share(gradient, share) for gradient in gradients]
            totals = _reduced(step, weighted)
            return [tf.nest.flatten(total, expand_composites=True) for total in totals]

        chosen = tf.cond(self.taken[step.replica] < self._start_step, averaged, lambda: kept)
        return [
            tf.nest.pack_sequence_as(gradient, leaves, expand_composites=True)
            for gradient, leaves in zip(gradients, chosen, strict=True)
        ]

    def end_step(self, step: Step, asks_to_stop: Any) -> tf.Tensor:
        """Ends a step of a replica, and synchronizes if it is due.

        Args:
          step: The step, after all its updates.
          asks_to_stop: float32 []: above 0 if this replica's worker asks all workers to stop.

        Returns:
          float32 []: above 0 if any worker has asked to stop by this synchronization; 0 without one.
        """
        self.include_statistics(step.observed.statistics)
        replica, rows = step.replica, tf.cast(1 if step.rows is None else step.rows, tf.int64)
        self.rows[replica].assign_add(tf.fill([self._fragments], rows))
        self.steps[replica].assign_add(tf.ones([self._fragments], tf.int64))
        is_first = tf.convert_to_tensor(self.taken[replica].assign_add(1)) <= self._start_step
        taken = tf.convert_to_tensor(self.period[replica].assign_add(1))
        stops = self._arrivals(step, taken)
        begin = self._depart if self.travelling else self._synchronize
        for fragment in range(self._fragments):
            synchronize = functools.partial(begin, step, fragment, asks_to_stop)
            due = is_due(taken, fragment, self._fragments, self._every)
            if self._start_step:
                due &= ~is_first
            stops = tf.maximum(stops, tf.cond(due, synchronize, lambda: tf.zeros([])))
        if self._start_step:
            synchronize = functools.partial(self._synchronize_at_first, step, asks_to_stop)
            due = is_first & is_due(taken, 0, self._fragments, self._every)
            stops = tf.maximum(stops, tf.cond(due, synchronize, lambda: tf.zeros([])))
            for outer in self.outer:
                outer.begin_anew(replica, is_first)
        return stops

    def _arrivals(self, step: Step, taken: Any = None) -> tf.Tensor:
        """Applies fragments that arrive after `taken` steps; without `taken`, all that travel. See `end_step`."""
        stops = tf.zeros([])
        for fragment, travelling in enumerate(self.travelling):
            arrives = travelling.travels[step.replica].read_value()
            if taken is not None:
                arrives &= has_arrived(taken, fragment, self._fragments, self._every, self._overlap_steps)
            arrive = functools.partial(travelling.arrive, step)
            stops = tf.maximum(stops, tf.cond(arrives, arrive, lambda: tf.zeros([])))
        return stops

    def _depart(self, step: Step, fragment: int, asks_to_stop: Any) -> tf.Tensor:
        """Lets a fragment depart. It counts steps and rows anew."""
        rows = self.rows[step.replica][fragment]
        departed = self.travelling[fragment].depart(step, rows, asks_to_stop)
        self._count_anew(step.replica, fragment)
        with tf.control_dependencies([departed]):
            return tf.zeros([])

    def include_statistics(self, statistics: Sequence[Any]) -> None:
        """Adds variables that a step assigns without an optimizer, if they are new; TensorFlow's variables."""
        known = {id(each) for each in (*self.statistics, *(weight.value for weight in self.weights))}
        new = [each for each in statistics if id(each) not in known]
        self.statistics += new
        if new and self.travelling:
            self.travelling[0].include_statistics(new)

    def synchronize(self, step: Step, asks_to_stop: Any, is_first: bool) -> tf.Tensor:
        """Makes the weights of all replicas equal; see `end_step`. All replicas must call it in the same step.

        First it applies what travels. `is_first` says whether replicas have only taken steps that average gradients.
        """
        stops = self._synchronize_at_first(step, asks_to_stop) if is_first else self._arrivals(step)
        for fragment in range(0 if is_first else self._fragments):
            stops = tf.maximum(stops, self._synchronize(step, fragment, asks_to_stop))
        self.period[step.replica].assign(0)
        return stops

    def _synchronize_at_first(self, step: Step, asks_to_stop: Any) -> tf.Tensor:
        """Averages the statistics only, since the weights are equal on all replicas."""
        replica = step.replica
        share, stop = self._agree(step, self.rows[replica][0], asks_to_stop)
        average(step, [each.values[replica] for each in self.statistics], share, _reducer())
        for counter in (self.steps, self.rows):
            counter[replica].assign(tf.zeros_like(counter[replica]))
        return stop

    def _agree(self, step: Step, rows: Any, asks_to_stop: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the part of all rows that this replica has, and above 0 if any worker asks to stop."""
        own = tf.cast(rows, tf.float32)
        total, stop = tf.unstack(step.all_reduce(_SUM, tf.stack([own, tf.cast(asks_to_stop, tf.float32)])))
        return share_of(own, total), stop

    def _synchronize(self, step: Step, fragment: int, asks_to_stop: Any) -> tf.Tensor:
        """Synchronizes the weights of a fragment, and with the first fragment also the statistics.

        Costs an exchange of two numbers, then one of the weights, and with DiLoCo another one of statistics.
        """
        replica = step.replica
        share, stop = self._agree(step, self.rows[replica][fragment], asks_to_stop)
        averaged = [each.values[replica] for each in self.statistics] if fragment == 0 else []
        if self._diloco is None:
            averaged = [each.value.values[replica] for each in self.weights] + averaged
        average(step, averaged, share, _reducer())
        for outer in self.outer:
            if outer.fragment == fragment:
                outer.apply(step, share)
        self._count_anew(replica, fragment)
        return stop

    def _count_anew(self, replica: int, fragment: int) -> None:
        others = 1 - tf.one_hot(fragment, self._fragments, dtype=tf.int64)
        for counter in (self.steps, self.rows):
            counter[replica].assign(counter[replica] * others)

    def state(self) -> dict[str, tf.Variable]:
        """Returns the variables of this worker's replicas beside the weights, by names that are equal in each run."""
        counters = {"steps": self.steps, "rows": self.rows, "period": self.period, "taken": self.taken}
        named = {f"{name}@{i}": each for name, of_each in counters.items() for i, each in enumerate(of_each)}
        for place, outer in enumerate(self.outer):
            named |= {f"outer/{place}/{name}": variable for name, variable in outer.state().items()}
        for fragment, travelling in enumerate(self.travelling):
            named |= {f"fragment/{fragment}/{name}": variable for name, variable in travelling.state().items()}
        return named

    def await_averages(self) -> None:
        """Awaits the exchanges in the background, so that no variable changes until the next step."""
        for travelling in self.travelling:
            travelling.await_averages()

    def continue_travelling(self) -> None:
        """Starts the exchanges of fragments that were restored on their way."""
        for travelling in self.travelling:
            travelling.continue_travelling()

    @property
    def has_stepped(self) -> bool:
        """Whether replicas have trained since the last synchronization. Equal on all workers."""
        return bool(np.any(self.steps[0].numpy())) or any(bool(each.travels[0].numpy()) for each in self.travelling)

    def synchronize_outside(self, run: Callable[..., Any], asks_to_stop: Any) -> bool:
        """Makes the weights of all replicas equal, outside of a step. All workers must call it.

        Args:
          run: The `run` of TensorFlow's strategy.
          asks_to_stop: float32 []: above 0 if this worker asks all workers to stop.

        Returns:
          Whether any worker has asked to stop.
        """
        self.await_averages()
        is_first = int(self.taken[0].numpy()) <= self._start_step
        present = len(self.weights), len(self.statistics), is_first
        if present not in self._functions:  # A step that was traced later has more weights.
            self._functions[present] = tf.function(functools.partial(self._on_all, run, is_first), autograph=False)
        return bool(self._functions[present](asks_to_stop) > 0)

    def _on_all(self, run, is_first, asks_to_stop):
        def on_replica():
            return self.synchronize(current_step(), asks_to_stop, is_first)

        stops = run(tf.autograph.experimental.do_not_convert(on_replica))
        return self._strategy.experimental_local_results(stops)[0]


def _counters(devices: Sequence[str], shape: Sequence[int]) -> list[tf.Variable]:
    made = []
    for device in devices:
        with tf.device(host_of(device)):
            made.append(tf.Variable(tf.zeros(shape, tf.int64), trainable=False))
    return made


def _share(step: Step, rows: Any) -> tf.Tensor:
    """Returns the part of all rows that this replica has, float32 []. Costs an exchange of one number."""
    own = tf.cast(1 if rows is None else rows, tf.float32)
    return tf.math.divide_no_nan(own, step.all_reduce(_SUM, own))


def _reducer() -> Any:
    return tf.distribute.get_strategy().extended.reducer


def _reduced(step: Step, values: list[Any]) -> list[Any]:
    return _reducer().reduce(ReductionRequest(_SUM, values), step)
