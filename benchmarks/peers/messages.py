"""What the processes of a benchmark say to each other."""

import dataclasses
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
    """Seconds of each step, and what the interface carried meanwhile."""

    step_seconds: list[float]
    sent_bytes: int
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a worker raised, in a line, and its traceback."""

    summary: str
    trace: str
