"""Hands `tf.data` the batches of several steps in one call, since each call into Python waits for Python's lock."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batch_assignment import BatchAssignment, When

EXAMPLES_TOGETHER = 4096
_SECONDS_TOGETHER = 0.003  # Longest time to collect batches, since training may wait for the first of them.


def coalesced(begin: Callable[[], BatchAssignment], most: int, *, are_equal: bool) -> tf.data.Dataset:
    """Returns a dataset of groups of batches, as indices of examples, whose examples a `Reader` reads.

    TensorFlow never releases `begin`, which returns the batch assignment for an iterator. A group is full at `most`
    examples. If `are_equal`, batches of a group have equal numbers of examples.

    Returns:
      A dataset of three int64 tensors: the indices of the examples, [batches, longest], padded with -1; the lengths of
      these rows, [batches]; the epochs that begin after the batches or 0, [batches].
    """
    return tf.data.Dataset.from_generator(
        functools.partial(_elements, begin, most, are_equal),
        output_signature=(tf.TensorSpec([None, None], tf.int64), *[tf.TensorSpec([None], tf.int64)] * 2),
    )


def _elements(begin: Callable[[], BatchAssignment], most: int, are_equal: bool) -> Iterator[tuple[np.ndarray, ...]]:
    assignment = begin()
    for when, batches in _groups(assignment, most, are_equal):
        assignment.note_read(when, batches)
        yield *_as_rows(batches), np.full(len(batches), when.begins)
    assignment.note_end()


def _groups(assignment: BatchAssignment, most: int, are_equal: bool) -> Iterator[tuple[When, list[np.ndarray]]]:
    """Groups batches of equal `When` whose shares are decided. The last batch of an epoch comes alone."""

    def alike(one: tuple[When, np.ndarray]) -> Any:
        return one[0], len(one[1]) if are_equal else None

    for (when, _), of_kind in itertools.groupby(assignment.batches(), alike):
        batches: list[np.ndarray] = []
        examples, began = 0, time.monotonic()
        for _, indices in of_kind:
            batches.append(indices)
            examples += len(indices)
            is_enough = examples >= most or time.monotonic() >= began + _SECONDS_TOGETHER
            if is_enough or not assignment.is_decided():
                yield when, batches
                batches, examples, began = [], 0, time.monotonic()
        if batches:
            yield when, batches


def _as_rows(batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(batch) for batch in batches])
    columns = max(1, lengths.max())  # TensorFlow's `unbatch` crashes on rows without elements.
    rows = np.full((len(batches), columns), -1, np.int64)
    rows[np.arange(columns) < lengths[:, np.newaxis]] = np.concatenate(batches)
    return rows, lengths
