"""Whole numbers and truths, as a caller gives them."""

import numbers
from typing import Any

import numpy as np


def as_count(value: Any) -> int | None:
    """`value`, if it is a whole number from 1, also as a float; else None."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return int(value) if is_number and value == value // 1 and value >= 1 else None


def checked_count(name: str, value: Any) -> int:
    """`value` as a whole number.

    Raises:
      ValueError: If it is none from 1; names the argument.
    """
    count = as_count(value)
    if count is None:
        raise ValueError(f"{name} must be a whole number from 1, not {value!r}.")
    return count


def checked_whole(name: str, value: Any) -> int:
    """`value` as a number of any sign that all workers have alike.

    Raises:
      ValueError: If it is none; names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be a whole number, the same on all workers, not {value!r}.")
    return int(value)


def check_truth(name: str, value: Any) -> None:
    """Checks that `value` is True or False.

    Raises:
      ValueError: If it is not; names the argument.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, not {value!r}.")
