"""Tests of the policy of `compression="auto"` with invented times of steps."""

import random

import keras
import pytest

import tfdist
from tfdist.plan.exchange_costs import NONE, ExchangeCosts
from tfdist.plan.planned_buckets import Gradient
from tfdist.plan.step_prediction import PlannedStep, predict_step
from tfdist.strategies.auto_compression import AutoPolicy
from tfdist.strategies.codec_mixtures import MeasuredStep, MixtureModel, UnitBytes, mixtures
from tfdist.strategies.codec_trials import WINDOW, Alternatives, CodecTrials, Numbers
from tfdist.strategies.compression_policy import policy_of

pytestmark = pytest.mark.unit

ALTERNATIVES = Alternatives(["float16", "int8"], [[0, 1]])
RAW, FLOAT16, INT8 = ALTERNATIVES.all_uniform()


class Training:
    """Steps of invented duration. `seconds(choice)` and `exposed(choice)` give the numbers of a step."""

    def __init__(self, seconds, exposed=None, alternatives=ALTERNATIVES, settled=None, noise=0.0, seed=0):
        self.seconds, self.exposed = seconds, exposed or seconds
        self._trials = CodecTrials(alternatives, settled)
        self._random, self._noise = random.Random(seed), noise
        self.choices = [self._trials.order.choice]  # One for each step so far, and for the next one.
        self.reasons = []
        self._least = None

    def step(self):
        """Runs a step, in which the policy gets the numbers of the step before, as in the graph."""
        if len(self.choices) > 1:
            choice = self.choices[-2]
            longer = 1 + self._noise * self._random.random()
            numbers = Numbers(self.seconds(choice) * longer, self.exposed(choice) * longer)
        else:
            numbers = Numbers(0.0, 0.0)
        self._least = numbers if self._least is None else Numbers(*map(min, self._least, numbers))
        if not self.is_final or len(self.choices) % WINDOW == 0:
            order = self._trials.take(self._least)
            self._least = None
            self.reasons += [order.reason] if order.reason else []
        self.choices.append(self._trials.order.choice)

    def run(self, steps):
        """Runs steps, and returns the choice after them."""
        for _ in range(steps):
            self.step()
        return self.choices[-1]

    @property
    def is_final(self):
        return self._trials.order.is_final


def of(raw, float16, int8):
    """A function that returns the time of a choice."""
    return {RAW: raw, FLOAT16: float16, INT8: int8}.__getitem__


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param(of(3.4, 1.7, 0.9), INT8, id="slow link"),
        pytest.param(of(0.057, 0.075, 0.058), RAW, id="fast link"),
        pytest.param(of(0.040, 0.040, 0.040), RAW, id="ties keep gradients as they are"),
        pytest.param(of(0.350, 0.112, 0.111), FLOAT16, id="ties of codecs take the less lossy one"),
        pytest.param(of(0.350, 0.190, 0.112), INT8, id="the fastest codec"),
    ],
)
def test_takes_the_fastest_and_then_the_least_lossy(seconds, expected):
    training = Training(seconds, noise=0.02)
    assert training.run(150) == expected
    assert training.is_final
    assert len(training.reasons) == 1


@pytest.mark.parametrize("seed", range(5))
def test_takes_a_codec_that_saves_6_percent_while_times_vary_by_more(seed):
    training = Training(of(0.064, 0.063, 0.060), noise=0.12, seed=seed)
    assert training.run(200) == INT8


def test_begins_uncompressed_and_decides_after_few_steps_on_a_slow_link():
    training = Training(of(3.4, 1.7, 0.9))
    assert training.run(6) == RAW
    training.run(20)
    assert training.is_final
    assert training.choices.count(RAW) < 12


def test_tries_no_codec_if_the_exchange_is_hidden():
    training = Training(of(0.3, 0.1, 0.1), exposed=of(0.005, 0.0, 0.0))
    assert training.run(60) == RAW
    assert set(training.choices) == {RAW}
    assert "hidden" in training.reasons[0]


def test_slow_first_steps_do_not_speak_against_no_codec():
    def seconds(choice):
        return 0.055 if len(training.choices) < 20 else {RAW: 0.045, FLOAT16: 0.047, INT8: 0.046}[choice]

    training = Training(seconds, exposed=lambda choice: 0.01)
    assert training.run(200) == RAW
    assert FLOAT16 in training.choices and INT8 in training.choices


