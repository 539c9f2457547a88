"""Policy: how fast a worker trains, and what it spends its time on, by its newest records. No files and no clock."""

import collections
import dataclasses
from collections.abc import Mapping

from tfdist.events.phase_names import CALLBACK, COMPUTE, EXCHANGE, INPUT, OWN_LOOP
from tfdist.events.time_record import TimeRecord

RECENT_SECONDS = 10.0
"""Rates and parts are those of about this much time."""

IN_STEPS = (INPUT, COMPUTE, EXCHANGE)
"""The phases of a training step."""

_OF_TRAINING = (*IN_STEPS, OWN_LOOP, CALLBACK)
_MOST_POINTS = 64
_LITTLE = 0.1  # A loop of the script's own that runs `model.train_step` reports its steps, and has little other time.


@dataclasses.dataclass(frozen=True)
class Recent:
    """How a worker trained lately.

    Attributes:
      steps_per_second: Steps for each second of training, without validation and saves; `None` before the second step.
      parts: Parts of that time for computation, exchanges and input. The rest is of callbacks and Python. Empty in a
        training loop of the script's own, where they are not known.
    """

    steps_per_second: float | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


NOT_RECENT = Recent()
"""A worker that has not trained lately."""


class RecentSteps:
    """The newest records of a worker with different numbers of steps, from which `Recent` follows."""

    def __init__(self) -> None:
        self._points: collections.deque[TimeRecord] = collections.deque(maxlen=_MOST_POINTS)
        self._steps: int | None = None

    def add(self, record: TimeRecord) -> None:
        """Adds the newest record. The first record only begins the count, since a trace may belong to its last step."""
        if self._steps is not None and record.steps < self._steps:
            self._points.clear()  # Another `fit` continues from an earlier backup.
        if self._steps is not None and record.steps != self._steps:
            self._points.append(record)
        self._steps = record.steps
        while len(self._points) > 2 and self._points[-1].time - self._points[1].time >= RECENT_SECONDS:
            self._points.popleft()

    @property
    def recent(self) -> Recent:
        """Rate and parts between the newest record and one from `RECENT_SECONDS` before, or at least a step before."""
        if len(self._points) < 2:
            return NOT_RECENT
        old, new = self._points[0], self._points[-1]
        spent = {phase: max(0.0, new.seconds[phase] - old.seconds[phase]) for phase in _OF_TRAINING}
        seconds = sum(spent.values())
        if not seconds:
            return NOT_RECENT
        parts = {} if spent[OWN_LOOP] > _LITTLE * seconds else {phase: spent[phase] / seconds for phase in IN_STEPS}
        return Recent((new.steps - old.steps) / seconds, parts)
