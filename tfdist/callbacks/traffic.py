"""A callback that logs the traffic of the gradient exchange."""

import dataclasses
from typing import Any

import keras

from tfdist.strategies.foreign_keras import ForKerasModels


class Traffic(ForKerasModels, keras.callbacks.Callback):
    """Adds the traffic of gradients and the effect of compression to the logs. Put it before callbacks that write logs.

    - `sent_bytes`: bytes of gradients that this worker sends per step, as the mean of the epoch
    - `compression_ratio`: bytes without compression divided by bytes sent
    - `encode_seconds`, `exchange_seconds`: seconds per step that a replica spends on coding and on exchanging, the mean
      of the epoch summed over buckets. Logged only under a strategy with `time_exchanges=True`
    - `residual_norm`: the Euclidean norm of this worker's residuals; costs one pass over the residuals

    If `BackupAndRestore` restarts within an epoch, the sums of that epoch continue.

    The callback adds nothing under a strategy without `compression`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch = -1
        self._before: Any = None  # Traffic before the epoch; `None` between epochs.
        self._restored: dict[str, Any] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the gradient traffic so far, so that `on_epoch_end` can subtract it."""
        communication = self._communication()
        self._epoch = epoch
        self._before = communication and communication.traffic()
        if self._restored is not None and self._restored["epoch"] != epoch:
            self._restored = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the gradient traffic of the epoch to `logs`."""
        communication = self._communication()
        if communication is not None and logs is not None:
            traffic = self._of_epoch(communication)
            logs["sent_bytes"] = traffic.sent_bytes_per_step
            logs["compression_ratio"] = traffic.ratio
            if traffic.encode_seconds is not None:
                logs["encode_seconds"] = traffic.encode_seconds / max(traffic.steps, 1)
                logs["exchange_seconds"] = traffic.exchange_seconds / max(traffic.steps, 1)
            logs["residual_norm"] = self._residual_norm(communication)
        self._before = self._restored = None

    def get_state(self) -> dict[str, Any] | None:
        """Returns the traffic of the running epoch for a backup; `None` between epochs.

        Costs one pass over the residuals.
        """
        communication = self._communication()
        if communication is None or self._before is None:
            return None
        traffic = dataclasses.asdict(self._of_epoch(communication))
        return {"epoch": self._epoch, "traffic": traffic, "residual_norm": self._residual_norm(communication)}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Restores the traffic of an epoch from a backup, if that epoch continues in this process."""
        self._restored = state

    def _of_epoch(self, communication: Any) -> Any:
        traffic = communication.traffic() - self._before
        return traffic if self._restored is None else traffic + type(traffic)(**self._restored["traffic"])

    def _residual_norm(self, communication: Any) -> float:
        # Compression restores the residuals in the first step of this process.
        has_sent = (communication.traffic() - self._before).steps > 0
        return self._restored["residual_norm"] if self._restored and not has_sent else communication.residual_norm()

    def _communication(self) -> Any:
        return getattr(self.model.distribute_strategy, "communication", None)
