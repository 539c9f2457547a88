"""What the processes of a benchmark say to each other."""

import dataclasses
import itertools
from typing import Any


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker shall do: train `steps` steps that count, after `warmup` that do not."""

    peer: str
    options: tuple[tuple[str, Any], ...]
    model: str
    alone: bool
    warmup: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """When each step ended, and what the interface carried meanwhile.

    Attributes:
      ends: By the monotonic clock of the machine, which all its processes share; first when the first step began.
      sent_bytes: In all steps.
      received_bytes: Alike.
    """

    ends: list[float]
    sent_bytes: int
    received_bytes: int

    @property
    def step_seconds(self) -> list[float]:
        """What each step took this worker."""
        return [after - before for before, after in itertools.pairwise(self.ends)]


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a worker raised, in a line, and its traceback."""

    summary: str
    trace: str
