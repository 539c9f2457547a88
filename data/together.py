"""Several steps handed to `tf.data` in one call: each call from there to Python waits for other threads of Python."""

import itertools
import operator
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdist.data.handout import Handout

EXAMPLES_TOGETHER = 4096
_SECONDS_TOGETHER = 0.003  # Training waits for the first of them.

Asked = Iterator[tuple[int, np.ndarray]]  # The epoch of a batch, and the numbers of its examples.
Made = Iterator[tuple[int, list[np.ndarray], Any]]  # The epoch of some batches, their examples, and what they became.


def together(most: int, asked: Asked, handout: Handout) -> Made:
    """Batches of an epoch, as many as are decided, together.

    Args:
      most: Examples.
      asked: The batches.
      handout: That hands them out.

    Yields:
      The epoch, the examples of its batches, and for `tf.data` a row of them for each batch and how many are meant.
    """
    for epoch, of_epoch in itertools.groupby(asked, operator.itemgetter(0)):
        batches: list[np.ndarray] = []
        examples, began = 0, time.monotonic()
        for _, indices in of_epoch:
            batches.append(indices)
            examples += len(indices)
            is_enough = examples >= most or time.monotonic() >= began + _SECONDS_TOGETHER
            if is_enough or not handout.is_decided():
                yield epoch, batches, _as_rows(batches)
                batches, examples, began = [], 0, time.monotonic()
        if batches:
            yield epoch, batches, _as_rows(batches)


def _as_rows(batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(batch) for batch in batches])
    rows = np.full((len(batches), lengths.max()), -1, np.int64)
    rows[np.arange(lengths.max()) < lengths[:, np.newaxis]] = np.concatenate(batches)
    return rows, lengths
