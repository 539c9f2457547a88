"""Tests of the control that measures steps and sets the choice of codecs in the graph."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.codec_trials import WINDOW, Alternatives, TrialOrder
from tfdist.strategies.collectives import choice_control
from tfdist.strategies.collectives.choice_control import ChoiceControl, Decider


class Script:
    """A policy that gives the same order again and again, and keeps the numbers that it gets."""

    def __init__(self, order):
        self.taken, self.order = [], order

    def take(self, numbers):
        self.taken.append(tuple(numbers))
        return self.order


class Steps:
    """Steps of one replica of two in the graph, at given times. The other replica does not wait.

    Attributes:
      script: The policy.
      control: The control under test.
    """

    def __init__(self, monkeypatch, is_final=True, rank=0):
        self._times: list = []
        clock = functools.partial(tf.numpy_function, lambda: self._times.pop(0), [], tf.float64)
        monkeypatch.setattr(choice_control, "timestamp", lambda apart: tf.ensure_shape(clock(), []))
        self.control = ChoiceControl(Alternatives(["int8"], [[0]]), "/device:CPU:0", rank=rank, ranks=2, tell=None)
        self.script = self.control.decider._trials = Script(TrialOrder((1,), is_final))
        self._apart = tf.Variable(0.0)
        self._run = tf.function(self._in_graph, autograph=False)

    def step(self, computed=1000.0, summed=1000.5, of_other=(0.0,) * 5):
        """Runs a step whose gradients and sums are there at these times. Returns whether the policy took numbers."""
        before = len(self.script.taken)
        self._times[:] = [np.float64(computed), np.float64(summed)]
        self._run(tf.constant(of_other), tf.constant(False))
        return len(self.script.taken) > before

    def fail(self):
        """Runs a step that ends before its sums are there."""
        self._times[:] = [np.float64(5000), np.float64(5001)]
        with pytest.raises(tf.errors.InvalidArgumentError, match="a worker is lost"):
            self._run(tf.zeros([5]), tf.constant(True))

    def _in_graph(self, of_other, fails):
        numbers = self.control.own_numbers(self.control.choice()) + of_other
        gradient = tf.ones([3])
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["a worker is lost"])]):
            summed = tf.identity(gradient)
        self.control.end_step([gradient], [summed], numbers, self._apart.handle)


def test_in_trials_the_policy_takes_the_numbers_of_each_step(monkeypatch):
    steps = Steps(monkeypatch, is_final=False)
    assert all([steps.step() for _ in range(2 * WINDOW)])


def test_the_policy_takes_numbers_once_in_each_window_of_a_final_choice(monkeypatch):
    steps = Steps(monkeypatch)
    assert [steps.step() for _ in range(3 * WINDOW)] == [i % WINDOW == 0 for i in range(3 * WINDOW)]


def test_the_policy_takes_the_least_numbers_of_a_window(monkeypatch):
    steps = Steps(monkeypatch)
    now = 1000.0
    for seconds, exposed in [(9, 9), (7, 2), (5, 4), (6, 3), (8, 6), (4, 5), (3, 7), (9, 4), (1, 1)]:
        now += seconds
        steps.step(now - exposed, now, of_other=(0.0, 0.0, 0.0, 8.0, 0.0))

    # The first step has none before it. The numbers of a step that takes some belong to the next window.
    assert steps.script.taken == [(0, 0), (0, 2), (3, 4)]


def test_rank_0_tells_when_the_policy_takes_numbers(monkeypatch):
    steps = Steps(monkeypatch, rank=1)
    told = [True, False, False, True, False, False, False, False, True]
    assert [steps.step(of_other=(0.0, 0.0, 0.0, 0.0, float(each))) for each in told] == told


@pytest.mark.parametrize("place", range(WINDOW))
def test_a_step_that_fails_before_its_sums_changes_nothing(monkeypatch, place):
    times = [(1000.0 + 10 * i, 1000.5 + 10 * i + i % 3) for i in range(4 * WINDOW)]
    unbroken = Steps(monkeypatch)
    expected = [unbroken.step(*each) for each in times]
    broken = Steps(monkeypatch)
    found = []
    for i, each in enumerate(times):
        for _ in range(5 if i == WINDOW + place else 0):
            broken.fail()
        found.append(broken.step(*each))

    assert found == expected
    assert broken.script.taken == unbroken.script.taken


def test_a_restored_choice_has_no_reason():
    decider = Decider(Alternatives(["int8"], [[0]]), tell=None)
    decider.reason = "a step takes with no codec 3 ms, int8 2 ms"
    assert decider(np.ones([2, 2], np.float32), np.array([1, 1])).tolist() == [1, 1]
    assert decider.reason == ""
