"""A callback that logs how evenly the replicas share the work of a step."""

import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.data.weak_callbacks import listen
from tfdist.strategies.foreign_keras import ForKerasModels
from tfdist.telemetry.step_tally import ReplicaWork


class Balance(ForKerasModels, keras.callbacks.Callback):
    """Adds to the logs of each epoch how evenly the replicas share the work. Put it before callbacks that write logs.

    - `rows_per_second`: rows of all replicas together
    - `step_seconds`: mean time from the end of one step to the end of the next
    - `imbalance`: the longest compute time of a step divided by the mean of all replicas; 1 is perfect
    - `wait_share`: the share of time in which replicas do not compute: exchange, input, and waiting for stragglers

    The first step of an epoch is left out. If an epoch has only one step, that step is measured from the beginning of
    the epoch, including the start of the input. `sharding.statistics()` has the last step by replica.
    """

    _end_listening: Callable[[], None] | None = None

    def get_state(self) -> dict[str, Any]:
        """Returns no state: clock readings of one process mean nothing to the next one."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, since `get_state` returns no state."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to listen to the reports of training steps, which have the times of the replicas."""
        Balance.on_train_end(self)  # The callback still listens if an earlier `fit` failed.
        reports = getattr(self.model.distribute_strategy, "reports", None)
        if reports is not None:
            self._end_listening = listen(reports.listeners, self._add)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops listening to the reports of training steps."""
        if self._end_listening is not None:
            self._end_listening()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the sums of times and rows of the steps of an epoch."""
        self._began = self._first_end = self._last_end = time.monotonic()
        self._first = self._later = ReplicaWork()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `rows_per_second`, `step_seconds`, `imbalance` and `wait_share` of the epoch to `logs`."""
        if logs is None or not self._first.steps:
            return
        is_only = not self._later.steps
        work = self._first if is_only else self._later
        seconds = self._last_end - (self._began if is_only else self._first_end)
        logs["rows_per_second"] = work.rows / seconds
        logs["step_seconds"] = seconds / work.steps
        logs["imbalance"] = work.imbalance
        logs["wait_share"] = max(1 - work.mean_seconds / seconds, 0.0)

    def _add(self, report: Any) -> None:
        work, self._last_end = ReplicaWork.of(report), time.monotonic()
        if self._first.steps:
            self._later += work
        else:
            self._first, self._first_end = work, self._last_end
