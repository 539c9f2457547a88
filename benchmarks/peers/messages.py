"""Messages between the processes of a benchmark."""

import dataclasses
import itertools
from typing import Any


@dataclasses.dataclass(frozen=True)
class Order:
    """An order to a worker: train `steps` steps that count, after `warmup` steps that do not.

    An emulated accelerator needs `dilation` times its usual time. With `renew` the worker makes its models anew, as at
    the begin of a program.
    """

    peer: str
    options: tuple[tuple[str, Any], ...]
    model: str
    alone: bool
    warmup: int
    steps: int
    dilation: float = 1.0
    renew: bool = False


@dataclasses.dataclass(frozen=True)
class Trials:
    """The steps in which `compression="auto"` chose codecs, without the first step, which is traced.

    Attributes:
      seconds: Time of these steps.
      steps: Their number.
      reason: Why tfdist chose the codecs; empty if it is not told.
    """

    seconds: float
    steps: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The times at which steps ended, and the traffic of the interface.

    Attributes:
      ends: When the first step began, and when each step ended, by the machine's monotonic clock.
      sent_bytes: Bytes sent in all steps.
      received_bytes: Bytes received in all steps.
      memory_bytes: Resident memory of the worker after the steps, without what it had before it made a model.
      peak_memory_bytes: The same at its largest since the model was made.
      processor_seconds: Processor time of the worker in all steps.
      busy_seconds: Time in which the processors of the machine were busy in all steps, added over the processors.
      trials: Steps that chose codecs before these, if there were any.
    """

    ends: list[float]
    sent_bytes: int
    received_bytes: int
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    processor_seconds: float = 0.0
    busy_seconds: float = 0.0
    trials: Trials | None = None

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step on this worker."""
        return [after - before for before, after in itertools.pairwise(self.ends)]


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception of a worker: its summary in one line, and its traceback."""

    summary: str
    trace: str
