"""What this worker does: noted where Keras' calls begin, hand a step to TensorFlow and end; read by the watchdog.

    fit ── "building" ── "callback" ─┬─ a step ── "callback" ─┬─ ... ── its end
                                     └─ "tracing", then "input", "compute", "exchange" by the clocks in the graph

The thread that trains notes; the watchdog's thread reads. A note is one assignment, so neither needs a lock, and nobody
looks at the frames of another thread.
"""

import collections
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import _tf

__all__ = [
    "BUILDING",
    "CALLBACK",
    "COMPUTE",
    "EXCHANGE",
    "INPUT",
    "MEETING",
    "TRACING",
    "TRAIN",
    "Activity",
    "Call",
    "Doing",
    "Execution",
    "is_between_steps",
]

BUILDING = "building"
TRACING = "tracing"
INPUT = "input"
COMPUTE = "compute"
EXCHANGE = "exchange"
CALLBACK = "callback"
"""Python between two steps of a call: callbacks, and whatever else the program or Keras does there."""

MEETING = "the beginning of a call"
"""All workers exchange before the first step of a call; who comes first waits."""

TRAIN = "train"
_REMEMBERED = 1024  # Durations of steps that the watchdog has not taken yet.

_all: "weakref.WeakSet[Activity]" = weakref.WeakSet()


class Execution:
    """One call of the function that runs steps in TensorFlow.

    Attributes:
      kind: `TRAIN`, "test" or "predict".
      reads: Whether the function itself reads from an iterator.
      since: When it began, in seconds since the epoch.
      is_tracing: Whether Python traces it now.
      traced_at: When Python had traced it, if it did.
      is_marked: Whether its graph notes when it asks for input.
    """

    def __init__(self, kind: str, reads: bool):
        self.kind, self.reads = kind, reads
        self.since = time.time()
        self.is_tracing = self.is_marked = False
        self.traced_at: float | None = None


class Call:
    """A call of Keras in which all workers take part.

    Attributes:
      name: Such as "fit".
      number: Of all such calls under the strategy, counted from 1.
      phase: What it does outside of an execution.
      execution: The one that is under way.
      executions: That have ended.
      steps: Training steps that have ended.
      fault: What is wrong with it, once that is known.
      is_over: Whether it has come to its end. If it fails, it lasts until the object that Keras keeps for it is gone.
    """

    def __init__(self, name: str, number: int, lives: "weakref.ref[Any] | None"):
        self.name, self.number = name, number
        self.phase = BUILDING
        self.execution: Execution | None = None
        self.executions = self.steps = 0
        self.fault: str | None = None
        self.is_over = False
        self.ended_step = 0.0
        self._lives = lives

    @property
    def is_under_way(self) -> bool:
        """Whether it has not come to its end, nor failed."""
        return not self.is_over and (self._lives is None or self._lives() is not None)

    def is_of(self, epochs: Any) -> bool:
        """Whether Keras keeps `epochs` for it."""
        return self._lives is not None and self._lives() is epochs


class Doing(NamedTuple):
    """What a worker does at a moment.

    Attributes:
      call: The innermost call that is under way, by name; `None` outside of all.
      number: Its number.
      begun: How many calls this worker has begun.
      phase: What it does in that call; `None` outside of all.
      in_step: Whether TensorFlow runs a training step.
      is_first: Whether that may take long since it is the first of its kind in the call, or an evaluation.
      progress: Another value whenever the worker has got on.
    """

    call: str | None
    number: int
    begun: int
    phase: str | None
    in_step: bool
    is_first: bool
    progress: Any


