"""The step of worker 0 from the average weights of a round to the next weights: none, or that of an outer optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist.strategies.elastic.round_policy import average_by_rows
from tfdist.strategies.local_steps.own_thread import apart
from tfdist.strategies.local_steps.synchronization import DiLoCo, Synchronization

_NONE: Mapping[str, np.ndarray] = {}


class OuterStep:
    """Makes the next weights from the weights of all members at the end of a round.

    Args:
      synchronization: `LocalSGD`, for the average, or `DiLoCo`, to apply the average change by its outer optimizer.
      weights: The trainable weights at the beginning.
      restored: The values of an earlier outer optimizer by name, if any. Those of another optimizer do not count.
    """

    def __init__(
        self,
        synchronization: Synchronization,
        weights: Sequence[np.ndarray],
        restored: Mapping[str, np.ndarray] = _NONE,
    ):
        self.optimizer: Any = None
        self._starts: list[Any] = []
        if isinstance(synchronization, DiLoCo):
            apart(lambda: self._make(synchronization, weights, restored))

    def _make(self, diloco: DiLoCo, weights: Sequence[np.ndarray], restored: Mapping[str, np.ndarray]) -> None:
        self._starts = [
            keras.Variable(_wide(weight), dtype=_wide(weight).dtype.name, name=f"start_{i}")
            for i, weight in enumerate(weights)
        ]
        self.optimizer = diloco.new_outer_optimizer()
        self.optimizer.build(self._starts)
        here = {name: value.shape for name, value in self.values().items()}
        if restored and {name: value.shape for name, value in restored.items()} != here:
            logging.warning("The backup is of another outer optimizer than %s, which begins anew.", self.optimizer.name)
            return
        for name, variable in self._named():
            if restored:
                variable.assign(restored[name])

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of the outer optimizer by name, for a backup."""
        return {name: np.array(variable.numpy()) for name, variable in self._named()}

    def _named(self) -> list[tuple[str, Any]]:
        """Returns the variables of the outer optimizer, by names that tell of their meaning."""
        variables = [] if self.optimizer is None else self.optimizer.variables
        return [(f"{i}/{each.name}", each) for i, each in enumerate(variables)]

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Notes the weights at the beginning of a round, which callbacks may have changed since the last one."""
        if self.optimizer is not None:
            for start, weight in zip(self._starts, weights, strict=True):
                start.assign(_wide(weight))

    def next(self, ends: Mapping[int, Sequence[np.ndarray]], rows: Mapping[int, int]) -> list[np.ndarray]:
        """Returns the next weights.

        Args:
          ends: The weights of each member at the end of the round.
          rows: The rows on which each has trained.
        """
        count = len(next(iter(ends.values())))
        if self.optimizer is None:
            return [average_by_rows({worker: own[i] for worker, own in ends.items()}, rows) for i in range(count)]
        kinds = [weight.dtype for weight in next(iter(ends.values()))]

        def apply():
            before = [start.numpy() for start in self._starts]
            changes = [
                average_by_rows({worker: start - _wide(own[i]) for worker, own in ends.items()}, rows)
                for i, start in enumerate(before)
            ]
            self.optimizer.apply([keras.ops.convert_to_tensor(change) for change in changes], self._starts)
            return [start.numpy() for start in self._starts]

        made = apart(apply)
        return [weight.astype(kind) for weight, kind in zip(made, kinds, strict=True)]


def _wide(weight: np.ndarray) -> np.ndarray:
    return weight.astype(np.float32) if weight.dtype.itemsize < 4 else weight
