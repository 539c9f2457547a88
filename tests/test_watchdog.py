"""The watchdog ends a stalled job and names the suspect, but never ends a healthy job."""

import contextlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from launched import SCRIPTS, eventually
from tfdist.backup.step_counter import CountedSteps
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.events.event_file import START, read_events, read_header
from tfdist.events.phase_names import (
    AGREEING,
    BUILDING,
    CALLBACK,
    COMPUTE,
    EXCHANGE,
    INPUT,
    ITS_END,
    MEETING,
    SAVE,
    TRACING,
    WAITING,
)
from tfdist.exit_codes import STALLED
from tfdist.faults import FaultTolerance, beside_steps, watchdog, worker_comparison
from tfdist.faults import coordination_store as board_module
from tfdist.faults.activity import Activity, Doing
from tfdist.faults.beside_steps import Creations
from tfdist.faults.coordination_store import DONE, OVER, CoordinationStore
from tfdist.faults.shutdown import hear_aloud
from tfdist.faults.stall_suspect import describe, stalled_at, suspect_of, unlike_calls, yet_to_come
from tfdist.faults.stall_timeout import StallTimeout
from tfdist.faults.stalled_line import stalled_line
from tfdist.faults.watchdog import Watchdog, start
from tfdist.faults.worker_comparison import WorkerComparison
from tfdist.report.missing_workers import last_exchange, missed_exchanges

DEADLINE_SECONDS = 240
MANY = "MultiWorkerMirroredStrategy"


TRAINING = COMPUTE


def live(patience, *phases):
    """Simulates phases of a worker: (steps, activity, seconds per step). With 0 steps, the seconds are the phase's."""
    step, is_first = getattr(patience, "at", (0, True))
    for steps, phase, seconds in phases:
        is_first |= phase is None
        for _ in range(max(steps, 1)):
            patience.observe(phase, step, 0.0, is_first=is_first)
            for _ in range(math.ceil(seconds)):
                patience.observe(phase, step, seconds / math.ceil(seconds), is_first=is_first)
                if patience.is_over:
                    return False
            step += 1 if steps else 0
            if steps and phase == TRAINING:
                patience.learn(seconds, is_first)
                is_first = False
            patience.observe(phase, step, 0.0, is_first=is_first)
    patience.at = step, is_first
    return True


