"""What compression keeps from step to step: copied out, and given back before or after the first step."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.backup.files import files_of
from tfdist.strategies.communication import Communication


def capture(communication: Communication | None) -> dict[str, tf.Tensor]:
    """What this worker's replicas keep, by the names under which `tf.train.Checkpoint` knows it."""
    captured = {}
    for number, exchange in enumerate(communication.exchanges if communication else ()):
        for replica, states in enumerate(exchange.states):
            for i, state in enumerate(states):
                captured[f"exchanges/{number}/states/{replica}/{i}"] = state.read_value()
            captured[f"exchanges/{number}/counts/{replica}"] = exchange.counts[replica].read_value()
    return captured


def pending(communication: Communication | None, captured: Mapping[str, tf.Tensor]) -> dict[str, np.ndarray]:
    """Of what was captured, `Communication.state`: for another number of workers. Costs a few passes over it."""
    arrays = {}
    for number, exchange in enumerate(communication.exchanges if communication else ()):
        prefix = f"exchanges/{number}"
        if f"{prefix}/counts/0" not in captured:
            continue
        states = [
            [captured[f"{prefix}/states/{replica}/{i}"] for i in range(len(own))]
            for replica, own in enumerate(exchange.states)
        ]
        # An exchange as it was then: its `__init__` would make variables, and tf.Module would track lists.
        then = object.__new__(type(exchange))
        then.__dict__.update(vars(exchange), states=states)
        arrays.update({f"{number}/{i}": array for i, array in enumerate(then.pending())})
    return arrays


def restore(communication: Communication, saved: Mapping[str, np.ndarray], folder: str) -> bool:
    """Gives the replicas of this worker what they kept, to the bit.

    Exchanges are made in the first step. `tf.train.Checkpoint` fills those to come, from files in `folder`.

    Returns:
      Whether the files are needed, until the first step is done.
    """
    here = capture(communication)
    for name, value in saved.items():
        if name in here:
            _, number, kind, replica, *position = name.split("/")
            exchange = communication.exchanges[int(number)]
            local = exchange.counts[int(replica)] if kind == "counts" else exchange.states[int(replica)][int(*position)]
            local.assign(value)
    if set(saved) <= set(here):
        return False
    files_of(folder).make_folder(folder)
    path = os.path.join(folder, "residuals")
    tf.train.Checkpoint(communication=_tree(saved)).write(path)
    tf.train.Checkpoint(communication=communication).read(path).expect_partial()
    return True


def redistribute(communication: Communication, states: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Shares what any number of former workers had left behind; see `Communication.redistribute`."""
    if all(states):
        communication.redistribute(states)


def _tree(values: Mapping[str, Any]) -> tf.train.Checkpoint:
    """Variables in the places that their names say."""
    branches: dict[str, dict[str, Any]] = {}
    leaves = {}
    for name, value in values.items():
        first, _, rest = name.partition("/")
        if rest:
            branches.setdefault(first, {})[rest] = value
        else:
            leaves[first] = tf.Variable(value, trainable=False)
    return tf.train.Checkpoint(**leaves, **{name: _tree(own) for name, own in branches.items()})
