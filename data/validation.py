"""Checks for arguments of `tfdist.data` that must be integers or booleans."""

import numbers
from typing import Any

import numpy as np


def as_count(value: Any) -> int | None:
    """Returns `value` as an int if it is an integer of at least 1, also as a float such as 8.0; else None."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return int(value) if is_number and value == value // 1 and value >= 1 else None


def checked_count(name: str, value: Any) -> int:
    """Returns the argument `value` as an int; raises a ValueError that names it, if it is no integer of at least 1."""
    count = as_count(value)
    if count is None:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    return count


def checked_whole(name: str, value: Any) -> int:
    """Returns the argument `value` as an int, which may be negative; raises a ValueError if it is no integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, equal on all workers, got {value!r}.")
    return int(value)


def check_truth(name: str, value: Any) -> None:
    """Raises a ValueError that names the argument if `value` is not True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
