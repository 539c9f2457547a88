"""Tests of the control that measures steps and sets the choice of codecs in the graph."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.codec_trials import Alternatives, TrialOrder
from tfdist.strategies.collectives.choice_control import ChoiceControl

WINDOW = 4


class Recorder:
    """A policy that asks for numbers each few steps, and keeps those that it gets."""

    def __init__(self):
        self.taken = []
        self.order = TrialOrder((1,), WINDOW, True)

    def take(self, numbers):
        self.taken.append(numbers)
        return self.order


@pytest.fixture
def control():
    made = ChoiceControl(Alternatives(["int8"], [[0]]), "/device:CPU:0", rank=0, ranks=1, tell=None)
    made.decider._trials = Recorder()
    return made


@pytest.fixture
def exchanges():
    """The numbers that were exchanged."""
    return []


@pytest.fixture
def step(control, exchanges):
    """Returns a function that runs a step, which fails before its sums are there if told so."""
    apart = tf.Variable(0.0)

    def note(tensor):
        exchanges.append(tensor.numpy())
        return tensor

    @tf.function
    def run(fails):
        is_asked = control.is_asked()
        numbers = control.numbers_of_all(is_asked, lambda tensor: tf.py_function(note, [tensor], tf.float32))
        gradient = tf.ones([3])
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["fails"])]):
            total = tf.identity(gradient)
        control.end_step([gradient], [total], is_asked, numbers, apart.handle)
        return is_asked

    return run


def test_numbers_are_exchanged_when_the_policy_asks_for_them(control, step, exchanges):
    asked = [bool(step(False)) for _ in range(3 * WINDOW)]

    assert asked == ([True] + [False] * (WINDOW - 1)) * 3
    assert len(exchanges) == 3 == len(control.decider._trials.taken)


def test_the_least_numbers_since_the_last_time_are_exchanged(control, step, exchanges):
    noted = []
    for _ in range(2 * WINDOW + 1):
        step(False)
        noted.append(control._least.numpy())

    # The first step has none before it. The numbers of a step travel in a later one.
    np.testing.assert_array_equal(exchanges, [np.zeros(2), noted[WINDOW - 1], noted[2 * WINDOW - 1]])
    for first in (0, WINDOW):
        assert np.all(np.diff(noted[first : first + WINDOW], axis=0) <= 0)


def test_a_step_that_fails_before_its_sums_does_not_count(control, step):
    step(False)
    before = control._left.numpy(), control._least.numpy()

    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="fails"):
            step(True)

    assert control._left.numpy() == before[0]
    np.testing.assert_array_equal(control._least.numpy(), before[1])
