"""Writes the events of this worker, its position and the stacks of its threads, when it fails, stalls or is asked.

    a step, an exchange, a save ... ── note ──▶ event_buffer.py   in memory
                                                     │
    an exception, a stall, a lost peer, SIGUSR2 ──▶ recorder.py ──▶ attempt-<n>/events-<i>.jsonl
                                                     ▲
    positions and pending exchanges of the parts of this worker, asked at that moment

Only the first failure of a process is written: the failures after it are consequences. An exchange that fails because
of a lost peer replaces the loss, since it shows what this worker needed from the peer.
"""

import contextlib
import inspect
import os
import pathlib
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from absl import logging

from tfdist._compat import call_stack
from tfdist.cluster import ClusterSpec
from tfdist.events import phase_names
from tfdist.events.asked_by_signal import call_when_asked, process_start
from tfdist.events.event_buffer import EVENTS, Event
from tfdist.events.event_file import ASKED, EXCHANGE, LOST_PEER, START, Call, write_events
from tfdist.events.phase_times import TIMES
from tfdist.run_files import ATTEMPT, RunFiles, is_supervised

EVENTS_DIR = "TFDIST_EVENTS_DIR"
"""Environment variable with the folder for events of workers that `tfdist run` has not started."""

EVENT_COUNT = "TFDIST_EVENT_COUNT"
"""Environment variable with the number of events that a worker keeps; 0 for none."""

_COUNT = 4096
_WAIT_SECONDS = 5.0

_recorder: "_Recorder | None" = None
_states: list[Callable[[], Callable[[], Mapping[str, Any]] | None]] = []  # Each returns a function, while it exists.
_starting: list[str] = []


def begin() -> None:
    """Begins to keep events and times if there is a folder for them. Only the first call in a process has an effect.

    Raises:
      ValueError: If TFDIST_EVENT_COUNT is no number.
    """
    global _recorder
    count, folder = _count(), os.environ.get(EVENTS_DIR)
    files = RunFiles.of_worker() if is_supervised() else RunFiles(pathlib.Path(folder)) if folder else None
    if _recorder is not None or not count or files is None:
        return
    spec = ClusterSpec.from_env()
    worker = spec.worker_id if spec else 0
    attempt = int(os.environ.get(ATTEMPT, "0"))
    EVENTS.start(count)
    _recorder = _Recorder(
        files.events(attempt, worker),
        {"worker": worker, "workers": spec.num_workers if spec else 1, "attempt": attempt},
    )
    _recorder.begin()
    TIMES.begin(files.times(attempt, worker))


def _count() -> int:
    text = os.environ.get(EVENT_COUNT) or str(_COUNT)
    if not text.isdecimal():
        raise ValueError(f"{EVENT_COUNT} must be the number of events that a worker keeps, or 0 for none; got {text!r}")
    return int(text)