HEALTHY = {
    "long first step": [(1, TRAINING, 1200), (100, TRAINING, 0.3)],
    "a step traced again": [(1, TRAINING, 40), (50, TRAINING, 0.3), (1, TRAINING, 110), (50, TRAINING, 0.3)],
    "slow steps": [(1, TRAINING, 100), (5, TRAINING, 30), (1, TRAINING, 290)],
    "slower and slower": [(1, TRAINING, 20), *((1, TRAINING, 20 * 1.5**i) for i in range(8))],
    "hours between two fits": [(9, TRAINING, 1), (0, None, 20000), (1, TRAINING, 900)],
    "a long save": [(9, TRAINING, 1), (0, "save", 1700), (9, TRAINING, 1)],
    "validation after each epoch": [
        (9, TRAINING, 1),
        (0, "validation", 1200),
        (9, TRAINING, 1),
        (0, "validation", 1200),
    ],
    "a fit in a callback": [(20, TRAINING, 10), (100, "callback", 0.1), (1, TRAINING, 70)],
    "never trained": [(0, None, 100000)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_worker_has_time(name):
    assert live(StallTimeout(), *HEALTHY[name])


STUCK = {
    "first step": ([], TRAINING, 1800),
    "quick steps": ([(1, TRAINING, 15), (100, TRAINING, 0.2)], TRAINING, 60),
    "slow steps": ([(1, TRAINING, 30), (100, TRAINING, 10)], TRAINING, 200),
    "slow first step": ([(1, TRAINING, 100), (100, TRAINING, 0.2)], TRAINING, 300),
    "steps of minutes": ([(1, TRAINING, 300), (3, TRAINING, 240)], TRAINING, 1800),
    "callback": ([(50, TRAINING, 1)], "callback", 1800),
    "first step of a later fit": ([(50, TRAINING, 1), (0, None, 5)], TRAINING, 1800),
    "first input": ([], INPUT, 1800),
    "tracing": ([(50, TRAINING, 1)], TRACING, 1800),
    "later input": ([(50, TRAINING, 1)], INPUT, 60),
    "waits for others in the first step": ([], EXCHANGE, 60),
    "waits for others in a step": ([(50, TRAINING, 1)], EXCHANGE, 60),
    "waits for others who take long": ([(1, TRAINING, 30), (100, TRAINING, 10)], EXCHANGE, 200),
    "waits for others to come to a call": ([], MEETING, 300),
}


@pytest.mark.parametrize("name", STUCK)
def test_a_stuck_worker_gets_the_time_of_the_rule(name):
    before, activity, seconds = STUCK[name]
    patience = StallTimeout(meeting_seconds=300)
    assert live(patience, *before)
    assert live(patience, (0, activity, seconds))
    assert not live(patience, (0, activity, 5))


@pytest.mark.parametrize("phase", [TRAINING, INPUT, EXCHANGE, CALLBACK, "save"])
def test_a_given_timeout_holds_in_and_between_steps(phase):
    patience = StallTimeout(10)
    assert live(patience, (1, TRAINING, 500), (50, TRAINING, 1), (0, phase, 9))
    assert not live(patience, (0, phase, 5))


@pytest.mark.parametrize("phase", [INPUT, EXCHANGE, CALLBACK])
def test_a_given_timeout_holds_from_the_first_step_on_if_nothing_is_prepared(phase):
    patience = StallTimeout(10)
    assert live(patience, (0, TRACING, 500), (0, phase, 9))
    assert not live(patience, (0, phase, 5))


@pytest.mark.parametrize("phase", [BUILDING, TRACING, COMPUTE])
def test_a_given_timeout_does_not_limit_the_preparation_of_the_first_step(phase):
    patience = StallTimeout(10)
    assert live(patience, (0, phase, 1700)) and patience.may_take_long
    assert not live(patience, (0, phase, 200))


def test_exchanged_bytes_are_progress():
    patience = StallTimeout()
    for second in range(600):  # 256 KiB every 20 s, which is 0.1 Mbit/s
        patience.observe(EXCHANGE, 0, 1.0, carried=second // 20 << 18)
        assert not patience.is_over and (second < 20 or patience.carries)
    assert not live(patience, (0, EXCHANGE, 62)) and not patience.carries
    patience = StallTimeout(4)
    told = []
    for phase, carried in [(COMPUTE, 1), (EXCHANGE, 2), (EXCHANGE, 2), (EXCHANGE, 2), (CALLBACK, 3)]:
        patience.observe(phase, 0, 1.0, carried=carried)
        told.append(patience.carries)
    assert told == [False, True, True, False, False]


def test_a_first_exchange_with_uncounted_bytes_has_ten_minutes():
    patience = StallTimeout(sees_bytes=False)
    assert live(patience, (0, EXCHANGE, 600)) and not live(patience, (0, EXCHANGE, 5))
    patience = StallTimeout(sees_bytes=False)
    assert live(patience, (1, TRAINING, 1), (0, EXCHANGE, 60)) and not live(patience, (0, EXCHANGE, 5))


def test_peers_know_what_may_take_long():
    patience = StallTimeout()
    told = []
    for step, phase in ((0, None), (0, TRAINING), (0, EXCHANGE), (1, TRAINING), (1, "save"), (1, MEETING), (1, None)):
        patience.observe(phase, step, 1.0, is_first=not step)
        told.append(patience.may_take_long)
    assert told == [False, True, False, False, True, False, False]


def test_peers_do_not_wait_beyond_the_limit_of_a_long_section():
    for before, activity in (([], TRAINING), ([(9, TRAINING, 1)], "validation")):
        patience = StallTimeout()
        assert live(patience, *before, (0, activity, 1700))
        assert patience.may_take_long
        assert not live(patience, (0, activity, 200))
        assert not patience.may_take_long


@pytest.mark.parametrize("activity", [TRAINING, "validation"])
def test_progress_within_and_between_steps_extends_the_time(activity):
    patience = StallTimeout()
    for batch in range(1000):  # skipped after a restart, or used for validation
        patience.observe(activity, (0, batch), 10.0)
        assert not patience.is_over


def test_validation_and_skipped_batches_count_as_progress():
    strategy = tfdist.MirroredStrategy(["CPU:0"], fault_tolerance=FaultTolerance(stall_timeout_seconds=7))
    assert strategy.fault_tolerance.stall_timeout_seconds == 7
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2))
    model.evaluate(x, x[:, :1], verbose=0)
    before = strategy.reports.evaluated
    model.evaluate(x, x[:, :1], verbose=0)
    assert strategy.reports.evaluated > before > 0
    counted, before = CountedSteps(next, 1), beside_steps.moves()
    counted.pass_over(3, 2, lambda _: None, reads=True, runs_last=False, logs=None)
    iterator = iter(range(9))
    assert [counted(iterator) for _ in range(4)] == [None, None, None, 5]
    assert beside_steps.moves() == before + 5


def test_a_fit_without_a_strategy_is_watched_only_within_another_fit():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    dog = Watchdog(strategy, CoordinationStore(0, 1), StallTimeout(), Creations())
    x, seen = np.ones((4, 2)), []

    def look():
        with ThreadPoolExecutor(1) as pool:  # from another thread, as the watchdog does
            pool.submit(dog._look, 0.0).result()
        seen.append(dog._position["section"])

    def loss(y_true, y_pred):
        look()
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    def build():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss, run_eagerly=True)
        return model

    def looked(model, **options):
        seen.clear()
        model.fit(x, x[:, :1], verbose=0, **options)
        return set(seen)

    def at_end(function):
        return [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: function())]

    plain = build()
    with strategy.scope():
        own = build()
    assert looked(plain) == {None}
    assert None not in looked(own)
    assert looked(plain) == {None}
    assert {"callback", None} - looked(own, callbacks=at_end(lambda: plain.fit(x, x[:, :1], verbose=0))) == {None}
    with pytest.raises(ZeroDivisionError):
        own.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0, callbacks=at_end(lambda: 1 / 0))
    assert looked(plain) == {None}  # Keras still holds the validation data of `own`.
    with beside_steps.waiting_for_all("what a fit of the strategy exchanges before its first step"):
        assert None not in looked(plain)


