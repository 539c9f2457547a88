"""Reports of training steps, the same on all workers: rows and times of every replica, and requests to stop.

A report travels in the exchange of statistics and logs that a step makes anyway. Times are read in the graph:

    data here ── BEGIN ─ forward ─ LOSS ──┐            ┌─ GRADIENTS ── exchange, update, logs ── END
                 rows to all ──── SHARE ──┴─ backward ─┘

A replica waits for other replicas between LOSS and SHARE, and after GRADIENTS. The rest from BEGIN on is its own
computation. From END to the next BEGIN its process runs callbacks and reads data, and other replicas wait for that too.
"""

import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.errors import ClusterError
from tfdist.events import recorder
from tfdist.events.event_buffer import EVENTS
from tfdist.events.phase_names import COMPUTE, EXCHANGE, INPUT, OWN_LOOP, TRACING
from tfdist.events.phase_times import TIMES
from tfdist.faults.activity import TRAIN, Activity, Doing, Execution
from tfdist.faults.straggler_policy import WorkerLinks
from tfdist.faults.straggler_watch import StragglerWatch
from tfdist.readable_numbers import counted
from tfdist.strategies.ahead_clock import AheadClock
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.gradient_norms import MEASURES
from tfdist.strategies.not_finite import FINITE, in_words
from tfdist.strategies.row_comparison import RowsRead
from tfdist.strategies.step_clock import AGREES, ASKED, END, EVALUATED, TESTED, Clock, in_order
from tfdist.strategies.step_phases import StepMoments, StepPhases, divide

