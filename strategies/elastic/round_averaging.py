"""The result of a round: worker 0 averages the weights, applies the outer optimizer and counts the rows."""

import weakref
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfdist.strategies.elastic.outer_step import OuterStep
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution, RowLedger, average_by_rows, steps_of_equal_time
from tfdist.strategies.local_steps.synchronization import Synchronization


class RoundAveraging:
    """Averages the weights of rounds on worker 0.

    Args:
      synchronization: How to synchronize.
      workers: Number of workers of the job.

    Attributes:
      ledger: The counts of rows. Other workers have a copy.
    """

    def __init__(self, synchronization: Synchronization, workers: int):
        self._synchronization, self._workers = synchronization, workers
        self._outer: tuple[weakref.ref[keras.Model], OuterStep] | None = None
        self._restored: Mapping[str, np.ndarray] = {}
        self.ledger = RowLedger()

    def begin(self, model: keras.Model, trainable: list[np.ndarray]) -> None:
        """Notes the trainable weights of a model at the beginning of a round.

        The `OuterStep` of a model keeps its momentum from one `fit` to the next.
        """
        if self._outer is None or self._outer[0]() is not model:
            self._outer = weakref.ref(model), OuterStep(self._synchronization, trainable, self._restored)
            self._restored = {}
        self._outer[1].begin(trainable)

    def averaged(
        self,
        fit: int,
        own: Contribution,
        ends: list[np.ndarray],
        parts: Mapping[int, Message],
        trainable: int,
        executions: int,
    ) -> Message:
        """Returns the answer to the members of a round: the next weights.

        Args:
          fit: Number of the `fit`.
          own: The work of worker 0.
          ends: Its weights, the trainable ones first.
          parts: The parts of the members.
          trainable: Number of trainable weights.
          executions: Number of executions of a round.
        """
        done = {0: own} | {worker: Contribution(**part.fields["done"]) for worker, part in parts.items()}
        all_ends = {0: ends} | {worker: list(part.arrays) for worker, part in parts.items()}
        rows = {worker: each.rows for worker, each in done.items()}
        assert self._outer is not None
        following = self._outer[1].next({worker: each[:trainable] for worker, each in all_ends.items()}, rows)
        for i in range(trainable, len(ends)):
            is_float = ends[i].dtype.kind not in "iub"
            same = {worker: each[i] for worker, each in all_ends.items()}
            following.append(average_by_rows(same, rows) if is_float else ends[i])
        self.ledger.close_round(done, self._workers)
        targets = steps_of_equal_time(done, executions) if self._synchronization.equal_time else {}
        fields = {"fit": fit, "ledger": self.ledger.to_json(), "targets": sorted(targets.items())}
        return Message("weights", fields, following)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns the state of the outer optimizer and the counts of rows, for a backup."""
        values = self._restored if self._outer is None else self._outer[1].values()
        return {f"outer/{name}": value for name, value in values.items()}, self.ledger.to_json()

    def restore(self, arrays: Mapping[str, np.ndarray], counts: Mapping[str, Any]) -> None:
        """Restores what `state` has returned."""
        kept = [name for name in arrays if name.startswith("outer/")]
        self._restored = {name.removeprefix("outer/"): arrays[name] for name in kept}
        self._outer = None  # The next round makes it.
        self.ledger = RowLedger.from_json(counts)


def averaged_logs(parts: Mapping[int, Message]) -> dict[str, float]:
    """Returns the logs that all members have, averaged by the rows of the epoch; equally if nobody tells rows."""
    rows = {worker: part.fields["rows"] for worker, part in parts.items()}
    names = [name for name in parts[0].fields["logs"] if all(name in part.fields["logs"] for part in parts.values())]
    return {
        name: float(average_by_rows({w: np.asarray(part.fields["logs"][name]) for w, part in parts.items()}, rows))
        for name in names
    }
