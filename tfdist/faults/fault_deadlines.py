"""`tfdist.FaultTolerance`, the deadlines of a job: for the start, heartbeats, stalls, preemption and the end."""

import dataclasses
import math
import os
import signal
from collections.abc import Mapping
from typing import Any

_LONGEST_SECONDS = 2_000_000  # TensorFlow counts milliseconds in 32 bits.


@dataclasses.dataclass(frozen=True)
class FaultTolerance:
    """The deadlines of a job for lost, stalled, preempted and finished workers, the same on all workers.

    An environment variable for each number, such as TFDIST_START_TIMEOUT_SECONDS, overrides the argument in the script.

    Args:
      start_timeout_seconds: Time for all workers to reach the strategy, and the first `fit` of a model. The error names
        the missing workers.
      heartbeat_timeout_seconds: Time after which a frozen or disconnected worker counts as lost. A killed worker is
        noticed at once.
      stall_timeout_seconds: How long `fit` may make no progress, in a step or between two steps, before the watchdog
        ends the job; see `tfdist.faults.watchdog`. The first step may take longer, since it traces; Keras' reads before
        that step may not. `None` derives the limit from the run's own steps. `math.inf` sets no limit.
      shutdown_timeout_seconds: How long a finished worker waits for its peers, so that all leave together. A peer that
        is still busy then, such as a chief that saves alone, continues alone. The finished workers exit with code 0.
      preemption_signals: The signals that ask to save and leave, where `tfdist.callbacks.BackupAndRestore` is used.
        SIGTERM is added under `tfdist run`, which sends it to its workers. Ctrl-C (SIGINT) is added unless the program
        handles it or the session is interactive. An empty tuple disables all of them.
      preemption_timeout_seconds: Time from the signal to the end of the process, with or without a save.

    Raises:
      ValueError: If a number is not positive and finite (`math.inf` is valid for stalls), or a signal cannot be caught.
    """

    start_timeout_seconds: float = 300.0
    heartbeat_timeout_seconds: float = 10.0
    stall_timeout_seconds: float | None = None
    shutdown_timeout_seconds: float = 60.0
    preemption_signals: tuple[int, ...] = (signal.SIGTERM,)
    preemption_timeout_seconds: float = 25.0  # Kubernetes and Slurm give 30 s.

    def __post_init__(self) -> None:
        for name in _numbers():
            value = getattr(self, name)
            if name == "stall_timeout_seconds" and value in (None, math.inf):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST_SECONDS:
                raise ValueError(
                    f"FaultTolerance needs a {name} above 0 and up to {_LONGEST_SECONDS} seconds, got {value!r}."
                )
        if not isinstance(self.preemption_signals, tuple | list | set | frozenset):
            raise ValueError(
                f"FaultTolerance needs preemption_signals as a tuple, got {self.preemption_signals!r}. "
                "Give a single signal as a tuple too, such as (signal.SIGTERM,)."
            )
        for signum in self.preemption_signals:
            if (
                not isinstance(signum, int)
                or signum not in signal.valid_signals()
                or signum in (signal.SIGKILL, signal.SIGSTOP)
            ):
                raise ValueError(
                    f"FaultTolerance needs preemption_signals that a process can catch, got {signum!r}. Give signals "
                    "of the module `signal` other than SIGKILL and SIGSTOP."
                )

    def with_environment(self, environ: Mapping[str, str] | None = None) -> "FaultTolerance":
        """Returns these deadlines, replaced by the numbers that environment variables (`os.environ` if None) set.

        Raises:
          ValueError: If a variable is not a valid number of seconds.
        """
        environ = os.environ if environ is None else environ
        given: dict[str, Any] = {}
        for name in _numbers():
            variable = f"TFDIST_{name.upper()}"
            if environ.get(variable, "").strip():
                try:
                    given[name] = float(environ[variable])
                    dataclasses.replace(self, **{name: given[name]})
                except ValueError as error:
                    raise ValueError(
                        f"The environment variable {variable} must be a number of seconds above 0, got "
                        f"{environ[variable]!r}. Correct it or leave it out."
                    ) from error
        return dataclasses.replace(self, **given)


def options_of(strategy: Any) -> FaultTolerance:
    """Returns the deadlines of a strategy, or the defaults if the strategy has none."""
    return getattr(strategy, "fault_tolerance", None) or FaultTolerance().with_environment()


def _numbers() -> list[str]:
    return [field.name for field in dataclasses.fields(FaultTolerance) if field.name.endswith("_seconds")]
