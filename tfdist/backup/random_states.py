"""The states of Python's and NumPy's global random numbers, from which a program, and Keras for it, may draw."""

import random
from typing import Any

import numpy as np

from tfdist.backup.plain import apart, decode, encode, with_arrays


def capture() -> Any:
    """Both states as JSON."""
    arrays: list[np.ndarray] = []
    return with_arrays(encode([random.getstate(), np.random.get_state()], arrays), arrays)


def restore(captured: Any) -> None:
    """Gives back what was captured."""
    of_python, of_numpy = decode(*apart(captured))
    random.setstate(of_python)
    np.random.set_state(of_numpy)
