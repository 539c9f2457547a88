"""The callback of a strategy that runs before all others of a `fit`, to make the weights of all replicas equal."""

from typing import Any

import keras

from tfdist.strategies.elastic.member_epochs import SynchronizeMembers
from tfdist.strategies.local_steps.epoch_end import SynchronizeEpochs


def put_first(callbacks: Any, strategy: Any) -> None:
    """Makes the callback that synchronizes the first one of a list, if the strategy trains by local steps."""
    elastic = getattr(strategy, "elastic", None)
    first: keras.callbacks.Callback | None = None if elastic is None else SynchronizeMembers(elastic)
    if getattr(strategy.extended, "local_training", None) is not None:
        first = SynchronizeEpochs(strategy)
    if first is not None:
        callbacks.callbacks = [first, *(each for each in callbacks.callbacks if not isinstance(each, type(first)))]
