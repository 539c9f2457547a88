"""Ends a job that is alive but makes no progress: stuck input, an endless loop, a network path that swallows.

Heartbeats tell of processes that are gone or frozen. Here each worker looks, every second, where it is: its step, and
what it does ("input", "compute" or "exchange" in training; "callback", "save", "validation"). The rule:

- The clock runs inside Keras' `fit` of models of the strategy only, and while Keras reads in Python what another `fit`
  begins with. It starts anew with each step, with each batch of a validation and each that is passed over after a
  restart, and with each change between training and the rest.
- A step, with its input, may take 20 times the median of the last 64, but at least 60 s and at most 30 minutes; never
  less than three times the longest so far, the first included, which traces.
- The first step of a `fit`, a callback (also a `fit` that it calls, and what a `keras.utils.PyDataset` does in its
  `on_epoch_end` and `on_epoch_begin`), a save or a batch of a validation may take 30 minutes. So it is also where
  `stall_timeout_seconds` is given, for the first step, which traces, but not for what Keras reads before it: the first
  batches of a generator or a `PyDataset`. For all else that number holds.
- A worker whose clock has run out asks the others where they are. While one of them is in its first step, a callback, a
  save or a validation, whose own clock runs, all wait. Else the suspect is who does not answer, or is behind, or does
  not wait for others.
- Who is in a step while the program of another is over waits in vain: for as long as steps usually take, and some 10 s.
- Then each worker writes where all its threads are, and the report, and ends with exit code `STALLED`.

A lone worker is watched under `tfdist run`, which starts it again. Custom loops are not watched, nor is what is outside
of `fit`, but for two things. A variable is made by a broadcast, and who waits there for `start_timeout_seconds` lets it
fail on all workers, since their models are not alike. And who waits there, or as a `fit`, `evaluate` or `predict`
begins, while the program of another is over, waits in vain, too: after some 5 s that fails.
"""

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist import _tf
from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError
from tfdist.exit_codes import STALLED
from tfdist.failure_report import is_supervised, write_report
from tfdist.faults.board import Board
from tfdist.faults.patience import INPUT, TRAINING, Patience
from tfdist.faults.suspect import WAITS, suspect_of

__all__ = [
    "Alone",
    "Creations",
    "Watchdog",
    "moved",
    "section",
    "start",
    "start_alone",
    "waiting_for_all",
]

BUILDING = "building"
_ITS_END = "its program is over"
WAITING = "waiting for the chief"
_POLL_SECONDS = 1.0
_POST_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
_STOP_SECONDS = 2.0
_ABSENCE_SECONDS = 5.0
_TELL_SECONDS = 10.0  # Whom one waits for who makes variables.

_sections: list[str] = []
_moves = 0
_calls: list["_Call"] = []  # for which this worker waits
_made = itertools.count()  # Watchdogs that meet others, as many and in the same order on all workers.


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Says what this worker does in the block, where that is no training: `with watchdog.section("save"):`."""
    _sections.append(name)
    try:
        yield
    finally:
        _sections.remove(name)


def moved() -> None:
    """Says that this worker has got on, where no step of training shows it."""
    global _moves
    _moves += 1


class _Call:
    """One in which all workers have a part, from its beginning; and what is wrong with it, once that is known."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.since = time.monotonic()
        self.fault: str | None = None


@contextlib.contextmanager
def waiting_for_all(what: str) -> Iterator[None]:
    """Says that all workers exchange in the block, which is `what`.

    Raises:
      ClusterError: If it fails because another's program is over.
    """
    call = _Call(what)
    _calls.append(call)
    try:
        yield
    except tf.errors.OpError as error:
        if call.fault:
            raise ClusterError(call.fault) from error
        raise
    finally:
        _calls.remove(call)


