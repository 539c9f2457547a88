"""The watchdog ends a job that is alive but makes no progress: stuck input, an endless loop, a lossy network path.

Heartbeats detect processes that have ended or are frozen. For the watchdog, each worker notes its position in Keras'
calls under a strategy, such as `fit` or `train_on_batch`; see `tfdist.faults.activity`. One thread reads these notes
every second, and another sends them to the peers every two seconds. The rules:

- A worker's clock restarts with each training step, each batch of an evaluation, each batch skipped after a restart and
  each change of phase. The clock does not run outside of calls.
- The limit for a training step with its input is 20 times the median of the last 64 steps, but between 60 s and 30
  minutes, and at least three times the longest step. The limit for waiting for peers is the same, in any step.
- Bytes on the workers' own connections count as progress, so an exchange over a slow link continues. The bytes of
  TensorFlow's collectives are not visible. With these, a worker waits up to 10 minutes until the first step is done.
- Slow phases have 30 minutes: building and tracing a model, input and computation in the first step of a call or in an
  evaluation, callbacks, saves.
- `stall_timeout_seconds` replaces all these limits except those for building, tracing and the first computation.
- At the beginning of a call a worker waits `start_timeout_seconds` for its peers.
- After its limit a worker asks its peers for their positions. All continue to wait while a peer is in a slow phase
  within its limit, or waits for bytes that moved in the last 30 s. A peer outside of calls that has not begun this call
  yet has `start_timeout_seconds`.
- Then each worker writes the stacks of all its threads and a report, and ends with exit code `STALLED`. At the
  beginning of a call, the call raises `ClusterError` on all workers instead.
- Workers in different calls wait in vain, as do workers that need a peer after its program has ended. Such a wait ends
  after about 10 s, or after the usual duration of a step.
- A waiting worker logs a warning after half of its limit, at most 30 s, and then every minute. The warning gives the
  duration, the position of each worker and the suspect. A worker that waits for no peer, such as in a callback, reads
  its stack after half of its limit, at most 10 s, so that the warning also has the line of the user's code.

A lone worker is watched only under `tfdist run`, which restarts it. Custom loops are not watched. Nor is the first
batch of a generator or a `PyDataset`: Keras reads it for its structure before the call is noted. For its peers, the
worker has not begun the call yet. TensorFlow creates a variable by a broadcast. A worker that waits there for
`start_timeout_seconds` makes the broadcast fail on all workers, since their models differ.
"""

import atexit
import contextlib
import itertools
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist._compat import call_stack, keras_stack
from tfdist.cluster import ClusterSpec
from tfdist.events import recorder
from tfdist.events.event_buffer import EVENTS
from tfdist.events.phase_names import AGREEING, EXCHANGE, ITS_END, MEETING, WAITING
from tfdist.events.phase_times import TIMES
from tfdist.exit_codes import STALLED
from tfdist.failure_report import write_report
from tfdist.faults import beside_steps
from tfdist.faults.activity import Call
from tfdist.faults.beside_steps import Creations, WaitForAll
from tfdist.faults.coordination_store import CoordinationStore, reported
from tfdist.faults.stall_suspect import (
    UNLIKE_CALLS,
    Positions,
    describe,
    stalled_at,
    suspect_of,
    unlike_calls,
    yet_to_come,
)
from tfdist.faults.stall_timeout import StallTimeout
from tfdist.faults.stalled_line import stalled_line
from tfdist.run_files import is_supervised

__all__ = ["Watchdog", "start", "start_alone"]

_POLL_SECONDS = 1.0
_POST_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
_STOP_SECONDS = 2.0
_REPORT_SECONDS = 10.0
_LISTENERS = 16  # Threads that ask for the words of workers.
_ABSENCE_SECONDS = 5.0
_TELL_SECONDS = 10.0  # Before a worker that creates a variable logs its wait.
_LINE_SECONDS = 10.0  # At most, without progress, before a worker reads its stack; and between two readings.
_OF_PEERS = (None, EXCHANGE, MEETING, WAITING, AGREEING, ITS_END)  # No line of the user's code hangs in these.
_UNLIKE_SECONDS = 8.0  # Without progress, before different calls are looked for.
_SAID_OF_ENDS = (" is gone", " ended by ")  # In the error of a collective after a worker has ended.
_WARN_SECONDS, _WARN_AGAIN_SECONDS = 30.0, 60.0