def add_state(state: Callable[[], Mapping[str, Any]]) -> None:
    """Adds a function that returns a part of this worker's state, for the first line of the file.

    It is called in any thread, and only when the file is written. The object of a method is not kept alive. A "section"
    in the state replaces the "phase".
    """
    _states.append(weakref.WeakMethod(state) if inspect.ismethod(state) else lambda: state)


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Records that this worker starts: `what` is the part of the start-up in the block. It is not over if it fails."""
    since = time.monotonic_ns()
    _starting.append(what)
    yield
    _starting.remove(what)
    EVENTS.note(phase_names.START, what=what, since=since)


def capture_failure(why: str, **details: Any) -> None:
    """Keeps position, events and stacks of this moment as those of the first failure, for `write_failure`.

    Writes no file, so that a thread in a hurry can call it. A later failure is not kept.

    Args:
      why: Kind of the failure, such as "stall".
      details: Other values for the first line of the file.
    """
    if _recorder is not None:
        with _logging_errors():
            _recorder.capture_failure(why, details)


def write_failure(why: str, **details: Any) -> None:
    """Writes the file for the first failure of this worker, which may have been captured before."""
    if _recorder is not None:
        with _logging_errors():
            _recorder.capture_failure(why, details)
            _recorder.write_failure()


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    """Logs any error in the block, since a worker that ends has more important things to do after it."""
    try:
        yield
    except Exception:
        logging.exception("The events of this worker could not be written:")


class _Record(NamedTuple):
    """The content of the file at one moment."""

    header: Mapping[str, Any]
    events: Sequence[Event]
    stacks: Mapping[str, Sequence[Call]]


class _Recorder:
    """Takes and writes the records of this worker."""

    def __init__(self, path: pathlib.Path, worker: Mapping[str, Any]):
        self._path = path
        self._pid = os.getpid()
        self._worker: dict[str, Any] = {**worker, "host": socket.gethostname(), "pid": self._pid, "start": time.time()}
        self._capturing, self._writing = threading.Lock(), threading.Lock()
        self._failure: _Record | None = None
        self._written: _Record | None = None  # The failure that is in the file.

    def begin(self) -> None:
        self._worker |= {"hears": call_when_asked(self._answer), "process_start": process_start()}
        self._hook_exceptions()
        self._write(_Record(self._header(START), (), {}))

    def _hook_exceptions(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            is_failure = not isinstance(error, KeyboardInterrupt) and os.getpid() == self._pid
            try:
                if is_failure:
                    with _logging_errors():
                        self.capture_failure("exception", {"exception": kind.__name__}, trace)
            finally:
                # First the failure report, by whose time the first failure is found. The disk may hang after it.
                before(kind, error, trace)
                if is_failure:
                    with _logging_errors():
                        self.write_failure()

        sys.excepthook = hook

    def capture_failure(self, why: str, details: Mapping[str, Any], trace: TracebackType | None = None) -> None:
        if not self._capturing.acquire(timeout=_WAIT_SECONDS):  # No thread may keep a failed worker from its end.
            return
        try:
            known = self._failure and self._failure.header["why"]
            is_better = known is None or (known, why) == (LOST_PEER, EXCHANGE)
            if is_better and os.getpid() == self._pid:
                self._failure = _Record(self._header(why, details), EVENTS.copy(), _stacks(trace))
        finally:
            self._capturing.release()

    def write_failure(self) -> None:
        if self._failure is not None and os.getpid() == self._pid:
            self._write(self._failure)

    def _answer(self) -> None:
        """Writes the present events at the request of a user or of the supervisor."""
        with _logging_errors():
            self._write(self._failure or _Record(self._header(ASKED), EVENTS.copy(), _stacks()))

    def _header(self, why: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
        now = {"time": time.time(), "ns": time.monotonic_ns()}
        return {**self._worker, **now, "why": why, "step": EVENTS.step, **_state(), **(details or {})}

    def _write(self, asked: _Record) -> None:
        """Writes the newest failure, which another thread may have captured meanwhile; `asked` if there is none."""
        if not self._writing.acquire(timeout=_WAIT_SECONDS):  # Another thread waits for the disk.
            return
        try:
            record = self._failure or asked
            if record is self._written:
                return
            write_events(self._path, record.header, record.events, record.stacks)
            self._written = record
        except OSError as error:
            logging.warning("The events of this worker could not be written: %s", error)
        finally:
            self._writing.release()


def _state() -> dict[str, Any]:
    """Returns the present phase of this worker, and the states of its parts."""
    state: dict[str, Any] = {"phase": phase_names.START if _starting else None, "starting": list(_starting)}
    for reference in list(_states):
        function = reference()
        if function is None:
            _states.remove(reference)
            continue
        try:
            told = function()
        except Exception as error:  # On any error: the file is more important than one of its entries.
            state["missing"] = repr(error)
            continue
        state.update({name: value for name, value in told.items() if value is not None})
    if section := state.pop("section", None):
        state["phase"] = section
    return state


def _stacks(trace: TracebackType | None = None) -> dict[str, list[Call]]:
    """Returns the calls of all threads, innermost first; those of an exception in place of its own thread's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, stacks = threading.get_ident(), {}
    for ident, calls in call_stack.calls_of_threads().items():
        name = names.get(ident, str(ident))
        if trace is not None and ident == own:
            calls = [(each.filename, each.lineno or 0, each.name) for each in reversed(_frames(trace))]
        stacks[name if name not in stacks else f"{name} {ident}"] = calls
    return stacks


def _frames(trace: TracebackType) -> Sequence[traceback.FrameSummary]:
    return traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
