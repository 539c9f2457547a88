"""Hands the batches of several steps to `tf.data` in one call, since each call into Python waits for its lock."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tfdist.data.batch_assignment import BatchAssignment

EXAMPLES_TOGETHER = 4096
_SECONDS_TOGETHER = 0.003  # Longest time to collect batches, since training may wait for the first of them.


class When(NamedTuple):
    """The position of a batch in training.

    Attributes:
      epoch: The epoch of the batch.
      begins: The epoch that begins after the batch if it is the last of an epoch, else 0.
    """

    epoch: int
    begins: int


Asked = Iterator[tuple[When, np.ndarray]]  # Batches as indices of examples.
Made = Iterator[tuple[When, list[np.ndarray], Any]]  # The `When` of some batches, their indices, the element made.


def together(most: int, are_equal: bool, asked: Asked, handout: BatchAssignment) -> Made:
    """Groups batches with equal `When`, as far as their shares are decided. The last batch of an epoch comes alone.

    Args:
      most: Number of examples at which a group is full.
      are_equal: Whether batches of a group must have equal numbers of examples.
      asked: The batches.
      handout: The assignment that yields the batches.

    Yields:
      The `When` of a group, the indices of each of its batches, and for `tf.data` the indices as a padded matrix
      `[batches, longest]` with the lengths of its rows.
    """

    def alike(one: tuple[When, np.ndarray]) -> Any:
        return one[0], len(one[1]) if are_equal else None

    for (when, _), of_kind in itertools.groupby(asked, alike):
        batches: list[np.ndarray] = []
        examples, began = 0, time.monotonic()
        for _, indices in of_kind:
            batches.append(indices)
            examples += len(indices)
            is_enough = examples >= most or time.monotonic() >= began + _SECONDS_TOGETHER
            if is_enough or not handout.is_decided():
                yield when, batches, _as_rows(batches)
                batches, examples, began = [], 0, time.monotonic()
        if batches:
            yield when, batches, _as_rows(batches)


def _as_rows(batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(batch) for batch in batches])
    columns = max(1, lengths.max())  # TensorFlow's `unbatch` crashes on rows without elements.
    rows = np.full((len(batches), columns), -1, np.int64)
    rows[np.arange(columns) < lengths[:, np.newaxis]] = np.concatenate(batches)
    return rows, lengths