def at(step, section):
    return {"step": step, "section": section}


SUSPECTS = {
    "one is silent": ({0: at(5, "exchange"), 1: None, 2: at(4, "input")}, 1),
    "one is behind": ({0: at(5, "input"), 1: at(4, "exchange"), 2: at(5, "exchange")}, 1),
    "one computes": ({0: at(5, "exchange"), 1: at(5, "exchange"), 2: at(5, "compute")}, 2),
    "one waits for input": ({0: at(5, "input"), 1: at(5, "exchange")}, 0),
    "one is in a callback": ({0: at(5, "input"), 1: at(5, "callback")}, 1),
    "all wait": ({0: at(5, "exchange"), 1: at(5, "exchange")}, None),
    "two compute": ({0: at(5, "compute"), 1: at(5, "compute"), 2: at(5, "exchange")}, None),
}


def within(name, number, section="exchange", step=5):
    return {"step": step, "section": section, "call": [name, number], "begun": number}


def outside(begun, step=5):
    return {"step": step, "section": None, "call": None, "begun": begun}


SUSPECTS |= {
    "one has left the call": ({0: within("fit", 3), 1: outside(3)}, 1),
    "one is in another call": ({0: within("fit", 3), 1: within("predict", 3), 2: within("fit", 3)}, 1),
    "each of two is in another call": ({0: within("fit", 3), 1: within("predict", 3)}, None),
    "one alone was told to stop": ({0: within("fit", 3), 1: within("fit", 3) | {"has_stopped": True}}, 1),
    "one is over": ({0: within("fit", 3), 1: {**outside(3), "section": ITS_END}}, 1),
    "one waits at the beginning of a call": ({0: within("fit", 3, MEETING), 1: within("fit", 3, CALLBACK)}, 1),
}


def test_workers_that_wait_in_different_calls_are_named_with_their_calls():
    said = unlike_calls({0: within("train_on_batch", 7), 1: within("predict", 7, MEETING)})
    assert "worker 0 is in `train_on_batch`, call 7 of its program, worker 1 is in `predict`, call 7" in said
    for other in (within("fit", 3), within("predict", 4, CALLBACK), within("predict", 4, COMPUTE), outside(4), None):
        assert unlike_calls({0: within("fit", 3), 1: other}) is None, "it is in the same, or may come yet"


def test_a_worker_outside_of_calls_may_still_join_only_the_next_call():
    assert yet_to_come({0: outside(2), 1: outside(3), 2: within("fit", 2), 3: None}, 3) == [0]


def test_the_description_of_workers_names_their_calls():
    said = describe({0: within("fit", 3, step=4), 1: outside(2), 2: None, 3: at(4, "input")})
    assert said == (
        "worker 0 is in step 5 (exchange) of `fit`, call 3, worker 1 is in no call of the strategy, after 2 calls "
        "and 5 steps, worker 2 does not answer, worker 3 is in step 5 (input)"
    )
    hangs = describe({1: within("fit", 3, CALLBACK) | {"line": "train.py:31 in on_epoch_end"}})
    assert hangs == "worker 1 is in step 6 (callback at train.py:31 in on_epoch_end) of `fit`, call 3"


def test_the_line_of_a_stall_is_the_innermost_one_of_the_users_code():
    fit = (inspect.getfile(inspect.unwrap(keras.Model.fit)), 400, "fit")
    thread, program = (threading.__file__, 5, "wait"), ("/home/me/train.py", 40, "main")
    training = [thread, ("/home/me/train.py", 31, "f" * 500), ("/x/site-packages/keras/a.py", 1, "b"), fit, program]
    feeding = [thread, ("/home/me/rows.py", 7, "decode"), ("/x/site-packages/tensorflow/ops.py", 1, "call")]
    other = [thread, ("/home/me/log.py", 3, "poll")]
    stacks = {1: other, 2: feeding, 3: training}
    assert stalled_line(stacks, CALLBACK) == f"train.py:31 in {'f' * 80}"
    assert stalled_line(stacks, "input") == "rows.py:7 in decode"
    assert stalled_line({1: other, 3: [thread, fit, program]}, "input") == "train.py:40 in main"
    enqueuer = (inspect.getfile(keras.utils.PyDataset), 398, "get_index")
    reading = [thread, ("/home/me/pictures.py", 9, "__getitem__"), enqueuer, (threading.__file__, 982, "run")]
    waiting = [thread, enqueuer, ("/x/site-packages/tensorflow/ops.py", 1, "call")]
    assert stalled_line({2: waiting, 3: training, 4: reading}, "input") == "pictures.py:9 in __getitem__"
    assert stalled_line({3: training, 4: reading}, CALLBACK) == f"train.py:31 in {'f' * 80}"
    assert stalled_line({1: other}, EXCHANGE) == ""


