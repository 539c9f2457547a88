"""Policy: the line of the user's code in which a stalled worker is, from the stacks of its threads. Pure functions."""

from collections.abc import Mapping, Sequence

from tfdist._compat import keras_stack
from tfdist.events.phase_names import INPUT
from tfdist.failure_kinds import user_call

Calls = Sequence[tuple[str, int, str]]
"""The calls of a thread, innermost first: file, line and function."""


def stalled_line(stacks: Mapping[int, Calls], phase: str | None) -> str:
    """Returns a line such as "train.py:31 in on_epoch_end"; empty if no thread runs code of the user.

    Args:
      stacks: The calls of each thread.
      phase: The phase of the worker. While it waits for input, functions of the input run in other threads: those of
        TensorFlow, and those of Keras for a `PyDataset` with several workers.
    """
    training = [calls for calls in stacks.values() if any(keras_stack.is_keras_call(f, name) for f, _, name in calls)]
    feeding = [calls for calls in stacks.values() if calls not in training and _feeds(calls)]
    chosen = [*feeding, *training] if phase == INPUT else training
    return next((line for calls in chosen if (line := user_call(calls)) is not None), "")


def _feeds(calls: Calls) -> bool:
    return any("/tensorflow/" in file or keras_stack.is_of_py_datasets(file) for file, _, _ in calls)
