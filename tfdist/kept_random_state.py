"""Keeps the state of Python's `random`, from which Keras draws the seeds of layers and optimizers."""

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the state of Python's `random` at the end of the block, so that draws in the block have no effect."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