@pytest.mark.parametrize("name", SUSPECTS)
def test_the_suspect_is_the_worker_that_its_peers_wait_for(name):
    positions, expected = SUSPECTS[name]
    assert suspect_of(positions) == expected


def test_a_worker_that_waits_for_no_peer_suspects_itself_and_not_a_silent_peer():
    assert suspect_of({0: None, 1: at(4, CALLBACK)}, own=1) == 1
    assert suspect_of({0: None, 1: at(4, "exchange")}, own=1) == 0
    for section in (AGREEING, SAVE):
        assert suspect_of({0: None, 1: at(4, section)}, own=1) == 0, "it waits for the silent peer"
        assert suspect_of({0: at(4, CALLBACK), 1: at(4, section)}, own=1) == 0
    assert suspect_of({0: at(4, EXCHANGE), 1: at(4, AGREEING)}, own=1) is None


def test_a_failed_or_unlimited_watchdog_still_refuses_different_models(caplog, monkeypatch):
    class Reports:
        number, tells, has_stopped, activity = 0, True, False, Activity()

        def doing(self):
            if not failures:
                failures.append("once")
                raise ZeroDivisionError
            return Doing(None, 0, 0, None, False, False, None)

    class Strategy:
        fault_tolerance = FaultTolerance(stall_timeout_seconds=math.inf, start_timeout_seconds=2.5)
        reports = Reports()

    class CoordinationStore:
        worker, workers, others = 0, 1, ()
        errors = None

        def say(self, subject, what):
            pass

        def report_error(self, message):
            self.errors = message

    def told():
        return [text for text in caplog.messages if "variable number 1 in the scope" in text]

    failures = []
    monkeypatch.setattr(watchdog, "_TELL_SECONDS", 0.2)
    strategy, board, creations = Strategy(), CoordinationStore(), Creations()
    with creations.one_more():
        start(strategy, board, creations)
        # A watchdog that is late tells which variable is awaited only after the error.
        assert eventually(lambda: board.errors and told())
    assert "All workers must make the same variables" in board.errors
    assert failures and "ZeroDivisionError" in caplog.text and "the watchdog continues" in caplog.text
    assert live(StallTimeout(math.inf), (9, TRAINING, 1), (0, TRAINING, 10**5))


class Words(CoordinationStore):
    """A coordination store with messages of peers; `at_end` arrives while this worker asks which programs are over."""

    def __init__(self, workers, words, at_end=None):
        super().__init__(0 if workers == 2 else 1, workers)
        self.words, self.at_end = words, at_end or {}

    def hear(self, subject, worker, timeout_seconds):
        if subject in (DONE, OVER):
            self.words |= self.at_end
        if subject not in self.words:
            raise tf.errors.DeadlineExceededError(None, None, subject)
        return self.words[subject]


def test_a_worker_that_waits_for_a_message_learns_that_a_program_has_ended():
    with pytest.raises(ClusterError, match=r"All workers must take part in .*model.* program of worker 2 has ended"):
        Words(3, {OVER: 2})._await("model-7", 0, time.monotonic() + 300)
    with pytest.raises(tf.errors.DeadlineExceededError):
        Words(2, {})._await("model-7", 1, time.monotonic() + 1)
    with pytest.raises(ClusterError, match=r"All workers must take part in the save, .* worker 0 has ended"):
        WorkerComparison(Words(3, {OVER: 0, DONE: True}), 60).wait_for_chief("the save", lambda _: None)


def test_a_message_written_just_before_the_end_of_a_program_is_read():
    over = {OVER: 0, DONE: True}
    assert Words(3, {}, {"model-7": "mine", **over})._await("model-7", 0, time.monotonic() + 300) == "mine"
    board = Words(3, {})
    board.at_end = {f"alone-the backup-{worker_comparison._done_alone['the backup'] + 1}": {"failure": None}, **over}
    WorkerComparison(board, 60).wait_for_chief("the backup", lambda _: None)


def test_a_call_that_ends_during_the_check_for_absent_workers_is_no_fault(monkeypatch):
    monkeypatch.setattr(watchdog, "_ABSENCE_SECONDS", -1.0)
    errors, ended = [], contextlib.ExitStack()
    board = Words(3, {OVER: 0})
    board.report_error = errors.append
    dog = Watchdog(Lone(), board, StallTimeout(), Creations())
    with ended:
        ended.enter_context(beside_steps.waiting_for_all("a broadcast"))
        board.absent = lambda: ended.close() or 0
        dog._look_for_the_absent()
    assert not errors
    with beside_steps.waiting_for_all("a broadcast"):
        board.absent = lambda: 0
        dog._look_for_the_absent()
    assert len(errors) == 1 and "program of worker 0 has ended" in errors[0]