class Activity:
    """The calls of a strategy that are under way in this process, the outermost first.

    Attributes:
      begun: How many calls have begun.
      step_seconds: Of each training step of a `fit` outside of all others that has ended, and whether it was its first;
        for the watchdog to take.
      explain: Says what is wrong with a call whose collective has failed, if that is known.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.step_seconds: collections.deque[tuple[float, bool]] = collections.deque(maxlen=_REMEMBERED)
        self.explain: Callable[[Call, Exception], str | None] = lambda call, error: None
        self._calls: list[Call] = []
        _all.add(self)

    @property
    def call(self) -> Call | None:
        """The innermost call that is under way."""
        return next((call for call in reversed(self._calls) if call.is_under_way), None)

    def begin(self, under_way: Sequence[_tf.KerasCall]) -> None:
        """Notes that a call has begun, unless it is noted already.

        Args:
          under_way: All calls in this thread, innermost first.
        """
        if not under_way:
            return
        newest, call = under_way[0], self.call
        if call is None or not call.is_of(newest.epochs):
            call = self._new(newest.name, weakref.ref(newest.epochs))
            # A call that failed may be kept by its exception: what is not in this thread's stack is over.
            outer = [each for each in self._calls if any(each.is_of(other.epochs) for other in under_way[1:])]
            self._calls = [*outer, call]

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Notes a phase of the innermost call in the block; after it, Python goes on."""
        call = self.call
        if call is not None:
            call.phase = phase
        try:
            yield
        finally:
            if call is not None:
                call.phase = CALLBACK

    @contextlib.contextmanager
    def exchanging(self, name: str) -> Iterator[Call]:
        """Notes that Python waits for all workers in the block, in the innermost call or in one that is not noted.

        Args:
          name: Of the call.
        """
        call, before = self.call, self._calls
        if call is None:
            call = Call(name, self.begun + 1, None)
            self._calls = [call]
        phase, call.phase = call.phase, EXCHANGE
        try:
            yield call
        finally:
            call.phase, self._calls = phase, before

    @contextlib.contextmanager
    def executing(self, kind: str, *, reads: bool, alone: str | None) -> Iterator[Call]:
        """Notes an execution of the innermost call in the block.

        Args:
          kind: `TRAIN`, "test" or "predict".
          reads: Whether the function itself reads from an iterator.
          alone: The name of the call if it is this execution only.
        """
        call = None if alone else self.call
        single = call is None
        if call is None:
            call = self._new(alone or kind, None)
            self._calls = [*self._calls, call]
        call.execution = Execution(kind, reads)
        call.ended_step = time.monotonic()
        ends = single
        try:
            yield call
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The input has ended, not the call.
        except BaseException:
            ends = True  # What failed is over, though an exception that is kept keeps it.
            raise
        finally:
            call.execution, call.phase = None, CALLBACK
            call.executions += 1
            if ends:
                self._calls = [each for each in self._calls if each is not call]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Notes that Python traces the execution that is under way."""
        execution = self.call and self.call.execution
        if not execution:
            yield
            return
        execution.is_tracing = True
        try:
            yield
        finally:
            execution.traced_at, execution.is_tracing = time.time(), False

    def mark(self) -> None:
        """Notes that the graph of the execution that is under way notes when it asks for input."""
        call = self.call
        if call is not None and call.execution is not None:
            call.execution.is_marked = True

    def stepped(self) -> None:
        """Notes the end of a training step; called in a thread of TensorFlow."""
        call, now = self.call, time.monotonic()
        if call is None or call.execution is None:
            return
        if len(self._calls) == 1:  # Steps of a `fit` within another may be unlike.
            self.step_seconds.append((now - call.ended_step, not call.steps))
        call.ended_step = now
        call.steps += 1

    def forget(self) -> None:
        """Notes that no call is under way, though the objects are kept."""
        self._calls = []

    def _new(self, name: str, lives: "weakref.ref[Any] | None") -> Call:
        self.begun += 1
        return Call(name, self.begun, lives)


def is_between_steps() -> bool:
    """Whether a `fit` of this process is outside of a training step: in a callback or a validation."""
    calls = [call for activity in list(_all) if (call := activity.call) is not None]
    return any(
        call.phase == CALLBACK if call.execution is None else call.execution.kind != TRAIN or call.name != "fit"
        for call in calls
    )
