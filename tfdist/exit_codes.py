"""Exit codes with which a worker process of tfdist reports why it ended. Any other code is a failure of the script."""

__all__ = ["PREEMPTED", "STALLED"]

PREEMPTED = 75
"""The worker was preempted: it saved and can be started again. Equals EX_TEMPFAIL of sysexits.h."""

STALLED = 76
"""The watchdog ended the worker because the job made no progress."""
