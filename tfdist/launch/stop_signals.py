"""Signals that ask a `tfdist` command to stop, and the signal that reports the end of its child processes."""

import signal
import threading


def stop_signals() -> list[int]:
    """Returns the signals that ask this process to stop, except ignored ones, as under `nohup` and in background jobs.

    Schedulers can be configured to announce the end of a job with any of these signals, Slurm often with SIGUSR1.
    """
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return [signum for signum in asked if signal.getsignal(signum) != signal.SIG_IGN]


def hear_of_children() -> None:
    """Resets an ignored SIGCHLD, so that this process and its children learn the exit codes of their own children.

    A parent that ignores SIGCHLD passes this setting on. The kernel then discards the exit codes of children at once.
    Has an effect only in the main thread, as Python sets signal handlers only there.
    """
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if is_ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
