"""What the gradient exchange sends, as Keras logs."""

from typing import Any

import keras

from tfdist.strategies.foreign_keras import ForKerasModels


class Traffic(ForKerasModels, keras.callbacks.Callback):
    """Adds to the logs of each epoch what compression did; put it before callbacks that write logs.

    - `sent_bytes`: what this worker sent for gradients in a step, a mean over the epoch
    - `compression_ratio`: how many times less that is than uncompressed
    - `encode_seconds`, `exchange_seconds`, if `strategy.communication.timed` was set before the first step: what a
      replica spent on coding and on exchanging in a step, a mean over the epoch, added up over buckets
    - `residual_norm`: the Euclidean norm of what this worker has left behind, to be sent later; costs a pass over it

    Under a strategy without `compression` it adds nothing.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers what was sent before the epoch."""
        communication = self._communication()
        self._before = communication and communication.traffic()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to `logs`."""
        communication = self._communication()
        if communication is None or logs is None:
            return
        traffic = communication.traffic() - self._before
        logs["sent_bytes"] = traffic.sent_bytes_per_step
        logs["compression_ratio"] = traffic.ratio
        if traffic.encode_seconds is not None:
            logs["encode_seconds"] = traffic.encode_seconds / max(traffic.steps, 1)
            logs["exchange_seconds"] = traffic.exchange_seconds / max(traffic.steps, 1)
        logs["residual_norm"] = communication.residual_norm()

    def _communication(self) -> Any:
        return getattr(self.model.distribute_strategy, "communication", None)
