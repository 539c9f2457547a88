"""Synchronizes replicas at the end of each epoch of `fit`, before other callbacks save, compare or stop."""

import time
import weakref
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist.strategies.local_steps.travel_times import is_long


class SynchronizeEpochs(keras.callbacks.Callback):
    """The first callback of a `fit` under a strategy that trains by local steps.

    Args:
      strategy: The strategy.
    """

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy = weakref.ref(strategy)
        self._begun, self._has_warned = 0.0, False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes when the epoch begins."""
        self._begun = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Synchronizes, and averages the logs, which a step of the user makes on each worker by itself."""
        strategy = self._strategy()
        if strategy is None:
            return
        self._advise(strategy.extended.local_training)
        strategy.synchronize()
        own = {name: value for name, value in (logs or {}).items() if np.ndim(value) == 0}
        if own:
            # As bits, since workers exchange integers outside of steps.
            bits = np.array([float(value) for value in own.values()]).view(np.int64).tolist()
            everyone = np.array(strategy.extended.of_all_workers(bits), np.int64).view(np.float64)
            logs.update(zip(own, everyone.mean(axis=0).tolist(), strict=True))  # type: ignore[union-attr]

    def _advise(self, training: Any) -> None:
        """Warns once in a `fit` if many steps of the epoch have waited for fragments on their way."""
        longest, waited = training.take_travel_times()
        seconds = time.monotonic() - self._begun
        if is_long(waited, seconds) and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "Steps of this worker waited %.1f s of %.1f s for fragments of DiLoCo on their way. A fragment "
                "travelled up to %.1f s, the wait for slower workers included. Raise `overlap_steps` until so many "
                "steps take longer than this, or send fewer bytes by `fragments` or `compression`.",
                *(waited, seconds, longest),
            )
