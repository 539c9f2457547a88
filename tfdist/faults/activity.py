"""Records what this worker does now in `fit`, `evaluate` or another call of Keras, so that the watchdog detects stalls.

    fit ── "building" ── "callback" ─┬─ a step ── "callback" ─┬─ ... ── its end
                                     └─ "tracing", then "input", "compute", "exchange" by the clocks in the graph

The training thread writes the notes, and the watchdog's thread reads them. A note is one assignment, so no lock is
needed, and no thread inspects the frames of another thread.
"""

import collections
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._compat import keras_stack
from tfdist.events.event_buffer import EVENTS
from tfdist.events.phase_names import BUILDING, CALLBACK, EXCHANGE, OUTSIDE, OWN_LOOP, START, TRACING, VALIDATION
from tfdist.events.phase_times import STEP, TIMES

TRAIN = "train"
_TRAINING = ("fit", "train_on_batch", TRAIN)
_REMEMBERED = 1024  # The most step durations to keep for the watchdog.

_all: "weakref.WeakSet[Activity]" = weakref.WeakSet()


class Execution:
    """One call of the function with which Keras runs one or more steps in TensorFlow, as recorded for the watchdog.

    Attributes:
      kind: `TRAIN`, "test" or "predict".
      reads: Whether the function itself reads from an iterator.
      is_single: Whether it runs one step.
      since: Start of the execution, in seconds since the epoch.
      is_tracing: Whether Python traces the function now.
      traced_at: End of Python's tracing, in seconds since the epoch; `None` without tracing.
      is_marked: Whether the graph of the function notes its requests for input.
    """

    def __init__(self, kind: str, reads: bool, is_single: bool = False):
        self.kind, self.reads, self.is_single = kind, reads, is_single
        self.since = time.time()
        self.is_tracing = self.is_marked = False
        self.traced_at: float | None = None


class Call:
    """A call of Keras, such as `fit`, in which all workers take part, as recorded for the watchdog.

    Attributes:
      name: Name of the call, such as "fit".
      number: Position of the call among all such calls under the strategy, counted from 1.
      phase: Part of the call that runs outside of an execution, such as `BUILDING` or `CALLBACK`.
      execution: The current execution, `None` between executions.
      executions: Number of finished executions.
      steps: Number of finished training steps.
      fault: The error of the call, once one is known.
      at_end: Functions to call when the call has ended without an error, on all workers.
      is_over: Whether the call has finished. A failed call ends when the object that Keras keeps for it is deleted.
    """

    def __init__(self, name: str, number: int, lives: "weakref.ref[Any] | None"):
        self.name, self.number = name, number
        self.phase = BUILDING
        self.execution: Execution | None = None
        self.executions = self.steps = 0
        self.fault: str | None = None
        self.at_end: list[Callable[[], None]] = []
        self.is_over = False
        self.ended_step = 0.0
        self._lives = lives

    @property
    def is_under_way(self) -> bool:
        """Whether the call of Keras has neither finished nor failed, so that the watchdog must watch it."""
        return not self.is_over and (self._lives is None or self._lives() is not None)

    def is_of(self, epochs: Any) -> bool:
        """Returns whether `epochs` is the object that Keras keeps for this call, so that it is already recorded."""
        return self._lives is not None and self._lives() is epochs


class Doing(NamedTuple):
    """The work of a worker at one moment, as the watchdog reads it.

    Attributes:
      call: Name of the innermost call that is under way; `None` outside of calls.
      number: Number of that call.
      begun: How many calls this worker has begun.
      phase: The phase of that call; `None` outside of calls.
      in_step: Whether TensorFlow runs a training step.
      is_first: Whether input and computation may take long, as in the first step of a call and in an evaluation.
      progress: A value that changes whenever the worker makes progress.
    """

    call: str | None
    number: int
    begun: int
    phase: str | None
    in_step: bool
    is_first: bool
    progress: Any