class Creations:
    """The variables that a worker makes. Each is a broadcast, so unlike models wait here for each other."""

    def __init__(self) -> None:
        self.count = 0
        self.since: float | None = None

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Around the making of a variable."""
        self.since = time.monotonic()
        try:
            with waiting_for_all("the making of variables in the scope"):
                yield
            self.count += 1
        finally:
            self.since = None


class Alone(Board):
    """The board of a worker that trains without others, though they may run beside it.

    Args:
      worker: Which worker of its cluster this is.
    """

    def __init__(self, worker: int) -> None:
        super().__init__(worker, 1)

    @property
    def others(self) -> list[int]:
        """None."""
        return []


def start(strategy: Any, board: Board, creations: Creations) -> None:
    """Watches the training of a strategy for as long as it lives, in threads of its own.

    Costs two messages to worker 0 every two seconds, three while it waits, and a look at the stacks of this process
    every second.
    """
    Watchdog(strategy, board, Patience(strategy.fault_tolerance.stall_timeout_seconds), creations).start()


def start_alone(strategy: Any) -> None:
    """Watches the training of a strategy of one worker, if `tfdist run` is there to start it again."""
    if is_supervised():
        cluster = ClusterSpec.from_env()
        start(strategy, Alone(cluster.worker_id if cluster else 0), Creations())


class Watchdog:
    """The threads that watch: one looks, one tells the others, since a message may hang where a look may not."""

    def __init__(self, strategy: Any, board: Board, patience: Patience, creations: Creations):
        self._strategy = weakref.ref(strategy)
        self._creations = creations
        self._told_of: float | None = None
        self._start_timeout_seconds = strategy.fault_tolerance.start_timeout_seconds
        self._subject = f"position-{next(_made)}" if board.others else "position"
        self._board = board
        self._patience = patience
        self._position: dict[str, Any] = {"step": 0, "section": None, "may_take_long": False, "looks": 0}
        self._last_words: Mapping[int, Mapping[str, Any] | None] = {}
        self._absence: tuple[int, float] | None = None  # In which step another cannot come, and since when it is known.
        self._looks = 0
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._warned = False

    def start(self) -> None:
        """Starts the threads. They end before TensorFlow takes its runtime apart, which would wait for them."""
        for target in (self._watch, self._post) if self._board.others else (self._watch,):
            thread = threading.Thread(target=target, name=f"tfdist-watchdog{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(_POLL_SECONDS):
            now = time.monotonic()
            # A process that was itself frozen counts the seconds in which it ran.
            self._look(min(now - last, 2 * _POLL_SECONDS))
            if self._patience.is_over or self._is_in_vain:
                self._judge()
            last = now
            since = self._creations.since
            if since is not None and now - since > self._start_timeout_seconds:
                self._refuse_model()
                return
            if since not in (None, self._told_of) and now - since > _TELL_SECONDS:
                self._told_of = since
                self._tell_of_variable()

    def _refuse_model(self) -> None:
        """Lets the broadcast fail that this worker waits in, and all other collectives."""
        message = (
            "All workers must make the same variables in the same order, but after "
            f"{self._start_timeout_seconds:g} s worker {self._board.worker} still waits for others to make number "
            f"{self._creations.count + 1} ({self._variables()}). Build the same model with the same optimizer on each, "
            "or raise start_timeout_seconds of tfdist.FaultTolerance."
        )
        logging.error(message)
        with contextlib.suppress(tf.errors.OpError):
            self._board.report_error(message)

    def _tell_of_variable(self) -> None:
        logging.warning(
            "worker %d waits for others to make variable number %d in the scope (%s): all must build, or load, the "
            "same model. It gives up after %g s.",
            *(self._board.worker, self._creations.count + 1, self._variables(), self._start_timeout_seconds),
        )

    def _variables(self) -> str:
        heard = {worker: self._hear(worker) for worker in self._board.others}
        counts = {worker: position["variables"] if position else "not answered" for worker, position in heard.items()}
        return ", ".join(f"worker {worker} has {count}" for worker, count in counts.items())

    def _look(self, elapsed_seconds: float) -> None:
        strategy = self._strategy()
        if strategy is None:
            self._stopping.set()
            return
        # `faults` knows no strategies, so the newest reports are found by their class.
        newest = type(strategy.reports).newest
        tells = newest in (None, strategy.reports) and strategy.reports.tells
        activity = _tf.keras_fit_activity() if tells else None
        # Else it is the `fit` of a model of no strategy, whose steps nobody reports.
        if not (activity in (BUILDING, INPUT) or strategy.reports.fits or _calls):
            activity = None
        elif activity == BUILDING:
            activity = TRAINING
        step, part = strategy.reports.position()
        if activity is not None and _sections:
            activity = _sections[-1]
        observed = None if activity == WAITING else activity  # Whom it waits for has a clock.
        self._patience.observe(step, observed, elapsed_seconds, (strategy.reports.evaluated, _moves))
        what = part if activity == TRAINING else activity
        self._looks += 1
        self._position = {
            "step": step,
            "section": what,
            "may_take_long": self._patience.may_take_long,
            "variables": self._creations.count,
            "has_stopped": strategy.reports.has_stopped,
            "looks": self._looks,  # Tells a thread that looks from one that is dead.
        }

    def _post(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(_POST_SECONDS)
            with contextlib.suppress(tf.errors.OpError, OSError):
                if is_last:  # Whoever then waits for this worker should know if it alone was told to stop.
                    self._look(0.0)
                self._board.say(self._subject, self._position)
                if not is_last:
                    self._look_for_the_absent()

    def _look_for_the_absent(self) -> None:
        """Lets a call fail to which another worker cannot come any more; takes note if it is a step of `fit`."""
        now = time.monotonic()
        for call in _calls[-1:]:
            if call.fault or now - call.since <= _ABSENCE_SECONDS:
                continue
            absent = self._board.absent()
            # Else the call came to its end meanwhile, and then the other's program.
            if absent is not None and call in _calls:
                call.fault = self._board.in_vain(call.what, absent)
                self._board.report_error(call.fault)
        step, is_late = self._position["step"], self._patience.waited_seconds > _ABSENCE_SECONDS
        is_in_step = self._position["section"] in WAITS  # and does not wait at the end of `fit`
        if not (is_late and is_in_step and _tf.keras_is_in_step()):
            self._absence = None
        elif (self._absence is None or self._absence[0] != step) and self._board.absent() is not None:
            self._absence = step, now

    @property
    def _is_in_vain(self) -> bool:
        """Whether this worker is in a step to which another cannot come; who has left after that step it follows."""
        step, since = self._absence or (-1, 0.0)
        usual_seconds = max(_POST_SECONDS, self._patience.usual_seconds)
        return step == self._position["step"] and time.monotonic() - since > usual_seconds

    def _judge(self) -> None:
        positions = self._ask() if self._board.others else {self._board.worker: self._position}
        busy = [worker for worker, position in positions.items() if position and position.get("may_take_long")]
        if [worker for worker in busy if worker != self._board.worker] and not self._is_in_vain:
            if not self._warned:
                self._warned = True
                logging.warning("No progress for %.0f s: %s", self._patience.waited_seconds, _describe(positions))
            return
        if (self._patience.is_over or self._is_in_vain) and not self._stopping.is_set():  # Asking took a while.
            self._end(positions)

    def _ask(self) -> dict[int, Mapping[str, Any] | None]:
        """Where the workers are; `None` of those whose word does not change."""
        before = self._listen()
        time.sleep(2 * _POST_SECONDS)
        after = self._last_words = self._listen()
        self._look(0.0)
        positions: dict[int, Mapping[str, Any] | None] = {}
        for worker, position in after.items():
            is_new = position and position.get("looks") != (before[worker] or {}).get("looks")
            positions[worker] = position if is_new else None
        absent = self._board.absent()
        if absent is not None:
            positions[absent] = {"step": 0, **(after[absent] or {}), "section": _ITS_END, "may_take_long": False}
        if not any(positions.values()):  # The board is out of reach: so is worker 0, who keeps it.
            positions = {0: None}
        return {**positions, self._board.worker: self._position}

    def _listen(self) -> dict[int, Any]:
        with ThreadPoolExecutor(16) as pool:
            return dict(zip(range(self._board.workers), pool.map(self._hear, range(self._board.workers)), strict=True))

    def _hear(self, worker: int) -> Any:
        with contextlib.suppress(tf.errors.OpError):
            return self._board.hear(self._subject, worker, _ANSWER_SECONDS)
        return None

    def _end(self, positions: Mapping[int, Mapping[str, Any] | None]) -> None:
        suspect = suspect_of(positions)
        blamed = "nothing tells who holds it up" if suspect is None else f"worker {suspect} holds it up"
        limit = f" (limit {self._patience.limit_seconds:.0f} s)" if self._patience.is_over else ""
        message = (
            f"No progress for {self._patience.waited_seconds:.0f} s{limit}: "
            f"{_describe(positions)}; {blamed}. Worker {self._board.worker} ends with exit code {STALLED}. "
            f"{self._way_out(positions)}"
        )
        try:
            stacks = _stacks()
            sys.stderr.write(f"tfdist: {message}\n{stacks}\n")
            sys.stderr.flush()
            step, part = self._position["step"], self._position["section"]
            write_report("stall", message=message, stack=stacks, suspect=suspect, step=step, section=part)
        finally:
            os._exit(STALLED)

    def _way_out(self, positions: Mapping[int, Mapping[str, Any] | None]) -> str:
        """What to do, by the last word of each worker."""
        words = {**self._last_words, self._board.worker: self._position}
        stopped = [str(worker) for worker, word in sorted(words.items()) if word and word.get("has_stopped")]
        if 0 < len(stopped) < len(words):
            return (
                f"A fit ends after the same step on all workers, but `model.stop_training` was set on worker "
                f"{', '.join(stopped)} and not on the others. Set it by what all know, as the logs, or together, as by "
                '`strategy.reduce("SUM", tf.constant(float(late)), axis=None) > 0`.'
            )
        for worker, position in positions.items():
            if position and position["section"] == _ITS_END:
                return self._board.in_vain("each step of a `fit`", worker)
        return "If this was healthy, raise stall_timeout_seconds of tfdist.FaultTolerance."


def _describe(positions: Mapping[int, Mapping[str, Any] | None]) -> str:
    return ", ".join(
        f"worker {worker} is in step {position['step'] + 1} ({position['section']})"
        if position
        else f"worker {worker} does not answer"
        for worker, position in sorted(positions.items())
    )


def _stacks() -> str:
    """Where each thread of this process is, the innermost call first; without a look at its source, on some disk."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n\n".join(
        "\n".join([f"Thread {names.get(ident, ident)}:", *map(_call, traceback.walk_stack(innermost))])
        for ident, innermost in sys._current_frames().items()
    )


def _call(of_stack: tuple[FrameType, int]) -> str:
    frame, line = of_stack
    return f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