def test_the_check_for_absent_workers_costs_one_message_for_any_number_of_workers(monkeypatch):
    class Service:
        said, asked = {}, 0

        def get_config_key_value(self, key, milliseconds):
            self.asked += 1
            if key not in self.said:
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self.said[key]

        def set_config_key_value(self, key, value):
            if key in self.said:
                raise tf.errors.AlreadyExistsError(None, None, key)
            self.said[key] = value

        def delete_config_key_value(self, key):
            self.said.pop(key, None)

    service = Service()
    monkeypatch.setattr(
        board_module, "tf_internals", types.SimpleNamespace(context=types.SimpleNamespace(context=lambda: service))
    )
    boards = [CoordinationStore(worker, 100) for worker in range(100)]
    assert boards[0].absent() is None and service.asked == 1
    boards[7].say_over(True)
    boards[8].say_over(False)
    assert boards[0].absent() == 7 and service.asked == 2
    assert boards[7].absent() is None, "it is not absent for itself"
    assert [boards[0].hear(DONE, worker, 1) for worker in (7, 8)] == [True, False]
    boards[0].say_over(False, 9)
    assert [worker for worker in range(100) if boards[0].is_over(worker)] == [7, 8, 9]


class Exchanging:
    """A strategy that waits for peers in each step. Records the seconds at which its watchdog asks the peers."""

    fault_tolerance = FaultTolerance()
    number, tells, has_stopped, step, phase = 0, True, False, 0, EXCHANGE

    def __init__(self, carried=None):
        self.reports, self.activity, self.asked = self, Activity(), []
        self.dog = Watchdog(self, Words(3, {}), StallTimeout(meeting_seconds=300), Creations(), carried)

    def doing(self):
        return Doing("fit", 3, 3, self.phase, True, False, self.step)

    def live(self, seconds):
        for second in range(seconds):
            self.dog._look(1.0)
            if self.dog._is_to_be_warned:
                self.asked.append(second)
                self.dog._warn({worker: within("fit", 3) for worker in range(3)})


def test_a_healthy_wait_asks_for_positions_once_before_each_warning():
    worker = Exchanging()
    for worker.step in range(2):
        worker.live(120)
    assert worker.asked == 2 * [9, 31, 92]


def test_only_a_worker_that_waits_for_no_peer_tells_the_line_in_which_it_hangs(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "stalled_line", lambda calls, section: f"rows.py:7 in {section}")
    worker, told = Exchanging(), {}
    for worker.phase in (None, INPUT, COMPUTE, EXCHANGE, CALLBACK, MEETING, WAITING, SAVE, AGREEING, ITS_END):
        worker.dog._line_read = -math.inf
        worker.live(9)
        assert worker.dog._line_for_peers() is None
        worker.live(3)
        told[worker.phase] = worker.dog._line_for_peers()
    hangs = (INPUT, COMPUTE, CALLBACK, SAVE)
    assert told == {each: f"rows.py:7 in {each}" if each in hangs else None for each in told}
    worker.phase, worker.dog._line_read = INPUT, -math.inf
    worker.live(40)
    assert "worker 1 is in step 1 (input at rows.py:7 in input) of `fit`, call 3" in caplog.text


def test_the_line_of_a_stall_is_that_of_the_suspect_or_else_that_of_the_worker():
    at_line = at(4, CALLBACK) | {"line": "train.py:31 in on_epoch_end"}
    own = at(4, INPUT) | {"line": "rows.py:7 in decode"}
    assert stalled_at({0: own, 1: at_line}, 1, 0) == "train.py:31 in on_epoch_end"
    for suspect in (None, 0, 1):
        assert stalled_at({0: own, 1: None}, suspect, 0) == "rows.py:7 in decode"
    assert stalled_at({0: at(4, EXCHANGE) | {"line": None}, 1: at(4, EXCHANGE)}, 1, 0) is None