_NAMED = 4  # Largest number of replicas that a warning names.
_READ = 3  # Numbers about the input of a worker: the pass, a checksum, and the learning rate.
_LINK_NUMBERS = 4  # Numbers about a worker's links: receiver of the slowest, its rate, rate of the others, its seconds.
_OF_WORKERS = _READ + _LINK_NUMBERS + 1  # With the time outside of steps.
_OF_JOB = 2  # Numbers about the whole job, for several workers: time of the step on the chief, workers that traced.
_NO_LINK = -1  # In place of that receiver: no link is known to limit exchanges.
_NOTED = 64  # Largest number of replicas whose rows and times an event has.


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The report of one training step, bit for bit the same on all workers.

    A GPU with the only replica of a job has not computed the step when its report comes. All times in the report are
    then those of the step before, and 0 in the first step of a call.

    Attributes:
      number: Number of training steps since the strategy was made, including this one.
      rows: Rows of the global batch by replica, int64 [R].
      compute_seconds: Time from the arrival of data to the last gradient, without waits for replicas, float32 [R].
      own_seconds: `compute_seconds` plus, if known, the time from the end of the step before to arrival of the data,
        float32 [R]. Known if an optimizer exchanges gradients in each step, `steps_per_execution` is 1, and there was a
        step before and no evaluation since. Long after a pause, as between epochs.
      stop: Whether a worker asked to stop.
      input_seconds: Time in which each worker itself had no batch, float32 [workers]. Waits for the batches of others
        do not count, nor does Python between steps.
      links: The published links of each worker to its peers, by worker; empty for one worker.
      outside_seconds: Time from the end of the step before to the request for input, by worker, float32 [workers]. It
        passes in callbacks, other Python code, and evaluations. Empty for one worker. With `steps_per_execution` above
        1, it is 0 in most steps.
      cycle_seconds: Time from the last gradient of the step before to that of this one, on the chief. The same for all
        workers, apart from jitter, since they wait for each other. 0 in the first step, and for one worker.
      has_traced: Whether a worker has traced the step in Python.
      is_local: Whether the report is that of this worker alone, since replicas of several workers train by local steps.
        `rows` are then 0 for replicas of other workers, and times are those of this worker for all replicas. `stop` is
        the same on all workers.
      own_squares: Squared norm of the gradient that each replica has computed, weighted by its share, float32 [R];
        `None` if the strategy does not measure it.
      sum_square: Squared norm of the sum of these gradients, before it is clipped; 0 if it is not measured.
    """

    number: int
    rows: np.ndarray
    compute_seconds: np.ndarray
    own_seconds: np.ndarray
    stop: bool
    input_seconds: np.ndarray
    links: Sequence[WorkerLinks | None] = ()
    outside_seconds: Sequence[float] | np.ndarray = ()
    cycle_seconds: float = 0.0
    has_traced: bool = False
    is_local: bool = False
    own_squares: np.ndarray | None = None
    sum_square: float = 0.0


class StepReports:
    """Makes and delivers reports of training steps, as `strategy.reports`. Steps of Keras report, custom loops do not.

    Costs a few timestamps and one callback into Python a step, and 5 R + 1 numbers in an exchange for R replicas, or
    13 R + 3 for several workers. A step that XLA compiles for a single replica reports nothing.

    Attributes:
      listeners: Functions that take each `StepReport` on every worker, in the order of the steps, before the step ends.
        They run in a thread of TensorFlow. An exception in a listener ends the step.
      feeders: By model, the function that takes each report of its steps before the listeners do. The dataset that the
        model trains on provides the function if it needs reports.
      latest: The newest report, `None` before the first step.
      num_replicas: Number of replicas, R.
      asked_here: Whether this process has called `ask_to_stop`.
      activity: Records of the work of this worker in Keras' calls; see `Activity`.
      tells: Whether the training steps that were traced last report at all. Steps that XLA compiles, and a user's own
        train function, do not report.
      measured: Models whose steps measure the norms of gradients. Add a model before its step is traced.
      rows_read: Checksum of the rows that this worker trains on; `None` in a cluster of one worker.
      stragglers: Looks for slow workers in the reports; `None` in a cluster of one worker.
      are_local: Whether workers exchange no reports, see `StepReport.is_local`.
      place: The numbers of this worker's replicas in the job, and the number of all replicas of the job, if TensorFlow
        knows only those of this worker; else `None`.
    """

    def __init__(self, devices: Sequence[str], num_replicas: int):
        self.listeners: list[Callable[[StepReport], None]] = []
        self.feeders: weakref.WeakKeyDictionary[Any, Callable[[StepReport], None]] = weakref.WeakKeyDictionary()
        self.activity = Activity()
        self.is_reading = False
        self._ends: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
        self.latest: StepReport | None = None
        self._trained: weakref.ref[Any] | None = None
        self.num_replicas = num_replicas
        self.asked_here = False
        self._published = [0.0] * _LINK_NUMBERS
        self._has_traced = False
        self._moments = np.zeros(0)  # Times of the clock of this worker's first replica in the newest step.
        self._phases: StepPhases | None = None  # Phases of the newest step, while its report is delivered.
        self.tells = True
        self.are_local = False
        self.place: tuple[range, int] | None = None
        self.measured: weakref.WeakSet[Any] = weakref.WeakSet()
        self.rows_read: RowsRead | None = None
        self.stragglers: StragglerWatch | None = None
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()  # Models with a warning of Inf or NaN so far.
        with tf.device(host_of(devices[0])):
            self._stop = tf.Variable(0.0, trainable=False)
            self._agreed_stop = tf.Variable(0.0, trainable=False)
            self._links = tf.Variable(tf.zeros([_LINK_NUMBERS]), trainable=False)
            self._traced = tf.Variable(0.0, trainable=False)
        is_ahead = num_replicas == 1 and "GPU" in devices[0]
        self._clocks: list[Clock] = [AheadClock(devices[0])] if is_ahead else [Clock(device) for device in devices]
        recorder.begin()
        recorder.add_state(self._state)

    def feed(self, models: Sequence[Any], feeder: Callable[[StepReport], None] | None) -> None:
        """Sets the function that takes the reports of the innermost running `fit` from now on.

        Args:
          models: Models with a running `fit`, innermost first.
          feeder: Function that takes the reports; `None` for no function.

        Raises:
          ValueError: If the `fit` runs within a `fit` of the same model, and that waits for its own reports.
        """
        if not models:
            return
        model = models[0]
        if any(outer is model for outer in models[1:]) and model in self.feeders:
            raise ValueError(
                f"A fit on a BalancedSharding must end before the model's next fit begins, but a fit of model "
                f"{model.name!r} was called within its own fit. Call the inner fit with another model, or after the "
                "outer fit."
            )
        self.feeders.pop(model, None)
        if feeder is not None:
            self.feeders[model] = feeder

    def ask_to_stop(self) -> None:
        """Sets `stop` in the report of an upcoming step, the same step on all workers. Callable in any thread."""
        self.asked_here = True
        self._stop.assign(1.0)

    def asks_to_stop(self) -> tf.Tensor:
        """Returns whether this worker asks all workers to stop, float32 []: above 0 if it does."""
        return self._stop.read_value()

    def note_agreed(self, stops: bool) -> None:
        """Notes whether, at a synchronization outside of steps, a worker has asked to stop: the next report says so."""
        if stops:
            self._agreed_stop.assign(1.0)

    def agreed(self, report: tf.Tensor, stops: tf.Tensor) -> tf.Tensor:
        """Returns a local report with the requests to stop that all workers know, instead of those of this worker.

        Args:
          report: The report of a step.
          stops: float32 []: above 0 if a worker has asked to stop at a synchronization of this step.
        """
        if not self.are_local:
            return report
        return tf.concat([report[:-1], [tf.maximum(self._agreed_stop.read_value(), stops)]], axis=0)

    def publish_links(self, slowest: WorkerLinks | None) -> None:
        """Lets the next reports tell all workers about the links of this worker. Costs an assignment if it is known."""
        numbers = [0.0] * _LINK_NUMBERS
        if slowest is not None:
            peer = _NO_LINK if slowest.peer is None else slowest.peer
            numbers = [peer, slowest.rate, slowest.typical, slowest.seconds]
        if numbers != self._published:
            self._published = numbers
            with tf.device(self._clocks[0].host):  # A copy by way of a GPU would wait for the step.
                # A quarter of the time of `assign`.
                tf.raw_ops.AssignVariableOp(resource=self._links.handle, value=np.array(numbers, np.float32))

    def doing(self) -> Doing:
        """Returns what this worker does now, for the watchdog. Callable in any thread. Costs a read of a variable."""
        activity, call = self.activity, self.activity.call
        if call is None:
            return Doing(None, 0, activity.begun, None, False, False, None)
        execution, phase = call.execution, call.phase
        if execution is not None:
            phase = self.part_of(execution)
        in_step = execution is not None and execution.kind == TRAIN
        is_first = not (in_step and call.steps)
        progress = call.number, call.executions, call.steps, self.number, self.evaluated
        return Doing(call.name, call.number, activity.begun, phase, in_step, is_first, progress)

    def _state(self) -> dict[str, Any]:
        """Returns what this worker does now, for the file with its events."""
        doing = self.doing()
        if doing.call is None:
            return {"phase": OWN_LOOP} if self.activity.has_loop else {}
        names = ("call", "number", "phase", "in_step")
        return {name: getattr(doing, name) for name in names}

    def part_of(self, execution: Execution) -> str:
        """Returns the present part of a running step function: tracing, waiting for input, computing or exchanging."""
        times = self._clocks[0].read()
        asked, agrees, evaluated, tested = (times[place] for place in (ASKED, AGREES, EVALUATED, TESTED))
        begin, loss, share, gradients, end = times[: END + 1]
        begun = max(asked, begin, evaluated)
        has_traced = execution.traced_at is not None and begun < execution.traced_at
        if execution.is_tracing or (has_traced and (execution.is_marked or not execution.reads)):
            return TRACING  # After the trace in Python, TensorFlow optimizes the graph.
        if self._clocks[0].is_computing:
            return COMPUTE
        if execution.kind == TRAIN and begin >= execution.since and begin > end:
            waits = self.num_replicas > 1 and (gradients >= begin or loss >= begin > share)
            return EXCHANGE if waits else COMPUTE
        if execution.kind == TRAIN and execution.is_single and begin >= execution.since:
            # Other exchanges of the step, as of new weights, may end after that of its report.
            return EXCHANGE if self.num_replicas > 1 else COMPUTE
        if execution.kind != TRAIN and evaluated >= max(execution.since, asked):
            return EXCHANGE if tested >= evaluated else COMPUTE
        return EXCHANGE if agrees >= max(execution.since, asked, end) else INPUT

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Records for the watchdog that the code inside reads a batch from an iterator, in Python or a traced graph."""
        before, self.is_reading = self.is_reading, True
        call, is_eager = self.activity.call, tf.executing_eagerly()
        try:
            if is_eager and call is not None and call.execution is None:
                with self.activity.doing(INPUT):
                    yield
                return
            if is_eager and call is None:
                with self.activity.outside_calls(INPUT):
                    yield
                return
            if not is_eager:
                self.activity.mark()
            self._clocks[0].mark(ASKED)
            yield
        finally:
            self.is_reading = before

    def agrees(self, own: tf.Tensor) -> None:
        """Records for the watchdog, while an iterator is read, that workers exchange whether any has data left.

        Args:
          own: Number that tells whether this worker has data left.
        """
        call = self.activity.call
        if not tf.executing_eagerly() or (call is not None and call.execution is not None):
            self._clocks[0].mark(AGREES, own)
        elif call is None and TIMES.is_on:
            TIMES.switch(EXCHANGE)  # Until the reading ends.

    @property
    def number(self) -> int:
        """The number of finished training steps."""
        return self.latest.number if self.latest else 0

    @property
    def has_stopped(self) -> bool:
        """Whether `stop_training` is set on this worker for the model that was trained last."""
        return bool(getattr(self._trained and self._trained(), "stop_training", False))

    @property
    def evaluated(self) -> float:
        """Time at which the newest batch of an evaluation arrived, in seconds since the epoch; 0 before the first."""
        return float(self._clocks[0].read()[EVALUATED])

    def phases(self) -> StepPhases:
        """Returns how this worker's first replica spent the time since the end of the step before.

        On a GPU with the only replica of a job, these are the phases of the step before; see `StepReport`.

        Only a listener may call it, for the step whose report it takes.
        """
        if self._phases is None:
            times = self._moments.tolist()
            begin, loss, share, gradients, ended_before = times[: END + 1]
            self._phases = divide(
                StepMoments(ended_before, times[ASKED], times[AGREES], begin, loss, share, gradients, time.time())
            )
        return self._phases

    def clock(self, local: int) -> Clock:
        """Returns the clock, which times the steps, of this worker's replica number `local`."""
        return self._clocks[local]

    def of_replica(
        self,
        clock: Clock,
        replica: Any,
        rows: Any,
        tells_before: bool = False,
        not_finite: Any = FINITE,
        learning_rate: Any = 0,
        norms: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Returns one replica's part of a step's report, a vector of float32. The sum over all replicas is the report.

        Args:
          clock: Clock of the replica.
          replica: Number of the replica among all replicas.
          rows: Rows that the replica holds.
          tells_before: Whether the replica waits for no other replica between steps.
          not_finite: Number that tells which of its losses and gradients are not finite, see `not_finite.told`.
          learning_rate: Learning rate of the step on this worker; 0 if the model has no optimizer.
          norms: The numbers of `GradientNorms.of_replica`, if the step measures them.
        """
        place = tf.one_hot(replica, self.num_replicas)
        rows = tf.cast(0 if rows is None else rows, tf.float32)
        compute = clock.compute_seconds()
        own = compute + clock.seconds_before() if tells_before else compute
        is_first = clock is self._clocks[0]  # The first replica of a worker reports for the worker.
        waited = clock.input_seconds() if is_first else 0.0
        said, of_job = [rows, compute, own, waited, tf.cast(not_finite, tf.float32)], []
        if self.rows_read is not None:
            said += tf.unstack(tf.convert_to_tensor(self.rows_read.numbers if is_first else tf.zeros([2])))
            said.append(tf.cast(learning_rate if is_first else 0, tf.float32))
            said += tf.unstack(self._links.read_value() if is_first else tf.zeros([_LINK_NUMBERS]))
            said.append(clock.outside_seconds() if is_first else 0.0)
            of_job = [place[0] * clock.cycle_seconds() if is_first else 0.0, self._traced]
            if is_first and not tf.executing_eagerly():
                self._tell_of_trace(True)
        said += norms
        return tf.concat([*(place * each for each in said), [*of_job, self._stop]], axis=0)

    def _tell_of_trace(self, has_traced: bool) -> None:
        """Lets the next report tell all workers whether this worker has traced its step."""
        if has_traced != self._has_traced:
            self._has_traced = has_traced
            with tf.init_scope():
                self._traced.assign(float(has_traced))

    def tell(self, local: int, totals: tf.Tensor, model: Any) -> None:
        """Ends a step of a replica. A worker's first replica also passes the report (`totals`) to listeners."""
        if local:
            self._clocks[local].mark(END, totals[-1])
            return
        if model not in self._ends:  # Eager steps reuse the function.
            self._ends[model] = in_order(functools.partial(self._take, weakref.ref(model)))
        self._clocks[0].end(self._ends[model], totals)

    def _take(self, model: weakref.ref, totals: np.ndarray, moments: np.ndarray) -> None:
        trained = model()
        clock = self._clocks[0]
        self._trained, self._moments = model, moments
        call = self.activity.call
        self._phases = before = clock.phases_before(moments, -1 if call is None else call.number)
        self._count_phases()
        self.activity.stepped()
        self._tell_of_trace(False)
        self.latest, not_finite, read = self._divided(totals)
        if before is not None:
            compute, waited = np.array([[before.compute], [before.input]], np.float32)
            times = {"compute_seconds": compute, "own_seconds": compute, "input_seconds": waited}
            self.latest = dataclasses.replace(self.latest, **times)
        EVENTS.count(self.number)
        if self.num_replicas <= _NOTED:
            times = {"compute_seconds": self.latest.compute_seconds, "own_seconds": self.latest.own_seconds}
            EVENTS.note("step", rows=self.latest.rows, **times)
        else:
            EVENTS.note("step")
        if self.rows_read is not None and not self.are_local:
            *rows_read, learning_rates = read
            self.rows_read.check(trained, self.latest.rows, *rows_read)
            self._check_learning_rates(learning_rates[:: len(self._clocks)])
        if self.stragglers is not None and not self.are_local:
            self.stragglers.add(self.latest, is_measured=trained is not None and trained in self.feeders)
        if not_finite.any() and trained is not None and trained not in self._told:
            self._told.add(trained)
            self._warn_of(not_finite, trained.name)
        feeder = None if trained is None else self.feeders.get(trained)
        if feeder is not None:
            feeder(self.latest)
        for listener in list(self.listeners):  # A copy: a listener that is freed meanwhile removes itself.
            listener(self.latest)

    def pass_over(self, model: Any, rows: Sequence[int]) -> None:
        """Tells the data of a model that a batch with these rows, by replica of this worker, was read and skipped."""
        feeder, latest = self.feeders.get(model), self.latest
        if feeder is not None and latest is not None and self.place is not None:
            own, replicas = self.place
            of_job = np.zeros(replicas, np.int64)
            of_job[own.start : own.stop] = rows
            feeder(dataclasses.replace(latest, rows=of_job))

    def _count_phases(self) -> None:
        if TIMES.is_on:
            phases = self.phases()
            TIMES.stepped({INPUT: phases.input, COMPUTE: phases.compute, EXCHANGE: phases.exchange})

    def _divided(self, totals: np.ndarray) -> tuple[StepReport, np.ndarray, Sequence[np.ndarray]]:
        """Returns the report, which values are not finite, and what workers have read, from the sum of all parts."""
        *of_job, stops = totals[-1 - _OF_JOB :] if self.rows_read is not None else totals[-1:]
        parts = np.split(totals[: -1 - len(of_job)], (len(totals) - 1 - len(of_job)) // self.num_replicas)
        rows, compute, own, waited, not_finite, *of_workers = parts
        norms = None
        if len(of_workers) in (MEASURES, _OF_WORKERS + MEASURES):
            norms = of_workers[-MEASURES:]
            of_workers = of_workers[:-MEASURES]
        read, links, outside = of_workers[:_READ], of_workers[_READ : _READ + _LINK_NUMBERS], of_workers[-1:]
        first = slice(None, None, len(self._clocks))  # The first replica of each worker reports for the worker.
        numbers = zip(*(each[first].tolist() for each in links), strict=True)
        cycle, traced = of_job or (0.0, 0.0)
        report = StepReport(
            number=self.number + 1,
            rows=np.rint(rows).astype(np.int64),
            compute_seconds=compute,
            own_seconds=own,
            stop=bool(stops > 0),
            input_seconds=waited[first],
            links=tuple(_link_speed(*each) for each in numbers),
            outside_seconds=outside[0][first] if outside else (),
            cycle_seconds=float(cycle),
            has_traced=bool(traced > 0),
            own_squares=None if norms is None else norms[0],
            sum_square=0.0 if norms is None else float(norms[1].sum(dtype=np.float64)),
        )
        if self.are_local:
            report = _of_one_worker(report)
        if self.place is not None:
            report = dataclasses.replace(report, **_in_job(report, *self.place))
        return report, np.rint(not_finite).astype(np.int64), read

    def _check_learning_rates(self, of_workers: np.ndarray) -> None:
        """Refuses different learning rates on workers, since their replicas would drift apart."""
        unlike = np.flatnonzero(of_workers != of_workers[0])
        if len(unlike) and np.isfinite(of_workers).all():  # NaN differs from itself.
            raise ClusterError(
                f"All workers must train with the same learning rate, but in training step {self.number} worker 0 has "
                f"{of_workers[0]:g}, worker {unlike[0]} has {of_workers[unlike[0]]:g}. Let code that sets it, such as "
                "a callback, compute the same value on all workers, for example from the logs of an epoch."
            )

    def _warn_of(self, not_finite: np.ndarray, model: str) -> None:
        places = np.flatnonzero(not_finite)
        local = len(self._clocks)
        has_workers = local < self.num_replicas
        named = [
            f"{in_words(int(not_finite[place]))} of replica {place}{f' (worker {place // local})' * has_workers}"
            for place in places[:_NAMED]
        ]
        others = f" and {counted(len(places) - _NAMED, 'other replica')}" if len(places) > _NAMED else ""
        logging.warning(
            "In training step %d model %r got an Inf or NaN: %s%s. Gradients are summed over all replicas, so the "
            "weights of all may hold Inf or NaN from this step on. Look for such values in the rows of the replica; if "
            "there are none, lower the learning rate or clip gradients. This warning appears once for each model.",
            *(self.number, model, ", ".join(named), others),
        )


def _of_one_worker(report: StepReport) -> StepReport:
    """Returns a report of which one worker has made all, with its own times in place of those of others."""
    names = ("compute_seconds", "own_seconds", "input_seconds", "outside_seconds")
    alike = {name: np.full_like(own, np.max(own)) for name in names if len(own := getattr(report, name))}
    return dataclasses.replace(report, **alike, links=(), cycle_seconds=0.0, has_traced=False, is_local=True)


def _in_job(report: StepReport, own: range, replicas: int) -> dict[str, Any]:
    """Returns the rows and times of a report of one worker, by replica of the whole job."""
    rows = np.zeros(replicas, np.int64)
    rows[own.start : own.stop] = report.rows
    times = {name: np.full(replicas, np.max(getattr(report, name))) for name in ("compute_seconds", "own_seconds")}
    return {"rows": rows, **times}


def _link_speed(peer: float, rate: float, typical: float, seconds: float) -> WorkerLinks | None:
    """Returns the links that a worker has published, from the sum of all reports."""
    receiver = round(peer)  # A sum of float32 may be a little less than the number.
    return WorkerLinks(None if receiver == _NO_LINK else receiver, rate, typical, seconds) if typical else None
