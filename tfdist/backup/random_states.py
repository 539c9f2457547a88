"""The global random states of Python and NumPy, from which a program and Keras may draw."""

import random
from typing import Any

import numpy as np

from tfdist.backup.serialization import apart, decode, encode, with_arrays

NAMES = frozenset({"python", "numpy"})


def capture() -> Any:
    """Returns both states as JSON."""
    arrays: list[np.ndarray] = []
    return with_arrays(encode([random.getstate(), np.random.get_state()], arrays), arrays)


def restore(captured: Any, names: frozenset[str] = NAMES) -> None:
    """Restores the captured states, or only those named."""
    of_python, of_numpy = decode(*apart(captured))
    if "python" in names:
        random.setstate(of_python)
    if "numpy" in names:
        np.random.set_state(of_numpy)


def unmoved(begun: Any, batches: int | None) -> frozenset[str]:
    """Returns the names of the states that are unused since `begun`, except for Keras' first shuffle of a `PyDataset`.

    Args:
      begun: States captured when an input had begun. The thread of an enqueuer may or may not have shuffled by then.
      batches: Number of batches of the input, if known.
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
