"""Rules of restarts: how soon, how often, and with how many workers."""

import itertools

from tfdist.exit_codes import STALLED
from tfdist.launch.first_failure import Failure
from tfdist.launch.restart_policy import Chance, Commits, Restarts, Size


def test_pauses_double_up_to_the_limit():
    restarts = Restarts(8, 600)
    assert [restarts.pause(now=0) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 30, 30, None, None]


def test_progress_resets_the_restart_count():
    restarts = Restarts(1, 600)
    for now in range(20):
        assert restarts.pause(now) == 0
        restarts.progress()


def test_only_restarts_in_the_window_count():
    restarts = Restarts(2, 600)
    assert [restarts.pause(now) for now in (0, 100, 650, 660, 1300)] == [0, 1, 1, None, 0]


def test_a_repeated_exception_at_the_same_line_is_never_forgotten():
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


def test_training_that_only_repeated_committed_steps_is_not_restarted():
    restarts = Restarts(9, 600)
    assert [restarts.pause(0, place, chance=Chance.ELSEWHERE) for place in (None, None, "a", "b", "b")] == [
        0,
        1,
        2,
        4,
        None,
    ]


def failed(worker, kind, **more):
    return Failure(0, worker, "host", 0.0, kind, **{"exit_code": 1, **more})


def test_a_failure_has_a_place_unless_a_peer_may_be_the_cause():
    alike = [
        (failed(0, "exit", exit_code=3), failed(1, "exit", exit_code=3)),
        (failed(1, "signal", signal="SIGKILL", exit_code=137), failed(1, "signal", signal="SIGKILL", exit_code=137)),
        (failed(0, "stall", step=7, section="input", exit_code=STALLED), failed(1, "stall", step=7, section="input")),
        (failed(0, "exception", exception="A", stack='  File "a", line 1\n'),) * 2,
    ]
    places = [first.place for first, again in alike if first.place == again.place]
    others = [
        failed(1, "exit", exit_code=4),
        failed(0, "signal", signal="SIGKILL", exit_code=137),
        failed(0, "stall", step=8, section="input"),
        failed(0, "exception", exception="A", stack='  File "a", line 2\n'),
    ]
    assert len({*places, *(other.place for other in others)}) == 8 and None not in places
    assert failed(0, "exception", exception="UnavailableError", stack='  File "a", line 1\n').place is None


def test_repeated_commits_do_not_reset_a_failure_at_the_same_place():
    def seen(before, *steps):
        """Returns flags of the last of two attempts, for (step, folder) pairs, or steps in one folder."""
        attempt = None
        for commits in (before, steps):
            attempt = Commits(attempt)
            for commit in commits:
                attempt.see(commit if commit is None or type(commit) is tuple else (commit, "one"))
        return attempt.any, attempt.again

    assert seen([None], None) == seen([90], 90) == (False, False)
    assert seen([None], 10) == seen([90], 90, 100) == (True, False)
    assert seen([90], 100, 10) == (True, False)  # a second fit
    assert seen([90], 10, 20, 95) == (True, True)  # the same fit again
    assert seen([(90, "one")], (90, "one"), (10, "two")) == (True, False)  # a second stage
    assert seen([(90, "one"), (10, "two")], (10, "two"), (20, "one")) == (True, True)  # the first stage again
    restarts = Restarts(2, 600)
    assert [restarts.pause(0, place) for place in ("b", "a")] == [0, 1]
    restarts.progress(but="a")
    assert restarts.pause(0, "a") == 1
    restarts.progress(but="a")
    assert restarts.pause(0, "a") is None


def test_the_number_of_workers_follows_the_failing_worker():
    size = Size(4, 2, regrow_seconds=300)
    assert not size.failed(3, started=True, progressed=False)
    assert not size.failed(1, started=True, progressed=False)  # another worker fails
    assert size.failed(1, started=True, progressed=False) and size.slots == [0, 2, 3]
    assert size.failed(1, started=False, progressed=False) and size.slots == [0, 3]  # could not even be started
    for _ in range(5):
        assert not size.failed(0, started=True, progressed=False)
    assert size.current == 2
    assert not size.failed(0, started=True, progressed=True) and size.current == 4
    assert not any(size.failed(9, started=True, progressed=False) for _ in range(3))  # no such worker


def test_each_failed_try_with_all_workers_delays_the_next_try():
    size = Size(2, 1, regrow_seconds=300)
    waits = []
    for _ in range(3):
        size.failed(1, started=False, progressed=False)
        waits.append(next(seconds for seconds in itertools.count(0, 100) if size.is_due(seconds)))
        size.regrow()
        assert not size.is_due(1e9)
    assert waits == [300, 600, 1200]


def test_a_failure_told_by_a_peer_has_the_same_place_for_all_supervisors():
    def place(message, step, has_backups=True):
        given = {"exception": "UnavailableError", "message": message, "step": step, "has_backups": has_backups}
        return Failure(0, 0, "host", 0.0, "exception", 1, **given).place

    told = "Collective ops is aborted by: worker 1 ended by SourceError: row 7 [data error]"
    assert place(told, 3) == place(told, 3) is not None and place(told, 3) != place(told, 4)
    assert place(told, 3, has_backups=False) == place(told, 4, has_backups=False)  # Neither kept any step.
    assert place("worker 1 at 10.0.0.1:2222 is gone", 3) is None
