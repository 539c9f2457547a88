"""Preemption: after a signal, all workers save after the same step and leave.

signal ─▶ a thread notices, whatever the main thread does ─▶ strategy.reports.ask_to_stop()
              │                                                 a report with `stop`, on all workers
              └─ deadline: leaves unsaved                       BackupAndRestore saves, then leave()

If no training is under way, such as after an interrupted run, the earlier handlers are restored and get the signal.

Ctrl-C (SIGINT) is also a request where Python would raise KeyboardInterrupt. A second Ctrl-C ends the process at once.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import logging

from tfdist.exit_codes import PREEMPTED
from tfdist.faults.fault_deadlines import FaultTolerance, options_of
from tfdist.faults.process_exit import end_with, flush
from tfdist.run_files import is_supervised

_LEAVE_SECONDS = 10.0  # For handlers, `finally` blocks and `atexit` functions after the save.
_LEAST_LEAVE_SECONDS = 1.0  # A handler may take long.
_MAIN_SECONDS = 0.1  # For the main thread to notice that no training is under way.
_JOIN_SECONDS = 2.0
_SAME_REQUEST_SECONDS = 1.0  # A launcher and a terminal may both forward one Ctrl-C.

_installed: "_Preemption | None" = None


class LoneReports:
    """Records requests to save and leave where a strategy has no `strategy.reports` to tell its peers.

    Attributes:
      listeners: Present as in `strategy.reports`, but never called.
      asked_here: Whether this process was asked to stop.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Any], None]] = []
        self.asked_here = False

    def ask_to_stop(self) -> None:
        """Records that this process was asked to stop training, to save and to leave."""
        self.asked_here = True


@dataclasses.dataclass(eq=False)
class Watch:
    """One training run that saves and leaves after a signal such as SIGTERM; see `install`."""

    reports: Any
    is_under_way: Callable[[], bool]


def install(strategy: Any, reports: Any = None, is_under_way: Callable[[], bool] = lambda: True) -> Watch | None:
    """Makes the signals of `strategy.fault_tolerance`, of `tfdist run` and Ctrl-C ask all workers to save and leave.

    Ctrl-C keeps its usual effect in an interactive session, where the user continues after it, and where the program
    handles or ignores it. A handler that the program sets later gets its signal alone, except under `tfdist run`.

    The signal is noticed at once, also while the main thread waits inside TensorFlow. If no save comes within
    `preemption_timeout_seconds`, for example because a worker is gone, the process still leaves with `PREEMPTED`. It
    then loses the steps since the newest backup. The earlier handlers are called when the process leaves.

    Call this function in the main thread. In other threads, where Python accepts no signal handlers, it does nothing,
    and logs a warning if the strategy has reports. Training runs may be nested: the first run sets the deadlines, and
    every installed run is asked to stop.

    Args:
      strategy: The strategy of the training run.
      reports: The reports that are asked to stop, `strategy.reports` if None.
      is_under_way: Returns whether the training still runs; called in the main thread. If no run is under way, such as
        after an interrupt, the earlier handlers get the signal.

    Returns:
      The watch that `uninstall` takes, or `None` outside of the main thread.
    """
    global _installed
    if threading.current_thread() is not threading.main_thread():
        if not isinstance(reports, LoneReports):
            logging.warning("Preemption is not handled: signal handlers can only be set in the main thread.")
        return None
    if _installed is None:
        _installed = _Preemption(options_of(strategy))
    return _installed.watch(Watch(reports or strategy.reports, is_under_way))


def uninstall(watch: Watch | None = None) -> None:
    """Ends what `install` began for a training run, by default the newest: signals no longer make it save and leave.

    Call it in the main thread, when nothing is left to save. The end of the last watch restores the earlier handlers. A
    signal that came too late for a common end is raised again for these handlers, and may end the process.
    """
    if _installed is not None and not _installed.unwatch(watch):
        _close()


