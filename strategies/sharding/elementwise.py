"""Which optimizers update each element of a weight by itself, so that they can update any part of it."""

from typing import Any

import keras

_NAMES = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
    "ScheduleFreeAdamW",
)
# Older versions of Keras lack some of them.
_UPDATES = {kind.update_step for name in _NAMES if (kind := getattr(keras.optimizers, name, None)) is not None}


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer updates each element of a weight by itself.

    Knows Keras' optimizers, and classes that inherit their `update_step`. Other classes say so by an attribute
    `updates_elementwise`.
    """
    kind = type(optimizer)
    return bool(getattr(kind, "updates_elementwise", kind.update_step in _UPDATES))
