"""Iterators whose end nobody waits for."""

import sys
import threading
import time
import weakref
from typing import Any

from tfdist import _tf

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 5.0


def released_aside(iterator: Any) -> Any:
    """`iterator`, a distributed one; once it is dropped, a thread of its own waits for TensorFlow to take it apart.

    TensorFlow ends the thread that tunes an input pipeline by a signal which that thread, if it is quick, takes for
    none, and then waits until it looks again: up to as long as the pipeline has lived, or a minute. `fit` would return
    so much later, half of the times on two cores.
    """
    weakref.finalize(iterator, _drop_aside, _tf.iterators_inside(iterator))
    return iterator


def _drop_aside(last: list[Any]) -> None:
    threading.Thread(target=_drop, args=(last,), name="tfdist-release", daemon=True).start()


def _drop(last: list[Any]) -> None:
    """Drops references as the last who has any: whoever is calling the finalizer still holds its own."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while last:
        while sys.getrefcount(last[-1]) > 2 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        last.pop()
