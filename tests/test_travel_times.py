"""Times of fragments on their way, and the warning about steps that wait for them."""

import pytest

from tfdist.strategies.local_steps.travel_times import TravelTimes, is_long

pytestmark = pytest.mark.unit


class Clock:
    """A clock that stands until the test moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def journey(times, clock, seconds, awaited_after=None):
    times.depart()
    begun = clock.now
    if awaited_after is not None:
        clock.now = begun + awaited_after
        times.begin_wait()
    clock.now = begun + seconds
    times.end()


def test_the_first_journey_does_not_count(clock):
    times = TravelTimes(clock)
    journey(times, clock, 5, awaited_after=1)
    assert times.take() == (0, 0)


def test_waits_add_up_and_the_longest_journey_counts(clock):
    times = TravelTimes(clock)
    for seconds, awaited_after in ((9, 1), (2, None), (5, 4), (4, 1)):
        journey(times, clock, seconds, awaited_after)
    assert times.take() == (5, 4)
    assert times.take() == (0, 0), "each call begins anew"


def test_a_step_does_not_wait_for_averages_that_are_there(clock):
    times = TravelTimes(clock)
    journey(times, clock, 1)
    journey(times, clock, 2)
    clock.now += 3
    times.begin_wait()
    journey(times, clock, 2)
    assert times.take() == (2, 0)


def test_only_long_waits_are_worth_a_warning():
    assert not is_long(0.9, 3) and not is_long(4, 100)
    assert is_long(6, 100)
