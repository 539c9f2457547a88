"""Python functions for `tf.data` that let go of their objects: TensorFlow keeps such functions for ever."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a method of an object, and does not keep the object.

    Args:
      method: Of an object that somebody else keeps for as long as this is called.
    """
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = known()
        if alive is None:
            raise ReferenceError(f"What {method_name} reads from is no more. Keep the dataset that it belongs to.")
        return alive(*args)

    method_name = method.__qualname__
    del method
    return call
