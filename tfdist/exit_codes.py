"""How a worker process says what its end means; other codes are failures of the script itself."""

__all__ = ["PREEMPTED", "STALLED"]

PREEMPTED = 75
"""Asked to go: saved, and to be started again. EX_TEMPFAIL of sysexits.h."""

STALLED = 76
"""Ended by the watchdog, since the job made no progress."""
