"""How far a program and its present `fit` have come in training: the numbers that each commit records."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.backup.serialization import apart, decode, encode, with_arrays


@dataclasses.dataclass(frozen=True)
class FitProgress:
    """How far a program and its present `fit` have come in training, as a commit records it to continue there.

    Attributes:
      fit: Number of `fit`s that the program has finished.
      steps: Number of steps that all `fit`s have trained.
      epoch: Number of epochs that the present `fit` has finished.
      batch: Number of batches of the present epoch that were trained on; 0 between two epochs.
      consumed: Number of batches that were read from the present iterator.
      stops: Whether a callback has stopped the `fit`.
      logs: Logs of the last step.
      steps_per_epoch: Number of batches of an epoch, if known.
      steps_per_execution: The argument of `compile`.
      replicas: Number of replicas of all workers.
    """

    fit: int
    steps: int
    epoch: int
    batch: int
    consumed: int
    stops: bool
    logs: Any
    steps_per_epoch: int | None
    steps_per_execution: int
    replicas: int

    def is_beyond(self, last: float) -> bool:
        """Whether the `fit` has come further than the end of the epoch numbered `last`, so nothing is left to train."""
        return (self.epoch, self.batch) > (last, 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the progress as JSON. Values of the logs that cannot be saved become `None`: logs are only shown."""
        arrays: list[np.ndarray] = []
        logs = dict(self.logs) if self.logs else self.logs
        for name in logs or ():
            try:
                encode(logs[name], [])
            except TypeError:
                logs[name] = None
        return {**vars(self), "logs": with_arrays(encode(logs, arrays), arrays)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "FitProgress":
        """Returns the progress of which `to_json` returned the JSON."""
        return cls(**{**saved, "logs": decode(*apart(saved["logs"]))})