_made = itertools.count()  # Numbers the watchdogs with peers, equally on all workers.


def start(
    strategy: Any, board: CoordinationStore, creations: Creations, carried: Callable[[], int] | None = None
) -> None:
    """Watches the training of a strategy in separate threads, as long as the strategy exists.

    Costs two messages to worker 0 every two seconds, three while it waits, and one read of a variable every second.

    Args:
      strategy: The strategy.
      board: The coordination store for the workers' positions; a store of one worker for a worker that trains alone.
      creations: The variables that this worker creates.
      carried: Returns the number of bytes that steps have exchanged with peers; `None` if this number is unknown.
    """
    options = strategy.fault_tolerance
    sees_bytes = carried is not None or not board.others
    patience = StallTimeout(options.stall_timeout_seconds, options.start_timeout_seconds, sees_bytes)
    Watchdog(strategy, board, patience, creations, carried).start()


def start_alone(strategy: Any, *, has_peers: bool = False) -> None:
    """Watches the training of a strategy that runs by itself, if `tfdist run` can restart it or other workers wait."""
    if has_peers or is_supervised():
        cluster = ClusterSpec.from_env()
        start(strategy, CoordinationStore(cluster.worker_id if cluster else 0, 1), Creations())


class Watchdog:
    """The threads of the watchdog. One checks for progress, the other messages peers, since a message may hang."""

    def __init__(
        self,
        strategy: Any,
        board: CoordinationStore,
        patience: StallTimeout,
        creations: Creations,
        carried: Callable[[], int] | None = None,
    ):
        self._strategy = weakref.ref(strategy)
        self._carried = carried or (lambda: 0)
        self._creations = creations
        self._told_of: float | None = None
        self._refused: float | None = None
        self._start_timeout_seconds = strategy.fault_tolerance.start_timeout_seconds
        self._subject = f"position-{next(_made)}" if board.others else "position"
        self._board = board
        self._patience = patience
        self._position: dict[str, Any] = {"step": 0, "section": None, "may_take_long": False, "looks": 0}
        self._last_words: Mapping[int, Mapping[str, Any] | None] = {}
        self._line, self._line_read = "", -math.inf  # The line of the user's code, and when the stack was read.
        self._absence: tuple[int, float] | None = None  # The step that a peer cannot join; since when this is known.
        self._looks = 0
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._asked_at = self._warned_at = 0.0  # Waited seconds at the last query and warning.
        self._failed: set[str] = set()

    def start(self) -> None:
        """Starts the watchdog's threads. They end before TensorFlow's shutdown, which would otherwise wait for them."""
        strategy = self._strategy()
        if strategy is not None and self._board.others:
            strategy.reports.activity.explain = self.explain
        for target in (self._watch, self._show_life, *((self._post,) if self._board.others else ())):
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
            with self._going_on():
                # If this process was frozen, only the seconds in which it ran count.
                self._look(min(now - last, 2 * _POLL_SECONDS))
                if self._patience.is_over or self._is_in_vain:
                    self._judge()
                elif self._is_to_be_warned:
                    self._warn(self._ask())
                self._watch_creations(now)
            last = now

    def _show_life(self) -> None:
        """Writes the position to the file with the times, for the report about a worker that is frozen or killed."""
        while not self._stopping.wait(_POLL_SECONDS):
            with self._going_on():
                position = self._position
                TIMES.show_life(position["section"], EVENTS.steps_before + position["step"])
        TIMES.end_signs()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Keeps a thread of the watchdog running after an exception, and logs each kind of exception once."""
        try:
            yield
        except Exception as error:
            if (kind := repr(error)) not in self._failed:
                self._failed.add(kind)
                logging.exception("A check of the watchdog failed; the watchdog continues:")

    def _watch_creations(self, now: float) -> None:
        since = self._creations.since
        if since is not None and since != self._refused and now - since > self._start_timeout_seconds:
            self._refused = since
            self._refuse_model()
        elif since not in (None, self._told_of) and now - since > _TELL_SECONDS:
            self._told_of = since
            self._tell_of_variable()

    def _refuse_model(self) -> None:
        """Makes a variable's creation fail for which peers do not come, together with all other collectives."""
        message = (
            "All workers must make the same variables in the same order, but after "
            f"{self._start_timeout_seconds:g} s worker {self._board.worker} still waits for its peers to make number "
            f"{self._creations.count + 1} ({self._variables()}). Build the same model with the same optimizer on all "
            "workers, or raise start_timeout_seconds of tfdist.FaultTolerance."
        )
        logging.error(message)
        with contextlib.suppress(tf.errors.OpError):
            self._board.report_error(message)

    def _tell_of_variable(self) -> None:
        logging.warning(
            "worker %d waits for its peers to make variable number %d in the scope (%s): all workers must build, or "
            "load, the same model. The wait ends after %g s.",
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
        reports = strategy.reports
        doing = reports.doing()
        phase = MEETING if beside_steps.waits else doing.phase
        if doing.in_step and not reports.tells:  # XLA compiles it, or it is the user's own.
            phase = None
        if phase is not None and beside_steps.sections:
            phase = beside_steps.sections[-1]
        while reports.activity.step_seconds:
            self._patience.learn(*reports.activity.step_seconds.popleft())
        # While this worker waits for the chief, only the chief's clock runs.
        observed = None if phase == WAITING else phase
        progress, carried = (doing.progress, beside_steps.moves()), self._carried()
        self._patience.observe(observed, progress, elapsed_seconds, is_first=doing.is_first, carried=carried)
        if self._patience.waited_seconds < self._asked_at:
            self._asked_at = self._warned_at = 0.0
        self._looks += 1
        self._position = {
            "step": reports.number,
            "section": phase,
            "may_take_long": self._patience.may_take_long,
            "carries": self._patience.carries,
            "call": [doing.call, doing.number] if doing.call else None,
            "begun": doing.begun,
            "variables": self._creations.count,
            "has_stopped": reports.has_stopped,
            "looks": self._looks,  # Shows peers that this thread is alive.
        }

    def _post(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(_POST_SECONDS)
            with self._going_on(), contextlib.suppress(tf.errors.OpError, OSError):
                if is_last:  # Peers that wait should learn whether only this worker was told to stop.
                    self._look(0.0)
                self._board.say(self._subject, {**self._position, "line": self._line_for_peers()})
                if not is_last:
                    self._look_for_the_absent()

    def _line_for_peers(self) -> str | None:
        """Returns the line of the user's code in which this worker makes no progress, unless it waits for peers."""
        section, now = self._position["section"], time.monotonic()
        least = min(_LINE_SECONDS, self._patience.limit_seconds / 2)
        if self._patience.waited_seconds <= least or section in _OF_PEERS:
            return None
        if now - self._line_read > least:
            self._line, self._line_read = stalled_line(call_stack.calls_of_threads(), section), now
        return self._line

    def _look_for_the_absent(self) -> None:
        """Makes an exchange fail if a peer's program has ended; for an exchange of a step, only records the absence."""
        now = time.monotonic()
        for wait in beside_steps.waits[-1:]:
            if wait.fault or now - wait.since <= _ABSENCE_SECONDS:
                continue
            absent = self._board.absent()
            # If the exchange is no longer listed, it finished before the peer's program ended.
            if absent is not None and wait in beside_steps.waits:
                self._fail(wait, self._board.in_vain(wait.what, absent))
        step, is_late = self._position["step"], self._patience.waited_seconds > _ABSENCE_SECONDS
        if not (is_late and self._position["section"] == EXCHANGE):
            self._absence = None
        elif (self._absence is None or self._absence[0] != step) and self._board.absent() is not None:
            self._absence = step, now

    def _fail(self, call: WaitForAll | Call, fault: str) -> None:
        """Makes the call or exchange in which this worker waits fail, together with all other collectives."""
        call.fault = fault
        logging.error(fault)
        self._board.report_error(fault)

    @property
    def _is_in_vain(self) -> bool:
        """Whether a peer has ended and cannot join this step. Waits a usual step first: it may have left after it."""
        step, since = self._absence or (-1, 0.0)
        usual_seconds = max(_POST_SECONDS, self._patience.usual_seconds)
        return step == self._position["step"] and time.monotonic() - since > usual_seconds

    @property
    def _is_to_be_warned(self) -> bool:
        """Whether to ask the peers for their positions: once to find different calls, then for each warning."""
        waited, limit = self._patience.waited_seconds, self._patience.limit_seconds
        is_long = self._patience.may_take_long or not self._board.others
        if is_long or self._position["section"] is None or limit == math.inf:
            return False
        first = min(_WARN_SECONDS, limit / 2)
        may_be_unlike = self._patience.waits and waited > _UNLIKE_SECONDS and not self._asked_at
        return may_be_unlike or waited > (self._warned_at + _WARN_AGAIN_SECONDS if self._warned_at else first)

    def _warn(self, positions: Positions) -> None:
        """Logs for which worker this worker waits; makes its call fail if the workers are in different calls."""
        waited = self._asked_at = self._patience.waited_seconds
        unlike = unlike_calls(positions)
        if unlike is not None and waited > _UNLIKE_SECONDS:
            self._fail_call(unlike)
        if waited < min(_WARN_SECONDS, self._patience.limit_seconds / 2):
            return
        self._warned_at = waited
        positions = {**positions, self._board.worker: {**self._position, "line": self._line_for_peers()}}
        logging.warning(
            "No progress for %.0f s: %s; %s.",
            waited,
            describe(positions),
            _blamed(suspect_of(positions, self._board.worker)),
        )

    def _fail_call(self, fault: str) -> None:
        strategy = self._strategy()
        call = beside_steps.waits[-1] if beside_steps.waits else strategy and strategy.reports.activity.call
        if call is not None and call.fault is None:
            self._fail(call, fault)

    def _judge(self) -> None:
        positions = self._ask() if self._board.others else {self._board.worker: self._position}
        if not (self._patience.is_over or self._is_in_vain) or self._stopping.is_set():  # Asking takes 4 s.
            return
        others = {worker: position for worker, position in positions.items() if worker != self._board.worker}
        busy = any(each and (each.get("may_take_long") or each.get("carries")) for each in others.values())
        call = self._position["call"]
        is_early = self._patience.waited_seconds < self._start_timeout_seconds
        may_come = is_early and bool(call) and bool(yet_to_come(others, call[1]))
        if (busy or may_come) and not self._is_in_vain:
            if self._patience.waited_seconds > self._warned_at + _WARN_AGAIN_SECONDS or not self._warned_at:
                self._warn(positions)
        elif self._position["section"] == MEETING:
            self._fail_call(self._missed(positions))
        else:
            self._end(positions)

    def _missed(self, positions: Positions) -> str:
        """Returns the error text for a worker that waits at the beginning of a call that peers do not join."""
        blamed = _blamed(suspect_of(positions, self._board.worker))
        return (
            f"{UNLIKE_CALLS}, and begin each call within {self._start_timeout_seconds:g} s of each other, but "
            f"{describe(positions)}; {blamed}. This is worker {self._board.worker} on "
            f"{socket.gethostname()}. Make the call on all workers, or raise start_timeout_seconds of "
            "tfdist.FaultTolerance."
        )

    def explain(self, call: Call, error: Exception) -> str | None:
        """Returns why a collective of a call of Keras has failed, if known, such as workers in different calls.

        Takes about 4 s unless the reason is known at once, such as the end of a worker.
        """
        fault = (
            call.fault
            or (beside_steps.waits[-1].fault if beside_steps.waits else None)
            or reported(error, UNLIKE_CALLS)
        )
        is_known = any(said in str(error) for said in _SAID_OF_ENDS)
        if fault or is_known or "ollective" not in str(error):
            return fault
        positions = {**self._ask(), self._board.worker: {**self._position, "section": EXCHANGE}}
        return unlike_calls(positions)

    def _ask(self) -> dict[int, Mapping[str, Any] | None]:
        """Returns each worker's position (call, step, section); `None` for one that does not update its position."""
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
            last = {"step": 0, **(after[absent] or {})}
            positions[absent] = {**last, "section": ITS_END, "may_take_long": False, "call": None}
        if not any(positions.values()):  # The store is out of reach, so worker 0, its host, is too.
            positions = {0: None}
        return {**positions, self._board.worker: self._position}

    def _listen(self) -> dict[int, Any]:
        """Returns each worker's words. Works at the end of the program too, when Python may refuse new threads."""
        heard = dict.fromkeys(range(self._board.workers))

        def hear(workers: range) -> None:
            for worker in workers:
                heard[worker] = self._hear(worker)

        parts = [range(first, len(heard), _LISTENERS) for first in range(min(_LISTENERS, len(heard)))]
        threads = []
        for part in parts:
            thread = threading.Thread(target=hear, args=[part], daemon=True)
            try:
                thread.start()
            except RuntimeError:  # Python 3.12, at the end of the program.
                hear(part)
            else:
                threads.append(thread)
        for thread in threads:
            thread.join()
        return heard

    def _hear(self, worker: int) -> Any:
        with contextlib.suppress(tf.errors.OpError):
            return self._board.hear(self._subject, worker, _ANSWER_SECONDS)
        return None

    def _end(self, positions: Positions) -> None:
        calls = call_stack.calls_of_threads()
        if not any(
            keras_stack.is_keras_call(file, function) for thread in calls.values() for file, _, function in thread
        ):
            self._forget_call()  # The call has failed, but its exception is still referenced.
            return
        part = self._position["section"]
        own = None if part in _OF_PEERS else stalled_line(calls, part)
        positions = {**positions, self._board.worker: {**self._position, "line": own}}
        suspect = suspect_of(positions, self._board.worker)
        blamed = _blamed(suspect)
        limit = f" (limit {self._patience.limit_seconds:.0f} s)" if self._patience.is_over else ""
        message = (
            f"No progress for {self._patience.waited_seconds:.0f} s{limit}: "
            f"{describe(positions)}; {blamed}. Worker {self._board.worker} ends with exit code {STALLED}. "
            f"{self._way_out(positions)}"
        )
        # The disk of the report may hang, often the cause of the stall too.
        end = threading.Timer(_REPORT_SECONDS, os._exit, [STALLED])
        end.daemon = True
        with contextlib.suppress(RuntimeError):  # No thread can be started.
            end.start()
        try:
            stacks = _written(calls)
            sys.stderr.write(f"tfdist: {message}\n{stacks}\n")
            sys.stderr.flush()
            line = stalled_at(positions, suspect, self._board.worker)
            where = {"line": line, "step": EVENTS.steps_before + self._position["step"], "section": part}
            write_report("stall", message=message, stack=stacks, suspect=suspect, **where)
            seconds = round(self._patience.waited_seconds, 3)
            recorder.write_failure("stall", suspect=suspect, phase=part, waited_seconds=seconds)
        finally:
            os._exit(STALLED)

    def _forget_call(self) -> None:
        strategy = self._strategy()
        if strategy is not None:
            strategy.reports.activity.forget()

    def _way_out(self, positions: Positions) -> str:
        """Returns advice for the user after a stall, chosen by where each worker was last."""
        words = {**self._last_words, self._board.worker: self._position}
        stopped = [str(worker) for worker, word in sorted(words.items()) if word and word.get("has_stopped")]
        if 0 < len(stopped) < len(words):
            return (
                f"A fit must end after the same step on all workers, but `model.stop_training` was set only on worker "
                f"{', '.join(stopped)}. Set it by values that all workers know, such as the logs, or that they agree "
                'on, such as `strategy.reduce("SUM", tf.constant(float(late)), axis=None) > 0`.'
            )
        for worker, position in positions.items():
            if position and position["section"] == ITS_END:
                return self._board.in_vain("each step of a `fit`", worker)
        return "If the job was healthy, raise stall_timeout_seconds of tfdist.FaultTolerance."


def _blamed(suspect: int | None) -> str:
    return "the cause is unknown" if suspect is None else f"worker {suspect} is the probable cause"


def _written(calls: Mapping[int, list[tuple[str, int, str]]]) -> str:
    """Returns the stacks of all threads as text, innermost call first. Reads no source files, since a disk may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    written = []
    for ident, of_thread in calls.items():
        lines = [f'  File "{file}", line {line} in {function}' for file, line, function in of_thread]
        written.append("\n".join([f"Thread {names.get(ident, ident)}:", *lines]))
    return "\n\n".join(written)