class Activity:
    """Records for the watchdog which calls of Keras are under way under a strategy, the outermost first.

    Attributes:
      begun: How many calls have begun.
      has_loop: Whether the script has run a step on replicas by itself, outside of calls.
      step_seconds: For each finished training step of an outermost call, its duration and whether it was the first
        step of the call. The watchdog removes the entries that it has read.
      explain: Returns the error of a call after its collective has failed, if the reason is known.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.has_loop = False
        self.step_seconds: collections.deque[tuple[float, bool]] = collections.deque(maxlen=_REMEMBERED)
        self.explain: Callable[[Call, Exception], str | None] = lambda call, error: None
        self._calls: list[Call] = []
        _all.add(self)

    @property
    def call(self) -> Call | None:
        """The innermost call of Keras that is under way; `None` outside of calls."""
        return next((call for call in reversed(self._calls) if call.is_under_way), None)

    def begin(self, under_way: Sequence[keras_stack.KerasCall]) -> None:
        """Records for the watchdog that a call of Keras has begun, unless the call is already recorded.

        Args:
          under_way: All calls in this thread, innermost first.
        """
        if not under_way:
            return
        newest, call = under_way[0], self.call
        if call is None or not call.is_of(newest.epochs):
            call = self._new(newest.name, weakref.ref(newest.epochs))
            # An exception may keep the objects of a failed call alive. Calls outside of this thread's stack are over.
            outer = [each for each in self._calls if any(each.is_of(other.epochs) for other in under_way[1:])]
            self._calls = [*outer, call]
            self.count_time()

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Records for the watchdog what the innermost call of Keras does in the block; after the block, `CALLBACK`."""
        call, since = self.call, time.monotonic_ns()
        if call is not None:
            call.phase = phase
            self.count_time()
        try:
            yield
        finally:
            if call is not None:
                call.phase = CALLBACK
                self.count_time()
            EVENTS.note(phase, since=since)

    @contextlib.contextmanager
    def exchanging(self, name: str) -> Iterator[Call]:
        """Records for the watchdog that Python waits for all workers in the block, within a call of Keras or before it.

        Args:
          name: Name of the call, if it is not noted yet.
        """
        call, before, since = self.call, self._calls, time.monotonic_ns()
        if call is None:
            call = Call(name, self.begun + 1, None)
            self._calls = [call]
        phase, call.phase = call.phase, EXCHANGE
        self.count_time()
        try:
            yield call
        finally:
            call.phase, self._calls = phase, before
            self.count_time()
            EVENTS.note("wait", since=since, call=call.name)

    @contextlib.contextmanager
    def executing(self, kind: str, *, reads: bool, alone: str | None, is_single: bool = False) -> Iterator[Call]:
        """Records for the watchdog that the innermost call of Keras runs one or more steps in TensorFlow in the block.

        Args:
          kind: `TRAIN`, "test" or "predict".
          reads: Whether the function itself reads from an iterator.
          alone: Name of the call if it consists of this execution only.
          is_single: Whether it runs one step.
        """
        call = None if alone else self.call
        single = call is None
        if call is None:
            call = self._new(alone or kind, None)
            self._calls = [*self._calls, call]
        call.execution = Execution(kind, reads, is_single)
        self.count_time()
        call.ended_step = time.monotonic()
        since, ends, error = time.monotonic_ns(), single, None
        try:
            yield call
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The input has ended, not the call.
        except BaseException as raised:
            # A failed call is over, even if a stored exception keeps its objects alive.
            ends, error = True, type(raised).__name__
            raise
        finally:
            call.execution, call.phase = None, CALLBACK
            call.executions += 1
            EVENTS.note("run", since=since, call=call.name, function=kind, error=error)
            if ends:
                self._calls = [each for each in self._calls if each is not call]
            self.count_time()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Records for the watchdog that Python traces the current steps in the block, which may take long."""
        execution = self.call and self.call.execution
        if not execution:
            with self.outside_calls(TRACING):
                yield
            return
        # The exchanges beside steps are traced within a step.
        was_tracing, execution.is_tracing, since = execution.is_tracing, True, time.monotonic_ns()
        self.count_time()
        try:
            yield
        finally:
            execution.traced_at, execution.is_tracing = time.time(), was_tracing
            self.count_time()
            EVENTS.note(TRACING, since=since)

    def loops(self) -> None:
        """Records that the script runs a step by itself. From now on it is in a loop of its own, outside of calls."""
        if not self.has_loop and self.call is None:
            self.has_loop = True
            self.count_time()

    @contextlib.contextmanager
    def outside_calls(self, phase: str) -> Iterator[None]:
        """Counts the time of the block as `phase`, unless a call of Keras is under way."""
        counts = TIMES.is_on and self.call is None
        if counts:
            TIMES.switch(phase)
        try:
            yield
        finally:
            if counts:
                self.count_time()

    def mark(self) -> None:
        """Records that the graph of the current steps reports when it requests input, for the watchdog."""
        call = self.call
        if call is not None and call.execution is not None:
            call.execution.is_marked = True

    def stepped(self) -> None:
        """Records the end of a training step for the watchdog. TensorFlow calls this method in a thread of its own."""
        call, now = self.call, time.monotonic()
        if call is None or call.execution is None:
            return
        if len(self._calls) == 1:  # Steps of a nested `fit` may differ.
            self.step_seconds.append((now - call.ended_step, not call.steps))
        call.ended_step = now
        call.steps += 1

    def forget(self) -> None:
        """Records that no call of Keras is under way, even if the objects of a failed call still exist."""
        self._calls = []

    def count_time(self) -> None:
        """Counts the time of this worker from now on for what it does now."""
        if TIMES.is_on:
            TIMES.switch(self._timed_phase())

    def _timed_phase(self) -> str:
        """Returns what this worker does now, in the terms of `phase_names.py`."""
        call = self.call
        if call is None:
            return OWN_LOOP if self.has_loop else OUTSIDE if self.begun else START
        execution = call.execution
        if execution is not None and execution.is_tracing:
            return TRACING
        if execution is not None and execution.kind == TRAIN:
            return STEP
        if execution is not None or call.name not in _TRAINING:
            return VALIDATION
        return BUILDING if call.phase == EXCHANGE and not call.executions else call.phase

    def _new(self, name: str, lives: "weakref.ref[Any] | None") -> Call:
        self.begun += 1
        EVENTS.note("call", call=name, number=self.begun)
        return Call(name, self.begun, lives)


def is_between_steps() -> bool:
    """Returns whether a `fit` of this process is outside of a training step, in a callback or a validation."""
    calls = [call for activity in list(_all) if (call := activity.call) is not None]
    return any(
        call.phase == CALLBACK if call.execution is None else call.execution.kind != TRAIN or call.name != "fit"
        for call in calls
    )
