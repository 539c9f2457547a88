"""Calls functions in a thread of their own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def apart(make: Callable[[], Any]) -> Any:
    """Calls a function in a thread of its own, so that the variables it makes belong to no replica and no graph."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()
