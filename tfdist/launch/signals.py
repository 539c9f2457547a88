"""Which signals ask a process of this package to stop."""

import signal

__all__ = ["stop_signals"]


def stop_signals() -> list[int]:
    """Those that ask this process to stop, without what it is to ignore: `nohup` and background jobs say so."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [signum for signum in asked if signal.getsignal(signum) != signal.SIG_IGN]
