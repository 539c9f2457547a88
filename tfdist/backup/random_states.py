"""The states of Python's and NumPy's global random numbers, from which a program, and Keras for it, may draw."""

import random
from typing import Any

import numpy as np

from tfdist.backup.serialization import apart, decode, encode, with_arrays

NAMES = frozenset({"python", "numpy"})


def capture() -> Any:
    """Both states as JSON."""
    arrays: list[np.ndarray] = []
    return with_arrays(encode([random.getstate(), np.random.get_state()], arrays), arrays)


def restore(captured: Any, names: frozenset[str] = NAMES) -> None:
    """Gives back what was captured, or of that the states of some."""
    of_python, of_numpy = decode(*apart(captured))
    if "python" in names:
        random.setstate(of_python)
    if "numpy" in names:
        np.random.set_state(of_numpy)


def unmoved(begun: Any, batches: int | None) -> frozenset[str]:
    """Of which nothing was drawn, but for the shuffle of its batches with which Keras begins a `PyDataset`.

    Args:
      begun: What was captured when an input had begun. By then an enqueuer's thread may have shuffled, or not yet.
      batches: Of the input, if that is known.
    """
    of_python, of_numpy = decode(*apart(begun))
    shuffled = random.Random()
    shuffled.setstate(of_python)
    shuffled.shuffle(list(range(batches or 0)))
    still = {
        "python": random.getstate() in (of_python, shuffled.getstate()),
        "numpy": all(map(np.array_equal, np.random.get_state(), of_numpy)),
    }
    return frozenset(name for name, is_still in still.items() if is_still)
