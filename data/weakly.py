"""Functions that let go of their objects, for who keeps functions for ever, as TensorFlow does."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a method of an object in `tf.data`, and does not keep the object.

    Args:
      method: Of an object that somebody else keeps for as long as this is called.
    """
    known = weakref.WeakMethod(method)

    def call(*args: Any, **options: Any) -> Any:
        alive = known()
        if alive is None:
            raise ReferenceError(f"What {method_name} reads from is no more. Keep the dataset that it belongs to.")
        return alive(*args, **options)

    method_name = method.__qualname__
    del method
    return call


def listen(listeners: list[Callable[..., None]], method: Callable[..., None]) -> Callable[[], None]:
    """Adds a method to `listeners` for as long as somebody else keeps its object: a `fit` that fails ends no callback.

    Returns:
      What takes it out before.
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
