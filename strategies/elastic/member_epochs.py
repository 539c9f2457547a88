"""Synchronizes the living workers at the end of each epoch of `fit`, before other callbacks save, compare or stop."""

import weakref
from typing import Any

import keras


class SynchronizeMembers(keras.callbacks.Callback):
    """The first callback of a `fit` under a strategy that goes on without lost workers.

    Args:
      elastic: The `ElasticTraining` of the strategy.
    """

    def __init__(self, elastic: Any):
        super().__init__()
        self._elastic = weakref.ref(elastic)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Synchronizes, and averages the logs over all members."""
        if (elastic := self._elastic()) is not None:
            elastic.end_epoch(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the `fit`; on worker 0 for all workers."""
        if (elastic := self._elastic()) is not None:
            elastic.end_fit()
