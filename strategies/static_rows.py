"""Traces a user's `train_step` without a static number of rows, if possible, to tell mean losses from sums."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.strategies.step import Step

# Models with a training step that can only be traced for a static number of rows.
_needing_static_rows: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


def of_any_rows(data: Any) -> Any:
    """Removes the static number of rows from `data`, so that the graph shows which values are divided by it."""

    def forget(leaf):
        if not tf.is_symbolic_tensor(leaf) or not leaf.shape.rank or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return keras.tree.map_structure(forget, data)


def trace_for_any_rows(step: Step, fn: Any, data: Any) -> Any:
    """Runs `fn` on `data` in a training step of the user, traced without the number of rows if possible.

    A step that reads a static `x.shape[0]` may fail to trace without it. The operations that it has already added to
    the graph must not run, so the error is raised and the model noted. Its step must then be traced again in a new
    graph, with the static number of rows. See `needs_static_rows`.
    """
    of_any = of_any_rows(data)
    pairs = zip(keras.tree.flatten(of_any), keras.tree.flatten(data), strict=True)
    if all(one is other for one, other in pairs):
        return fn(data)
    step.has_static_rows = needs_static_rows(step.model)
    if step.has_static_rows:
        return fn(data)
    try:
        return fn(of_any)
    except TfdistError:
        raise
    except Exception:
        _needing_static_rows.add(step.model)
        raise


def needs_static_rows(model: keras.Model | None) -> bool:
    """Whether a training step of the model has failed to trace without a static number of rows."""
    return model in _needing_static_rows
