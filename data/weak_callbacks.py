"""Weak wrappers for bound methods, for callers such as `tf.data` that never release callbacks."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a bound method for `tf.data` without a reference to its object.

    Args:
      method: A method of an object that something else keeps alive as long as the wrapper is called.
    """
    known = weakref.WeakMethod(method)

    def call(*args: Any, **options: Any) -> Any:
        alive = known()
        if alive is None:
            raise ReferenceError(f"The object of {method_name} was deleted. Keep the dataset that reads from it.")
        return alive(*args, **options)

    method_name = method.__qualname__
    del method
    return call


def listen(listeners: list[Callable[..., None]], method: Callable[..., None]) -> Callable[[], None]:
    """Adds a method to `listeners` until its object is deleted, since a `fit` that fails does not end its callbacks.

    Returns:
      A function that removes it earlier.
    """

    def end(_: Any = None) -> None:
        with contextlib.suppress(ValueError):
            listeners.remove(call)

    def call(*args: Any) -> None:
        if (alive := known()) is not None:
            alive(*args)

    known = weakref.WeakMethod(method, end)
    listeners.append(call)
    return end