def test_positions_are_asked_for_at_the_end_of_the_program_too(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    dog = Exchanging().dog
    monkeypatch.setattr("threading.Thread.start", refuse)  # As Python 3.12 does then.
    dog._board.words[dog._subject] = {"step": 4}
    assert dog._listen() == {worker: {"step": 4} for worker in range(3)}


def test_a_waiting_worker_is_not_ended_while_bytes_arrive_or_peers_exchange(monkeypatch):
    counted, ended = iter(range(10**6)), []
    worker = Exchanging(lambda: next(counted))
    worker.live(1000)
    assert not worker.asked and worker.dog._position["carries"]
    worker.dog._carried = lambda: 0
    worker.live(100)
    assert worker.asked and worker.dog._patience.is_over and not worker.dog._position["carries"]
    for others_carry in (True, False):
        position = {**within("fit", 3), "carries": others_carry}
        monkeypatch.setattr(worker.dog, "_ask", lambda position=position: {0: position, 1: worker.dog._position})
        monkeypatch.setattr(worker.dog, "_end", ended.append)
        worker.dog._judge()
        assert bool(ended) != others_carry


def test_the_wait_for_first_batches_of_peers_ends_if_no_peer_is_busy(monkeypatch):
    monkeypatch.setattr(watchdog, "_POST_SECONDS", 0.0)
    worker, seen, errors = Exchanging(), [], []
    board = worker.dog._board
    board.say_once = board.forget = lambda *_: None
    board.report_error = errors.append

    def looks():
        worker.live(100)
        seen.append(worker.dog._position["section"])
        if worker.dog._patience.is_over:
            worker.dog._judge()
        return False

    with pytest.raises(ClusterError, match="begin each call within 300 s of each other"):
        WorkerComparison(board, 300).is_alike("rows-1", 7, True, looks)
    assert seen == 4 * [MEETING] and worker.asked[:2] == [9, 31] and len(errors) == 1
    worker.dog._look(0.0)
    assert worker.dog._position["section"] == EXCHANGE


class Lone:
    fault_tolerance = FaultTolerance()


def test_a_worker_that_trains_alone_has_its_index_of_tf_config(monkeypatch):
    started = []
    monkeypatch.setattr(watchdog, "is_supervised", lambda: True)
    monkeypatch.setattr(watchdog, "start", lambda strategy, board, creations: started.append(board))
    monkeypatch.setenv("TF_CONFIG", ClusterSpec.local(4, 2, [2301, 2302, 2303, 2304]).to_json())
    watchdog.start_alone(Lone())
    monkeypatch.delenv("TF_CONFIG")
    watchdog.start_alone(Lone())
    monkeypatch.setattr(watchdog, "is_supervised", lambda: False)
    watchdog.start_alone(Lone())
    watchdog.start_alone(Lone(), has_peers=True)
    assert [(board.worker, board.others) for board in started] == [(2, []), (0, []), (0, [])]


def test_training_alone_on_one_worker_keeps_the_numbers_of_watchdogs_equal():
    def made(board):
        return Watchdog(Lone(), board, StallTimeout(), Creations())._subject

    first, *_, second = (
        made(board) for board in (CoordinationStore(0, 2), CoordinationStore(1, 1), CoordinationStore(0, 2))
    )
    assert int(second.split("-")[1]) == int(first.split("-")[1]) + 1


def test_a_worker_that_is_done_logs_its_wait_and_its_end(caplog):
    class Silent:
        worker, heard = 1, 0.0

        def hear(self, subject, worker, timeout_seconds):
            self.heard += timeout_seconds
            raise tf.errors.DeadlineExceededError(None, None, subject)

    board = Silent()
    with pytest.raises(tf.errors.DeadlineExceededError), caplog.at_level("WARNING", logger="absl"):
        hear_aloud(board, "leave", 0, 60)
    assert board.heard == 60
    assert "worker 1 is done, and waits up to 40 s more for worker 0" in caplog.text
    assert "worker 1 leaves before worker 0" in caplog.text


class Looking(keras.layers.Layer):
    """A layer that calls `look` while it is traced and when it runs."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def call(self, x):
        self.look("trace")
        ran = tf.numpy_function(lambda x: self.look("run") or x, [x], tf.float32)
        return keras.ops.reshape(ran, keras.ops.shape(x))

    def compute_output_shape(self, shape):
        return shape


class Rows(keras.utils.PyDataset):
    def __init__(self, x, look):
        super().__init__()
        self.x, self.look = x, look

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.look("read")
        return self.x[:2], self.x[:2, :1]

    def on_epoch_begin(self):
        self.look("between")

    def on_epoch_end(self):
        self.look("between")


def rows_in_graph(x, look):
    rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)

    def read(x, y):
        return tf.ensure_shape(tf.numpy_function(lambda x: look("read") or x, [x], tf.float32), [None, 2]), y

    return rows.map(read)


def generated(x, look):
    for _ in range(4):
        look("read")
        yield x[:2], x[:2, :1]


KINDS = {
    "arrays": lambda strategy, x, look: x,
    "tf.data": lambda strategy, x, look: rows_in_graph(x, look),
    "generator": lambda strategy, x, look: generated(x, look),
    "PyDataset": lambda strategy, x, look: Rows(x, look),
    "distributed": lambda strategy, x, look: strategy.experimental_distribute_dataset(rows_in_graph(x, look)),
    "dataset function": lambda strategy, x, look: strategy.distribute_datasets_from_function(
        lambda context: rows_in_graph(x, look)
    ),
}


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        *(("PyDataset", 1), ("distributed", 1), ("tf.data", 2), ("arrays", "eager")),
        *(
            pytest.param(kind, 1, marks=pytest.mark.exhaustive)
            for kind in KINDS
            if kind not in ("PyDataset", "distributed")
        ),
    ],
)
def test_activities_are_noted_for_all_kinds_of_input(kind, steps, monkeypatch):
    def refused():
        raise AssertionError("frames of other threads are not looked at while training is healthy")

    monkeypatch.setattr(sys, "_current_frames", refused)
    strategy, seen = tfdist.MirroredStrategy(["CPU:0"]), {}

    def look(part):
        with ThreadPoolExecutor(1) as pool:  # from another thread, as the watchdog does
            doing = pool.submit(strategy.reports.doing).result()
        seen.setdefault(part, set()).add((doing.call, doing.phase))

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Looking(look), keras.layers.Dense(1)])
        options = {"run_eagerly": True} if steps == "eager" else {"steps_per_execution": steps}
        model.compile("sgd", "mse", **options)
    x = np.ones((8, 2), "float32")
    data = KINDS[kind](strategy, x, look)
    between = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: look("between"), on_epoch_end=lambda epoch, logs: look("between")
    )
    seen.clear()
    model.fit(data, x[:, :1] if kind == "arrays" else None, batch_size=2, epochs=2, verbose=0, callbacks=[between])
    look("after")
    assert seen.pop("after") == {(None, None)}
    assert seen.pop("between") <= {("fit", CALLBACK), ("fit", BUILDING), (None, None)}
    assert seen.pop("run") == {("fit", COMPUTE)}
    assert seen.pop("trace") <= {("fit", BUILDING), ("fit", COMPUTE if steps == "eager" else TRACING)}
    # Prefetching reads data beside any activity of the worker.
    assert set(seen) <= {"read"} and seen.get("read", {("fit", INPUT)}) & {("fit", INPUT), (None, None)}
    seen.clear()
    model.evaluate(x, x[:, :1], batch_size=2, verbose=0)
    model.predict(x, batch_size=2, verbose=0)
    model.train_on_batch(x, x[:, :1])
    model.test_on_batch(x, x[:, :1])
    model.predict_on_batch(x)
    calls = {"evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"}
    assert {call for call, _ in seen["run"]} == calls
    assert strategy.reports.doing()[:3] == (None, 0, 6)
    firsts = [first for _, first in strategy.reports.activity.step_seconds]
    assert firsts[0] and len(firsts) >= 4 and not any(firsts[1:]), "a step that is no first tells how long one takes"


def test_a_failed_call_has_ended_although_its_exception_is_kept():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, kept = np.ones((4, 2)), []

    def fails(where):
        with pytest.raises(ZeroDivisionError) as error:
            model.fit(
                x, x[:, :1], verbose=0, callbacks=[keras.callbacks.LambdaCallback(**{where: lambda *_, **__: 1 / 0})]
            )
        kept.append(error)

    fails("on_epoch_end")
    assert strategy.reports.doing().call == "fit", "nothing tells before the next call, or a look at the stacks"
    model.fit(x, x[:, :1], verbose=0)
    assert strategy.reports.doing().call is None
    fails("on_train_batch_begin")
    dog = Watchdog(strategy, CoordinationStore(0, 1), StallTimeout(0.001), Creations())
    dog._look(1.0)
    dog._look(1.0)
    assert dog._patience.is_over
    dog._judge()  # Otherwise the watchdog would end this process.
    assert strategy.reports.doing().call is None


def train(directory, *, fault, sleep, stall_seconds, workers=2, stops=None, writes=False, strategy=MANY):
    """Returns the workers' exit codes, outputs and failure reports."""
    options = {"fault": fault, "sleep": sleep, "workers": workers, "stops": stops, "writes": writes}
    return launch(directory, "watched_training", {**options, "strategy": strategy}, stall_seconds, workers)


def launch(directory, script, options, stall_seconds, workers, seconds=DEADLINE_SECONDS):
    """Runs a script of the folder `scripts`. Returns the workers' exit codes, outputs and failure reports."""
    command = [sys.executable, "-u", str(SCRIPTS / f"{script}.py"), json.dumps(options)]
    ports = free_ports(workers)
    processes = []
    try:
        for index in range(workers):
            env = {
                **{"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ},
                "TF_CONFIG": ClusterSpec.local(workers, index, ports).to_json(),
                "TFDIST_STALL_TIMEOUT_SECONDS": str(stall_seconds),
                "TFDIST_RUN_DIR": str(directory / "run"),
                "TFDIST_ATTEMPT": "3",
            }
            with (directory / f"worker-{index}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        deadline = time.monotonic() + seconds
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    outputs = [(directory / f"worker-{index}.log").read_text() for index in range(workers)]
    reports = [json.loads(path.read_text()) for path in sorted((directory / "run").rglob("failure-*.json"))]
    return codes, outputs, reports


def test_an_endless_loop_ends_the_job_with_the_name_and_stack_of_its_worker(tmp_path):
    codes, outputs, reports = train(tmp_path, fault=True, sleep=0, stall_seconds=8)
    assert STALLED in codes and 0 not in codes, outputs
    stalls = [report for report in reports if report["kind"] == "stall"]
    assert stalls, reports
    assert all((tmp_path / f"run/attempt-3/failure-{report['worker']}.json").exists() for report in reports)
    # Either worker may report the stall first; the other then learns it from the end of its peer.
    first = min(stalls, key=lambda report: report["time"])
    assert first["suspect"] == 1, reports
    assert first["step"] == 30 and first["message"] in outputs[first["worker"]]
    assert "on_train_batch_end" in first["stack"] or first["worker"] == 0
    assert re.fullmatch(r"watched_training\.py:\d+", first["line"]) and f" at {first['line']})" in first["message"]
    assert "Thread MainThread:" in outputs[first["worker"]]
    waits, hangs = (read_events(tmp_path / f"run/attempt-3/events-{worker}.jsonl") for worker in range(2))
    assert (waits.header["phase"], hangs.header["phase"], hangs.header["step"]) == (EXCHANGE, CALLBACK, 30)
    assert "on_train_batch_end" in [function for _, _, function in hangs.stacks["MainThread"]]
    missed = missed_exchanges({0: waits, 1: hangs})
    assert missed and all((each.absent, each.step) == ([1], 30) and each.bytes > 0 for each in missed), missed
    assert last_exchange({0: waits, 1: hangs}, 1).key < missed[0].key
    kinds = {event.kind for event in waits.events}
    assert kinds >= {"start-up", "call", "building", "tracing", "run", "step", "exchange"}, kinds


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "writes",
    [
        pytest.param(False, id="done", marks=pytest.mark.exhaustive),
        pytest.param(True, id="waits for the chief to write"),
    ],
)
def test_a_worker_that_alone_set_stop_training_is_named(tmp_path, writes):
    codes, outputs, reports = train(tmp_path, fault=False, sleep=0, stall_seconds=4, stops=1, writes=writes)
    assert ("finished" in outputs[1]) != writes and codes[0] == STALLED and codes[1] != 0, outputs
    assert "`model.stop_training` was set only on worker 1." in outputs[0]
    (stall,) = [report for report in reports if report["kind"] == "stall"]
    assert stall["worker"] == 0 and stall["suspect"] == 1 and stall["step"] == 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["MirroredStrategy", MANY])
def test_an_endless_loop_of_a_lone_supervised_worker_is_ended(strategy, tmp_path):
    codes, outputs, reports = train(tmp_path, fault=True, sleep=0, stall_seconds=3, workers=1, strategy=strategy)
    assert codes == [STALLED], outputs
    assert [(report["kind"], report["suspect"], report["step"]) for report in reports] == [("stall", 0, 30)]


@pytest.mark.exhaustive
def test_a_long_callback_on_one_worker_within_its_limit_ends_nothing(tmp_path):
    codes, outputs, reports = train(tmp_path, fault=False, sleep=6, stall_seconds=12)
    assert codes == [0, 0] and reports == [], outputs
    assert all("finished" in output for output in outputs)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["events-0.jsonl", "events-1.jsonl", "times-0.bin", "times-1.bin"]
    assert {read_header(path)["why"] for path in files if path.suffix == ".jsonl"} == {START}


IN_STEPS = ["stops", "hangs in a callback", "predicts in a callback", "hangs at the end of an epoch"]
BETWEEN = ["predict", "evaluate", "train_on_batch", "leaves"]
CELLS = [
    *((act, kind, 0, False, 1) for act in [*IN_STEPS, *BETWEEN] for kind in ("arrays", "tf.data", "generator")),
    *((act, kind, 0, False, 1) for act in ("hangs in its first input", "hangs in its input") for kind in ("tf.data",)),
    *((act, kind, 2, True, 1) for act in ("stops", "leaves") for kind in ("PyDataset", "function")),
    *((act, "tf.data", 1, True, 4) for act in ("stops", "hangs in its input", "predict")),
]


# By default, test_faults.py has a worker that stops alone, and the tests above compare calls without processes.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("act", "kind", "verbose", "writes", "steps"), CELLS)
def test_no_worker_waits_beyond_its_deadline_for_a_different_call(act, kind, verbose, writes, steps, tmp_path):
    options = {"act": act, "kind": kind, "verbose": verbose, "writes": writes, "steps": steps}
    codes, outputs, reports = launch(tmp_path, "unlike_calls", options, 6, 2)
    assert codes[0] != 0, outputs
    assert "worker 1" in outputs[0] + outputs[1], outputs
    if act in ("predict", "evaluate", "train_on_batch"):
        assert f"`{act}`" in outputs[0] + outputs[1], outputs
    elif STALLED in codes:
        stalls = [report for report in reports if report["kind"] == "stall"]
        assert {report["suspect"] for report in stalls} <= {1, None}, reports
        waits, acting = (read_events(tmp_path / f"run/attempt-3/events-{worker}.jsonl") for worker in range(2))
        if "input" in act:
            assert acting.header["phase"] == INPUT and waits.header["phase"] in (EXCHANGE, INPUT, MEETING)
            assert any("read" in [call[2] for call in calls] for calls in acting.stacks.values()), acting.stacks
        assert "No progress for" in outputs[stalls[0]["worker"]]
