"""The rules by which a job is started again: how soon, how often, with how many workers."""

import itertools

from tfdist.launch.restarts import Restarts, Size


def test_pauses_double_and_end_with_the_limit():
    restarts = Restarts(8, 600)
    assert [restarts.pause(now=0) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 30, 30, None, None]


def test_progress_forgets():
    restarts = Restarts(1, 600)
    for now in range(20):
        assert restarts.pause(now) == 0
        restarts.progress()


def test_only_restarts_in_the_window_count():
    restarts = Restarts(2, 600)
    assert [restarts.pause(now) for now in (0, 100, 650, 660, 1300)] == [0, 1, 1, None, 0]


def test_the_same_exception_from_the_same_line_counts_for_ever():
    restarts = Restarts(2, 600)
    assert [restarts.pause(now, "line 3") for now in (0, 1000, 2000)] == [0, 1, None]
    restarts = Restarts(2, 600)
    assert [restarts.pause(1000 * i, place) for i, place in enumerate(["a", "a", "b", "a", None, "a"])] == [
        0,
        1,
        0,
        0,
        0,
        0,
    ]


def test_size_follows_who_fails():
    size = Size(4, 2, regrow_seconds=300)
    assert not size.failed(3, started=True, progressed=False)
    assert not size.failed(1, started=True, progressed=False)  # another one
    assert size.failed(1, started=True, progressed=False) and size.current == 3
    assert size.failed(2, started=False, progressed=False) and size.current == 2  # could not even be started
    for _ in range(5):
        assert not size.failed(0, started=True, progressed=False)
    assert size.current == 2
    assert not size.failed(0, started=True, progressed=True) and size.current == 4


def test_each_vain_try_with_all_workers_makes_the_next_come_later():
    size = Size(2, 1, regrow_seconds=300)
    waits = []
    for _ in range(3):
        size.failed(1, started=False, progressed=False)
        waits.append(next(seconds for seconds in itertools.count(0, 100) if size.is_due(seconds)))
        size.regrow()
        assert not size.is_due(1e9)
    assert waits == [300, 600, 1200]
