"""Several steps handed to `tf.data` in one call: each call from there to Python waits for other threads of Python."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tfdist.data.handout import Handout

EXAMPLES_TOGETHER = 4096
_SECONDS_TOGETHER = 0.003  # Training waits for the first of them.


class When(NamedTuple):
    """Where in training a batch stands.

    Attributes:
      epoch: Its own.
      begins: The epoch that begins after it, if it is the last batch of one, else 0.
    """

    epoch: int
    begins: int


Asked = Iterator[tuple[When, np.ndarray]]  # Batches, by the numbers of their examples.
Made = Iterator[tuple[When, list[np.ndarray], Any]]  # When some batches stand, their examples, and what they became.


def together(most: int, are_equal: bool, asked: Asked, handout: Handout) -> Made:
    """Batches of an epoch, as many as are decided, together; the last of an epoch comes alone.

    Args:
      most: Examples.
      are_equal: Whether those together are to have as many examples each.
      asked: The batches.
      handout: That hands them out.

    Yields:
      When they stand, the examples of its batches, and for `tf.data` a row of them for each batch and how many are
      meant.
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
    columns = max(1, lengths.max())  # TensorFlow's unbatch dies of rows of nothing.
    rows = np.full((len(batches), columns), -1, np.int64)
    rows[np.arange(columns) < lengths[:, np.newaxis]] = np.concatenate(batches)
    return rows, lengths
