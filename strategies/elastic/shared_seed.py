"""Random states of worker 0, which all workers take where the user has set no seed, so that they shuffle alike."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def random_states() -> dict[str, Any]:
    """Returns the random states that all workers must share where the user set no seed, so that they shuffle alike."""
    own, _ = tf.compat.v1.random.get_seed(None)
    seed = random.SystemRandom().randrange(1 << 31) if own is None else own
    if own is None:
        tf.random.set_seed(seed)
    version, numbers, _ = random.getstate()
    _, of_numpy, position, *_ = np.random.get_state()
    said_numpy = [np.asarray(of_numpy).tolist(), position]
    return {"seed": seed, "python": [version, list(numbers)], "numpy": said_numpy}


def take_random_states(said: Mapping[str, Any]) -> None:
    """Takes the random states of worker 0, unless the user has set a seed."""
    own, _ = tf.compat.v1.random.get_seed(None)
    if own is not None:
        return
    tf.random.set_seed(said["seed"])
    version, numbers = said["python"]
    random.setstate((version, tuple(numbers), None))
    generator: Any = np.random  # Its types lack the function.
    if generator.get_bit_generator().seed_seq is not None:  # It is None once the user has set a seed.
        of_numpy, position = said["numpy"]
        np.random.set_state(("MT19937", of_numpy, position, 0, 0.0))
