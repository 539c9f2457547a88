"""Tests of the control that measures steps and sets the choice of codecs in the graph."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.codec_trials import WINDOW, Alternatives, TrialOrder
from tfdist.strategies.collectives import choice_control
from tfdist.strategies.collectives.choice_control import ChoiceControl
from tfdist.strategies.collectives.chosen_codecs import CodecsToChoose
from tfdist.strategies.collectives.encoded_reducer import EncodedReducer
from tfdist.strategies.compression import from_name
from unconnected_exchange import unconnected_collectives

FIRST_COMPUTED, FIRST_SUMMED = 1000.0, 1000.5


class Script:
    """A policy that gives the same order again and again, and keeps the numbers that it gets."""

    def __init__(self, order):
        self.taken, self.order = [], order

    def take(self, numbers):
        self.taken.append(numbers)
        return self.order


class Steps:
    """Steps of one replica in the graph, at given times.

    Attributes:
      script: The policy.
      control: The control under test.
      exchanged: The numbers that were exchanged.
    """

    def __init__(self, monkeypatch, is_final=True):
        self._times, self.exchanged = [], []
        clock = functools.partial(tf.numpy_function, lambda: self._times.pop(0), [], tf.float64)
        monkeypatch.setattr(choice_control, "timestamp", lambda apart: tf.ensure_shape(clock(), []))
        self.control = ChoiceControl(Alternatives(["int8"], [[0]]), "/device:CPU:0", rank=1, ranks=2, tell=None)
        self.script = self.control.decider._trials = Script(TrialOrder((1,), is_final))
        self._apart = tf.Variable(0.0)
        self._done = 0
        self.run = tf.function(self._in_graph, autograph=False)

    def step(self, computed=FIRST_COMPUTED, summed=FIRST_SUMMED):
        """Runs a step whose gradients and sums are there at these times. Returns whether numbers were exchanged."""
        self._times[:] = [np.float64(computed), np.float64(summed)]
        shares = self.run(tf.constant(self._done, tf.int64), tf.constant(False))
        self._done += 1
        return bool(shares)

    def fail(self):
        """Runs a step that ends before its sums are there."""
        self._times[:] = [np.float64(5000), np.float64(5001)]
        with pytest.raises(tf.errors.InvalidArgumentError, match="a worker is lost"):
            self.run(tf.constant(self._done, tf.int64), tf.constant(True))

    def _in_graph(self, done, fails):
        def total(own):
            [kept] = tf.py_function(lambda own: self.exchanged.append(own.numpy()) or [own], [own], [tf.float32])
            return tf.ensure_shape(kept, [4])

        control = self.control
        shares = control.shares_numbers(control.choice(), done)
        numbers = control.numbers_of_all(shares, total)
        gradient = tf.ones([3])
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["a worker is lost"])]):
            summed = tf.identity(gradient)
        control.end_step([gradient], [summed], shares, numbers, self._apart.handle)
        return shares


def test_trials_exchange_the_numbers_of_each_step(monkeypatch):
    steps = Steps(monkeypatch, is_final=False)
    assert all([steps.step() for _ in range(2 * WINDOW)])
    assert len(steps.exchanged) == len(steps.script.taken) == 2 * WINDOW


def test_a_final_choice_exchanges_numbers_in_the_last_step_of_each_window(monkeypatch):
    steps = Steps(monkeypatch)
    shared = [steps.step() for _ in range(3 * WINDOW)]

    assert shared[0]  # The choice was not final yet.
    assert shared[1:] == [(i + 1) % WINDOW == 0 for i in range(1, 3 * WINDOW)]
    assert len(steps.exchanged) == len(steps.script.taken) == sum(shared)


def test_the_least_numbers_of_a_window_are_exchanged(monkeypatch):
    steps = Steps(monkeypatch)
    now = 1000.0
    for seconds, exposed in [(9, 9), (7, 2), (5, 4), (6, 3), (8, 6), (4, 5), (3, 7), (9, 1)]:
        now += seconds
        steps.step(now - exposed, now)

    # The first step has none before it. Numbers of the step that exchanges belong to the next window.
    other_rank = [0, 0]
    np.testing.assert_array_equal(
        steps.exchanged,
        [[*other_rank, 0, 0], [*other_rank, 0, 2], [*other_rank, 3, 3]],
    )


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
    # A failed step may exchange numbers too: those that the next one exchanges.
    np.testing.assert_array_equal(without_repetitions(broken.exchanged), without_repetitions(unbroken.exchanged))


def without_repetitions(arrays):
    return [first for first, _ in itertools.groupby(map(tuple, arrays))]


def test_accumulated_gradients_exchange_numbers_too(monkeypatch):
    for group in range(1, 9):  # An exchange comes before each step of this multiple.
        steps = Steps(monkeypatch)
        steps.step()
        done = [tf.constant(i * group - 1, tf.int64) for i in range(1, 9)]
        assert any(steps.control.shares_numbers(steps.control.choice(), each) for each in done)


@pytest.mark.parametrize(
    ("ranks", "group_size"),
    [pytest.param(2, None, id="2"), pytest.param(100, None, id="100"), pytest.param(100, 10, id="100 in groups")],
)
def test_numbers_of_any_number_of_ranks_can_be_exchanged(ranks, group_size):
    collectives = unconnected_collectives(ranks, group_size)
    to_choose = CodecsToChoose([from_name("int8")], lambda codec, position: True, lambda names, order: None)
    shape = [1024, 512]
    reducer = EncodedReducer([tf.zeros(shape)], [None], collectives, seed=0, to_choose=to_choose)

    @tf.function(autograph=False)
    def step(gradient):
        return reducer(0, [gradient], np.int64(0))

    step.get_concrete_function(tf.TensorSpec(shape))  # Tracing fails if a branch needs more keys than it reserved.
    assert reducer.controls