def test_a_close_choice_is_looked_at_again_when_the_program_has_run_for_long():
    def seconds(choice):
        is_early = len(training.choices) < 150
        return ({RAW: 0.060, FLOAT16: 0.064, INT8: 0.062} if is_early else {RAW: 0.067, FLOAT16: 0.066, INT8: 0.060})[
            choice
        ]

    training = Training(seconds, exposed=lambda choice: 0.01)
    assert training.run(200) == RAW
    assert training.run(400) == INT8
    assert training.run(2000) == INT8 and len(training.reasons) == 2


def test_a_pause_of_a_machine_does_not_speak_against_a_codec():
    pause = iter([1.4, 0.13])
    training = Training(of(0.1, 0.1, 0.08))
    usual = training.seconds
    # The first three steps with a codec are not samples.
    training.seconds = lambda choice: (
        next(pause, usual(choice)) if choice == INT8 and training.choices.count(INT8) > 4 else usual(choice)
    )
    assert training.run(150) == INT8
    assert next(pause, None) is None


def test_slow_first_steps_of_a_codec_do_not_speak_against_it():
    slow_steps = {FLOAT16: iter([1.9, 0.2, 0.2, 0.16]), INT8: iter([1.9, 0.225, 0.195, 0.175])}
    usual = of(0.160, 0.160, 0.150)
    training = Training(
        lambda choice: next(slow_steps.get(choice, iter([])), usual(choice)), exposed=of(0.05, 0.05, 0.05)
    )
    assert training.run(150) == INT8


def test_slow_first_steps_of_a_codec_do_not_speak_against_it_in_a_later_look():
    slow_steps = {FLOAT16: iter([0.22] * 9), INT8: iter([0.22] * 9)}
    training = Training(of(0.1, 0.1, 0.1), exposed=of(0.0, 0.0, 0.0))
    assert training.run(40) == RAW  # The exchange is hidden, so no codec has been tried.
    usual = of(0.200, 0.200, 0.170)
    training.seconds = lambda choice: next(slow_steps.get(choice, iter([])), usual(choice))
    training.exposed = of(0.05, 0.05, 0.05)
    assert training.run(300) == INT8


def test_trials_of_fast_steps_are_longer():
    fast, slow = Training(of(0.01, 0.02, 0.02)), Training(of(0.2, 0.4, 0.4))
    for each in (fast, slow):
        each.run(60)
    assert fast.choices.index(FLOAT16) > slow.choices.index(FLOAT16)


def test_stays_while_times_vary_a_little():
    training = Training(of(0.35, 0.19, 0.112), noise=0.15)
    training.run(60)
    assert training.is_final
    assert training.run(2000) == INT8
    assert len(training.reasons) == 1


def test_looks_again_when_the_link_gets_slower():
    training = Training(of(0.04, 0.05, 0.05))
    assert training.run(150) == RAW
    training.seconds = training.exposed = of(0.4, 0.25, 0.15)
    assert training.run(60) == INT8
    assert training.is_final


def test_looks_again_when_the_link_gets_faster():
    training = Training(of(3.4, 1.7, 0.9))
    assert training.run(80) == INT8
    training.seconds = training.exposed = of(0.057, 0.07, 0.07)
    assert training.run(100) == RAW


def test_does_not_oscillate():
    training = Training(of(0.2, 0.19, 0.1))
    training.run(60)
    for _ in range(40):  # A neighbor on the machine comes and goes.
        training.seconds = of(0.26, 0.25, 0.13)
        training.run(50)
        training.seconds = of(0.2, 0.19, 0.1)
        training.run(50)
    assert len(training.reasons) <= 8
    assert training.choices.count(INT8) > 0.9 * len(training.choices)


def test_continues_with_a_saved_choice():
    training = Training(of(3.4, 1.7, 0.9), settled=INT8)
    training.run(200)
    assert set(training.choices) == {INT8}


def test_groups_that_cannot_use_a_codec_travel_uncompressed():
    alternatives = Alternatives(["float16", "powersgd"], [[0, 1], [0]])
    assert alternatives.uniform(0) == (1, 1)
    assert alternatives.uniform(1) == (2, 0)
    assert alternatives.describe((2, 0)) == "powersgd"
    assert alternatives.describe((0, 0)) == "no codec"


# Ten tensors in three groups, with the bytes sent by no codec, float16 and int8.
UNITS = [UnitBytes(group, 4e6, [4e6, 2e6, 1.02e6]) for group in (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)]
GROUPED = Alternatives(["float16", "int8"], [[0, 1]] * 3, UNITS, 2)


