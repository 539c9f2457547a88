"""Weak wrappers for methods, so that callers like `tf.data`, which never release callbacks, keep no data alive."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a bound method for `tf.data` without a reference to its object, so that the object can be deleted.

    Something else must keep the object alive as long as the wrapper is called.
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

    Returns a function that removes it earlier.
    """

    def end(_: Any = None) -> None:
        if call in listeners:  # Only built-in names: it also runs when the interpreter ends, and has cleared modules.
            listeners.remove(call)

    def call(*args: Any) -> None:
        if (alive := known()) is not None:
            alive(*args)

    known = weakref.WeakMethod(method, end)
    listeners.append(call)
    return end
