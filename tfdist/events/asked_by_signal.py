"""Calls functions at SIGUSR2, in a thread of its own, since the main thread may run TensorFlow for long."""

import atexit
import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

_listener: "_Listener | None" = None


def call_when_asked(function: Callable[[], None]) -> bool:
    """Calls a function at each SIGUSR2 from now on, after the functions before it.

    The first call has an effect only in the main thread, as Python sets signal handlers only there, and if the program
    does not handle this signal itself.

    Args:
      function: Must return soon, since other functions and the next signal wait for it.

    Returns:
      Whether the function will be called.
    """
    global _listener
    if _listener is not None:
        _listener.functions = (*_listener.functions, function)
        return signal.getsignal(signal.SIGUSR2) is _ignore
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    _listener = _Listener(function)
    # Registered here and not at import: handlers of a fork run in this order, and `preemption` must be before.
    os.register_at_fork(after_in_child=_forget_in_child)
    atexit.register(_ignore_from_now_on)
    return True


def call_no_more(function: Callable[[], None]) -> None:
    """Ends the calls of a function at SIGUSR2. Does nothing if it is not called."""
    if _listener is not None:
        _listener.functions = tuple(each for each in _listener.functions if each != function)


def process_start(pid: int | str = "self") -> int | None:
    """Returns when a process began, in clock ticks since the start of this host, or `None` if it does not run.

    A later process may get the same number. The signal would end it.
    """
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _ignore_from_now_on() -> None:
    """Lets the exit of Python ignore the signal. Python takes its handlers back then, and the signal would kill it."""
    if signal.getsignal(signal.SIGUSR2) is _ignore:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _forget_in_child() -> None:
    """Gives a forked child the default of the signal. Otherwise its signals would reach its parent."""
    global _listener
    forgotten, _listener = _listener, None
    if forgotten is not None:
        forgotten.give_back()


class _Listener:
    """A thread that hears the signal, whatever the main thread does."""

    def __init__(self, function: Callable[[], None]):
        self.functions: tuple[Callable[[], None], ...] = (function,)
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python writes the number of each arriving signal to this pipe, in any thread, without holding a lock.
        self._earlier_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read, name="tfdist-events", daemon=True).start()
        signal.signal(signal.SIGUSR2, _ignore)
        signal.siginterrupt(signal.SIGUSR2, False)  # Libraries may not expect interrupted system calls.

    def give_back(self) -> None:
        if signal.getsignal(signal.SIGUSR2) is _ignore:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.set_wakeup_fd(self._earlier_fd, warn_on_full_buffer=False)
        os.close(self._writer)
        os.close(self._reader)

    def _read(self) -> None:
        while heard := os.read(self._reader, 64):
            if self._earlier_fd != -1:
                with contextlib.suppress(OSError):
                    os.write(self._earlier_fd, heard)
            # Since then, the program may have set a handler of its own.
            if signal.SIGUSR2 in heard and signal.getsignal(signal.SIGUSR2) is _ignore:
                for function in self.functions:
                    function()


def _ignore(signum: int, frame: Any) -> None:
    """The handler of SIGUSR2, which the thread answers."""