def _close() -> None:
    global _installed
    closing, _installed = _installed, None
    if closing is not None:
        closing.close()


def _forget_in_child() -> None:
    """Restores the earlier handlers in a forked child; otherwise the child's signals would reach only its parent.

    Also closes the inherited pipe, through which the child could end the parent's thread.
    """
    global _installed
    forgotten, _installed = _installed, None
    if forgotten is not None:
        forgotten.give_back()
        forgotten.close_pipe()


os.register_at_fork(after_in_child=_forget_in_child)


def leave(refusals: Sequence[str] = (), place: str = "") -> NoReturn:
    """Leaves the process with `PREEMPTED` after a save, successful or not.

    Calls the earlier handlers, then raises `SystemExit`, so that `finally` blocks and `atexit` functions run. The
    process ends even if they are still running after 10 seconds, or sooner at the deadline of the signal, since the
    scheduler would then kill it.

    Args:
      refusals: The reasons why the save failed; empty after a successful save.
      place: The folder of the backup, for the message.
    """
    _after(_LEAVE_SECONDS if _installed is None else _installed.leave_seconds, lambda: os._exit(PREEMPTED))
    if refusals:
        logging.error(
            "Leaving with exit code %d and WITHOUT a save: %s. The next start continues from the newest backup before; "
            "the work since then is lost.",
            PREEMPTED,
            "; ".join(refusals),
        )
    else:
        to = f" to {place}" if place else ""
        logging.warning(
            "Saved%s, and leaving with exit code %d. To continue, start the same command again.", to, PREEMPTED
        )
    if _installed is not None:
        _installed.saved()
    end_with(PREEMPTED)
    raise SystemExit(PREEMPTED)


