"""Which optimizers update each element of a weight by itself, so that each replica can keep any part of its state."""

from typing import Any

import keras

from tfdist.strategies.sharding.muon_update import is_muon

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


def takes_parts(optimizer: Any) -> bool:
    """Whether a replica can update with its parts of gradients and state only.

    Adafactor keeps parts of its state too, but updates with whole gradients and whole state.
    """
    return is_elementwise(optimizer) or is_muon(optimizer)


def is_factored(optimizer: Any) -> bool:
    """Whether an optimizer is `Adafactor`, whose state follows from means of rows and of columns of whole gradients."""
    return type(optimizer).update_step is keras.optimizers.Adafactor.update_step
