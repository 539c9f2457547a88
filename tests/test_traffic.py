"""The `Traffic` callback logs means over whole epochs, including an epoch that began in an earlier process."""

import types

import pytest

from tfdist.callbacks import Traffic
from tfdist.strategies.compression_state import TrafficTotals


class Communication:
    """Counts traffic as a strategy does, from zero in each process."""

    def __init__(self, timed):
        self.timed, self.steps, self.norm = timed, 0, 0.0

    def train(self, steps):
        self.steps += steps
        self.norm = 3.0

    def traffic(self):
        seconds = 0.5 * self.steps if self.timed and self.steps else None
        return TrafficTotals(self.steps, 400 * self.steps, 100 * self.steps, seconds, seconds)

    def residual_norm(self):
        return self.norm


def process(timed):
    callback, communication = Traffic(), Communication(timed)
    callback.set_model(types.SimpleNamespace(distribute_strategy=types.SimpleNamespace(communication=communication)))
    return callback, communication


def logged(callback, epoch):
    logs = {}
    callback.on_epoch_end(epoch, logs)
    return logs


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_an_epoch_continued_in_another_process_is_logged_completely(before, timed):
    unbroken, communication = process(timed)
    unbroken.on_epoch_begin(1)
    communication.train(5)
    expected = logged(unbroken, 1)

    first, communication = process(timed)
    assert first.get_state() is None
    first.on_epoch_begin(1)
    communication.train(before)
    communication.norm = 3.0
    second, communication = process(timed)
    second.set_state(first.get_state())
    second.on_epoch_begin(1)
    if before < 5:
        communication.train(5 - before)
    assert logged(second, 1) == expected

    second.on_epoch_begin(2)  # The restored sums belong to one epoch only.
    communication.train(2)
    assert logged(second, 2)["sent_bytes"] == 100


def test_sums_of_an_epoch_do_not_count_for_the_next():
    first, communication = process(False)
    first.on_epoch_begin(1)
    communication.train(5)
    at_end = first.get_state()
    logged(first, 1)
    assert first.get_state() is None

    second, communication = process(False)
    second.set_state(at_end)
    second.on_epoch_begin(2)
    communication.train(1)
    assert second.get_state()["traffic"]["steps"] == 1
