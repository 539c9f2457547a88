"""How long a worker waits for the others, and for itself."""

import dataclasses
import math
import os
import signal
from collections.abc import Mapping
from typing import Any

__all__ = ["FaultTolerance", "options_of"]

_LONGEST_SECONDS = 2_000_000  # TensorFlow counts milliseconds in 32 bits.


@dataclasses.dataclass(frozen=True)
class FaultTolerance:
    """The deadlines of a job, the same on all workers.

    An environment variable named after a number, such as TFDIST_START_TIMEOUT_SECONDS, comes before what a script says.

    Args:
      start_timeout_seconds: For all workers to come: to the strategy, and to the first `fit` of a model. The error
        names who is missing.
      heartbeat_timeout_seconds: After which a worker that is frozen or cut off is given up. One that is killed is
        noticed at once.
      stall_timeout_seconds: How long `fit` may stay where it is, in a step or between two, before the watchdog ends
        the job; see `tfdist.faults.watchdog`. A first step, which traces, may take longer, but not what Keras reads
        before it. `None`: learned from the run's own steps. `math.inf`: for ever.
      shutdown_timeout_seconds: How long a worker that is done waits for the others, so that all leave together. One
        that is still busy then, as a chief that saves alone, goes on alone, and the others leave with exit code 0.
      preemption_signals: Which signals ask to save and leave, where `tfdist.callbacks.BackupAndRestore` is used. Under
        `tfdist run` SIGTERM does besides, by which it asks its workers. So does Ctrl-C (SIGINT), unless the program
        handles it or the session is interactive. An empty tuple switches all of them off.
      preemption_timeout_seconds: From the signal to the end of the process, saved or not.

    Raises:
      ValueError: If a number is not positive and finite (`stall_timeout_seconds` may be infinite), or a signal is none.
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
                "FaultTolerance needs preemption_signals as a tuple, such as (signal.SIGTERM,), got "
                f"{self.preemption_signals!r}. Put a comma and parentheses around a single one."
            )
        for signum in self.preemption_signals:
            if (
                not isinstance(signum, int)
                or signum not in signal.valid_signals()
                or signum in (signal.SIGKILL, signal.SIGSTOP)
            ):
                raise ValueError(
                    f"FaultTolerance needs preemption_signals that a process can catch, got {signum!r}. Give numbers "
                    "as the module `signal` has them."
                )

    def with_environment(self, environ: Mapping[str, str] | None = None) -> "FaultTolerance":
        """These options, with numbers that the environment gives.

        Args:
          environ: The environment, `os.environ` if None.

        Raises:
          ValueError: If a variable is not such a number.
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
    """The deadlines that hold under a strategy, also one that is given none."""
    return getattr(strategy, "fault_tolerance", None) or FaultTolerance().with_environment()


def _numbers() -> list[str]:
    return [field.name for field in dataclasses.fields(FaultTolerance) if field.name.endswith("_seconds")]
