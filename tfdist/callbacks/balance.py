"""How evenly the work of a step is shared, as Keras logs."""

import time
from typing import Any

import keras
import numpy as np


class Balance(keras.callbacks.Callback):
    """Adds to the logs of each epoch how its steps were shared; put it before callbacks that write logs.

    - `rows_per_second`: of all replicas together
    - `step_seconds`: from the end of a step to the end of the next, a mean
    - `imbalance`: the longest compute time of a step over the mean of all replicas; 1 is perfect
    - `wait_share`: the part of their time that replicas do not compute: exchange, input, and waiting for slower ones

    The first step of an epoch is left out; where it is the only one, it counts from the beginning of the epoch, the
    start of its input included. `sharding.statistics()` has the last step by replica.
    """

    def get_state(self) -> dict[str, Any]:
        """Nothing: moments of one process say nothing to the next, and a backup keeps none."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing, likewise."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to listen to the steps."""
        self._reports = getattr(self.model.distribute_strategy, "reports", None)
        if self._reports is not None and self._add not in self._reports.listeners:
            self._reports.listeners.append(self._add)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends it."""
        if self._reports is not None:
            self._reports.listeners.remove(self._add)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts from nothing."""
        self._began, self._ends = time.monotonic(), list[float]()
        self._first = self._totals = np.zeros(3)  # Rows; the mean and the longest of all replicas' compute times.

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to `logs`."""
        if logs is None or not self._ends:
            return
        is_only = len(self._ends) == 1
        seconds = self._ends[-1] - (self._began if is_only else self._ends[0])
        rows, mean, longest = self._first if is_only else self._totals
        logs["rows_per_second"] = rows / seconds
        logs["step_seconds"] = seconds / max(len(self._ends) - 1, 1)
        logs["imbalance"] = longest / mean if mean else 1.0
        logs["wait_share"] = max(1 - mean / seconds, 0.0)

    def _add(self, report: Any) -> None:
        seconds = report.compute_seconds
        work = np.array([report.rows.sum(), seconds.mean(), seconds.max()])
        if self._ends:
            self._totals = self._totals + work
        else:
            self._first = work
        self._ends.append(time.monotonic())
