"""Synchronizes replicas at the end of each epoch of `fit`, before other callbacks save, compare or stop."""

import weakref
from typing import Any

import keras
import numpy as np


class SynchronizeEpochs(keras.callbacks.Callback):
    """The first callback of a `fit` under a strategy that trains by local steps.

    Args:
      strategy: The strategy.
    """

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy = weakref.ref(strategy)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Synchronizes, and averages the logs, which a step of the user makes on each worker by itself."""
        strategy = self._strategy()
        if strategy is None:
            return
        strategy.synchronize()
        own = {name: value for name, value in (logs or {}).items() if np.ndim(value) == 0}
        if own:
            # As bits, since workers exchange integers outside of steps.
            bits = np.array([float(value) for value in own.values()]).view(np.int64).tolist()
            everyone = np.array(strategy.extended.of_all_workers(bits), np.int64).view(np.float64)
            logs.update(zip(own, everyone.mean(axis=0).tolist(), strict=True))  # type: ignore[union-attr]


def put_first(callbacks: Any, strategy: Any) -> None:
    """Makes a `SynchronizeEpochs` the first callback of a list, if the strategy trains by local steps."""
    if getattr(strategy.extended, "local_training", None) is not None:
        others = [each for each in callbacks.callbacks if not isinstance(each, SynchronizeEpochs)]
        callbacks.callbacks = [SynchronizeEpochs(strategy), *others]