def on_link(link_bits, compute):
    """A function that returns the time of a choice in a step that computes for `compute` seconds."""

    def seconds(choice):
        gradients = [Gradient(each.float_bytes, each.sent_bytes[choice[each.group]]) for each in UNITS]
        costs = ExchangeCosts(1e-4, 5e-6, {NONE: 0.0}, "a test")
        return predict_step(PlannedStep(compute, gradients, NONE), 2, link_bits, costs).seconds

    return seconds


def test_a_mixture_encodes_only_the_layers_whose_gradients_come_last():
    seconds = on_link(2.5e9, 0.18)
    training = Training(seconds, lambda choice: seconds(choice) - 0.18, GROUPED)
    choice = training.run(100)
    assert choice[0] > 0
    assert choice[2] == 0
    assert seconds(choice) <= 1.03 * min(seconds(each) for each in GROUPED.all_uniform())


def test_a_mixture_is_not_chosen_because_the_program_has_become_faster():
    link, uniform, mixed = on_link(2.5e9, 0.18), GROUPED.all_uniform(), []

    def seconds(choice):
        if choice in uniform:
            return link(choice) * (1 if mixed else 1.1)
        mixed.append(choice)
        return 1.06 * min(map(link, uniform))

    training = Training(seconds, lambda choice: link(choice) - 0.18, GROUPED)
    assert training.run(150) in uniform
    assert mixed and training.is_final


def test_trials_of_mixtures_can_change_the_codec():
    link, (raw, float16, int8), mixed = on_link(2.5e9, 0.18), GROUPED.all_uniform(), []

    def seconds(choice):
        if choice not in (raw, float16, int8):
            mixed.append(choice)
            return 0.97 * link(float16)
        # Later steps show that int8 is faster by far.
        return {raw: link(raw), float16: link(float16), int8: (0.8 if mixed else 0.99) * link(float16)}[choice]

    training = Training(seconds, lambda choice: link(choice) - 0.18, GROUPED)
    assert training.run(150) == int8
    assert mixed and training.is_final


def test_all_layers_are_encoded_on_a_slow_link():
    seconds = on_link(1e8, 0.1)
    training = Training(seconds, lambda choice: seconds(choice) - 0.1, GROUPED)
    assert training.run(100) == (2, 2, 2)


def test_the_cost_model_gives_the_measured_times_of_uniform_choices_again():
    seconds = on_link(1e9, 0.1)
    coding = {(0, 0, 0): 0.0, (1, 1, 1): 0.01, (2, 2, 2): 0.02}
    times = {choice: seconds(choice) + each for choice, each in coding.items()}
    model = MixtureModel(UNITS, 2, MeasuredStep(times[0, 0, 0], 0.1), times)
    for choice, measured in times.items():
        assert model.seconds(choice) == pytest.approx(measured, rel=0.03)
    assert times[2, 2, 2] < model.seconds((2, 0, 2)) < times[0, 0, 0]


def test_mixtures_begin_with_the_fewest_encoded_bytes():
    found = mixtures(UNITS, (2, 2, 0))
    assert found[0] == (0, 0, 0)
    assert found[-1] == (2, 2, 0)
    assert found.index((0, 2, 0)) < found.index((2, 0, 0))


def test_only_safe_codecs_are_used():
    policy = policy_of(tfdist.compression.Auto(["topk", "sign", "int8", "powersgd(4)"]))
    assert isinstance(policy, AutoPolicy)
    names = [codec.name for codec in policy.safe_for(keras.optimizers.Adam())]
    assert names == ["int8", "powersgd"]
    names = [codec.name for codec in policy.safe_for(keras.optimizers.SGD())]
    assert names == ["int8", "sign", "topk", "powersgd"]


def test_the_default_uses_one_codec_of_16_bits_and_int8():
    assert [codec.name for codec in policy_of("auto").codecs] == ["float16", "int8"]
    assert [codec.name for codec in policy_of(tfdist.compression.Auto(["bfloat16"])).codecs] == ["bfloat16"]


@pytest.mark.parametrize(
    "allow",
    [
        *((), "int8", 8, ["int9"], [None], ["auto"], [tfdist.compression.Auto()], [tfdist.compression.Int8]),
        [tfdist.compression.Int8(start_step=3)],
        tfdist.compression.Int8(),
    ],
)
def test_invalid_codecs_are_refused(allow):
    with pytest.raises(ValueError, match=r"`allow` of Auto|start_step"):
        tfdist.compression.Auto(allow)


def test_the_class_instead_of_an_object_is_refused():
    with pytest.raises(ValueError, match=r"Call it: tfdist\.compression\.Auto"):
        policy_of(tfdist.compression.Auto)