def give_signals_back() -> None:
    """Restores the SIGTERM handler: when TensorFlow joins a cluster, it sets a handler that only notes the signal.

    The user's handler applies again, or else the default, which ends the process. Works in the main thread only.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)  # TensorFlow's handler is unknown to Python.
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


class _Preemption:
    """Catches the signals of a preemption, and asks all installed training runs to save and leave."""

    def __init__(self, options: FaultTolerance):
        self._options = options
        self._signums = set(options.preemption_signals)
        if self._signums and is_supervised():  # `tfdist run` always sends SIGTERM.
            self._signums.add(signal.SIGTERM)
        if self._signums and _is_interrupt_free():
            self._signums.add(signal.SIGINT)
        self._watches: list[Watch] = []
        self._timer: threading.Timer | None = None
        self._signum: int | None = None
        self._noticed: int | None = None  # By the main thread. The other thread may notice a signal later.
        self._asked_time = 0.0
        self._deadline = math.inf
        self._is_asked = self._is_answered = False
        self._closing = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python writes the number of each arriving signal to this pipe, in any thread, without holding a lock.
        self._earlier_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="tfdist-preemption", daemon=True)
        self._thread.start()
        self._earlier: Mapping[int, Any] = {signum: signal.getsignal(signum) for signum in self._signums}
        for signum in self._signums:
            signal.signal(signum, self._on_main)

    def watch(self, watch: Watch) -> Watch:
        self._watches.append(watch)
        watch.reports.listeners.append(self._on_report)
        if self._is_asked:
            watch.reports.ask_to_stop()
        return watch

    def unwatch(self, watch: Watch | None) -> bool:
        """Stops asking a training run to save and leave; returns whether another installed run is left."""
        watch = watch or self._watches[-1]
        if watch in self._watches:
            self._watches.remove(watch)
            watch.reports.listeners.remove(self._on_report)
        return bool(self._watches)

    def give_back(self) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._earlier_fd, warn_on_full_buffer=False)

    def close_pipe(self) -> None:
        os.close(self._writer)
        os.close(self._reader)

    def close(self) -> None:
        self.give_back()
        self._closing.set()
        os.write(self._writer, b"\0")
        self._thread.join(_JOIN_SECONDS)  # It may wait for a lock of the interrupted main thread.
        if not self._thread.is_alive():
            self.close_pipe()
        while self._watches:
            self.unwatch(None)
        self._stop_clock()
        signum = self._signum if self._signum is not None else self._noticed
        if signum is not None and not self._is_answered:
            signal.raise_signal(signum)

    @property
    def leave_seconds(self) -> float:
        """Seconds from now for handlers and for functions that run at the exit of the process."""
        return max(min(_LEAVE_SECONDS, self._deadline - time.monotonic()), _LEAST_LEAVE_SECONDS)

    def saved(self) -> None:
        self._is_answered = True
        self._stop_clock()
        self._call_earlier()

    def _read(self) -> None:
        while True:
            for signum in os.read(self._reader, 64):
                if signum == 0:  # `close` writes 0, after all signals.
                    return
                if self._earlier_fd != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._earlier_fd, bytes([signum]))
                if not self._answers(signum):
                    continue
                if self._signum is None:
                    self._on_signal(signum)
                elif signum == signal.SIGINT:
                    self._on_interrupt_again()

    def _answers(self, signum: int) -> bool:
        """Returns whether a signal is a request. If not, the program has set a handler of its own for it since."""
        return signum in self._signums and (is_supervised() or signal.getsignal(signum) == self._on_main)

    def _on_main(self, signum: int, frame: Any) -> None:
        """The signal handler: if no training is under way, restores the earlier handlers, which then get the signal."""
        del frame
        self._noticed = signum
        if self._watches and not self._is_answered and not any(watch.is_under_way() for watch in self._watches):
            _close()

    def _on_interrupt_again(self) -> None:
        if time.monotonic() - self._asked_time >= _SAME_REQUEST_SECONDS:
            logging.error("Ctrl-C again: leaving at once. Work since the newest backup is lost.")
            flush()
            os._exit(128 + signal.SIGINT)

    def _on_signal(self, signum: int) -> None:
        self._signum, self._asked_time = signum, time.monotonic()
        if self._closing.wait(_MAIN_SECONDS):  # The main thread raises the signal again.
            return
        seconds = self._options.preemption_timeout_seconds
        name = signal.Signals(signum).name
        again = "; press Ctrl-C again to end this process at once" if signum == signal.SIGINT else ""
        logging.warning(
            "%s: all workers save after the next step (in a custom loop on several workers: at the second save from "
            "now) and leave within %g s%s.",
            *(name, seconds, again),
        )
        self._start_clock()
        self._is_asked = True
        for watch in list(self._watches):
            watch.reports.ask_to_stop()

    def _on_report(self, report: Any) -> None:
        if report.stop:  # Also on workers without a signal.
            self._start_clock()

    def _start_clock(self) -> None:
        if self._timer is None:
            seconds = self._options.preemption_timeout_seconds
            self._deadline = time.monotonic() + seconds
            self._timer = _after(seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        _after(_LEAST_LEAVE_SECONDS, lambda: os._exit(PREEMPTED))
        logging.error(
            "No save within %g s after the signal: leaving with exit code %d. Work since the newest backup is lost.",
            self._options.preemption_timeout_seconds,
            PREEMPTED,
        )
        self._call_earlier()
        os._exit(PREEMPTED)

    def _call_earlier(self) -> None:
        handler = self._earlier.get(self._signum) if self._signum is not None else None
        if callable(handler) and handler is not signal.default_int_handler:
            try:
                handler(self._signum, None)
            except BaseException as error:  # Also SystemExit: this process is leaving already.
                logging.info("The handler of signal %s raised %r.", self._signum, error)
        flush()


def _is_interrupt_free() -> bool:
    """Returns whether Ctrl-C would end this program by KeyboardInterrupt, in a session that is not interactive."""
    is_interactive = sys.flags.interactive or hasattr(sys, "ps1")  # IPython and notebooks have `sys.ps1` too.
    return not is_interactive and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _after(seconds: float, function: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer
