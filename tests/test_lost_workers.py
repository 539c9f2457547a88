"""Workers go on without a lost one, which joins again: averages, messages, members, restarts, and real runs."""

import dataclasses
import json
import signal
import socket
import subprocess
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from certificates import Authority
from launched import SCRIPTS, eventually, nothing_left
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError, WorkerLostError
from tfdist.exit_codes import PREEMPTED
from tfdist.failure_kinds import FailureKind
from tfdist.launch.absences import Absence, Absences
from tfdist.launch.lone_restarts import LoneRestarts
from tfdist.launch.lost_workers import LostWorkers
from tfdist.launch.restart_policy import Chance
from tfdist.launch.worker_group import WorkerExit
from tfdist.members_record import MembersRecord
from tfdist.network.handshake import RefusedError, introduce
from tfdist.network.tls import TLS_VARIABLES, Tls
from tfdist.run_files import RunFiles
from tfdist.strategies.elastic import member_link, round_member
from tfdist.strategies.elastic.elastic_input import own_rows
from tfdist.strategies.elastic.elastic_start import setup_of_worker, take_greeting
from tfdist.strategies.elastic.member_link import MemberLink
from tfdist.strategies.elastic.member_role import MemberRole
from tfdist.strategies.elastic.member_socket import MemberSocket
from tfdist.strategies.elastic.outer_step import OuterStep
from tfdist.strategies.elastic.round_averaging import RoundAveraging
from tfdist.strategies.elastic.round_chief import RoundChief
from tfdist.strategies.elastic.round_member import RoundMember
from tfdist.strategies.elastic.round_messages import Message, receive_message, send_message
from tfdist.strategies.elastic.round_policy import (
    Contribution,
    RowLedger,
    average_by_rows,
    steps_of_equal_time,
    trains,
)
from tfdist.strategies.local_steps.synchronization import check_synchronization

SECONDS = 120.0
SILENCE_SECONDS = 60.0  # Longer than a busy machine stops a thread that sends signs of life.

# Policy.


@pytest.mark.unit
@pytest.mark.parametrize(("trained", "every"), [(1, 1), (3, 10), (10, 10), (7, 100), (99, 100)])
def test_trained_steps_are_spread_evenly(trained, every):
    steps = [step for step in range(every) if trains(step, trained, every)]
    assert len(steps) == trained
    gaps = np.diff([-1, *steps])
    assert max(gaps) <= -(-every // trained)


@pytest.mark.unit
def test_a_slow_worker_trains_as_long_as_the_fastest():
    done = {0: Contribution(steps=100, seconds=10.0), 1: Contribution(steps=50, seconds=20.0), 2: Contribution()}
    assert steps_of_equal_time(done, 100) == {0: 100, 1: 25, 2: 100}
    assert (
        steps_of_equal_time({0: Contribution(steps=1, seconds=1e9), 1: Contribution(steps=9, seconds=1.0)}, 9)[0] == 1
    )


@pytest.mark.unit
def test_averages_weigh_by_rows_and_leave_out_those_without():
    arrays = {0: np.array([1.0, 2.0], np.float32), 2: np.array([4.0, 8.0], np.float32), 3: np.array([np.nan] * 2)}
    np.testing.assert_allclose(average_by_rows(arrays, {0: 1, 2: 3, 3: 0}), [3.25, 6.5])
    np.testing.assert_allclose(average_by_rows({0: arrays[0], 2: arrays[2]}, {0: 0, 2: 0}), [2.5, 5.0])
    half = {0: np.array([60000.0], np.float16), 1: np.array([60000.0], np.float16)}
    assert average_by_rows(half, {0: 1, 1: 1}) == half[0]


@pytest.mark.unit
def test_rows_are_counted_by_worker():
    ledger = RowLedger()
    ledger.close_round({0: Contribution(rows=8), 1: Contribution(rows=6, skipped=2)}, 3)
    ledger.lose(1, 5)
    ledger.close_round({0: Contribution(rows=8), 2: Contribution(rows=8)}, 3)
    report = RowLedger.from_json(json.loads(json.dumps(ledger.to_json()))).report(3)
    assert report == ledger.report(3)
    assert (report.rounds, report.trained, report.lost) == (2, (16, 6, 8), (0, 5, 0))
    assert (report.skipped, report.missed_rounds) == ((0, 2, 0), (0, 1, 1))
    assert report.describe().startswith("2 synchronizations: rows in the weights by worker 16, 6, 8; lost 0, 5, 0")


def told(joins=None, connections=None, missed_steps=None):
    """The record of workers that have taken part in a synchronization after each join."""
    return MembersRecord([0], joins or {}, connections or {}, missed_steps or {}, 60.0, joins or {})


@pytest.mark.unit
def test_a_worker_that_fails_starts_again_alone_until_it_does_not_join():
    lost = LostWorkers(limit=2, window_seconds=100.0)

    def lose(worker, now, joins):
        return lost.lose(worker, now, None, told({1: joins}), was_killed=False)

    assert lose(1, 0.0, 1) == 0.0 and lost.outside(told({1: 1})) == [1]
    assert lost.start_due(0.0, told()) == [1] and not lost.is_due(0.0)
    assert lose(1, 10.0, 1) == 1.0
    assert not lost.is_due(10.5) and lost.is_due(11.0)
    assert lost.outside(told({1: 2})) == []
    assert lose(1, 20.0, 2) == 0.0  # It has joined since.
    assert lose(1, 21.0, 2) == 1.0
    assert lose(1, 22.0, 2) is None
    assert lose(2, 22.0, 2) == 0.0


@pytest.mark.unit
def test_a_worker_that_joins_and_fails_before_it_synchronizes_does_not_start_again_without_end():
    lost = LostWorkers(limit=3, window_seconds=100.0)
    joined = [dataclasses.replace(told({1: joins}), took_part={}) for joins in range(1, 5)]
    pauses = [lost.lose(1, 1.0, "exit code 1", record, was_killed=False) for record in joined]
    assert pauses == [0.0, 1.0, 2.0, None]


@pytest.mark.unit
def test_an_exception_at_the_same_place_starts_a_worker_again_once_even_if_it_took_part():
    lost = LostWorkers(limit=3, window_seconds=100.0)

    def lose(joins, place, chance):
        return lost.lose(1, 100.0 * joins, place, told({1: joins}), was_killed=False, chance=chance)

    assert lose(1, "a", Chance.ELSEWHERE) == 0.0
    assert [lose(joins, "a", Chance.OFTEN) for joins in range(2, 5)] == [0.0] * 3
    assert lose(5, "b", Chance.ELSEWHERE) == 0.0
    assert lose(6, "b", Chance.ELSEWHERE) is None


@pytest.mark.unit
def test_a_worker_that_is_killed_while_it_starts_has_more_tries_but_not_without_end():
    lost = LostWorkers(limit=3, window_seconds=600.0)
    pauses = [lost.lose(1, 1.0, "SIGKILL of worker 1", told(), was_killed=True) for _ in range(16)]
    assert pauses[:7] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0] and pauses[14:] == [30.0, None]
    assert lost.lose(2, 1.0, None, told(), was_killed=True) == 0.0
    assert lost.lose(1, 2.0, None, told({1: 1}), was_killed=True) == 0.0  # It has joined since.
    assert LostWorkers(0, 600.0).lose(1, 1.0, None, told(), was_killed=True) is None


@pytest.mark.unit
def test_a_worker_that_starts_again_must_connect_in_time():
    lost = LostWorkers(limit=3, window_seconds=600.0)
    for worker in (1, 2):
        lost.lose(worker, 0.0, None, told(), was_killed=True)
    assert lost.start_due(5.0, told(connections={1: 1, 2: 1})) == [1, 2]
    assert lost.overdue(65.0, told(connections={1: 1, 2: 1})) == []
    assert lost.overdue(66.0, told(connections={1: 2, 2: 1})) == [2]
    assert lost.overdue(99.0, told(connections={1: 2, 2: 1})) == []
    lost.lose(2, 70.0, None, told(), was_killed=True)
    lost.start_due(71.0, told())
    lost.lose(2, 80.0, None, told(), was_killed=True)  # The deadline of a start ends with the process.
    assert lost.overdue(1000.0, told()) == []


@pytest.mark.unit
def test_absences_have_all_starts_of_a_worker_and_the_steps_that_it_missed():
    absences = Absences()
    absences.lose(2, "host-b", 10.0, "killed", told({1: 1, 2: 1}))
    absences.start(2, 11.0)
    absences.lose(2, "host-b", 15.0, "killed again", told({1: 1, 2: 1}))
    absences.start(2, 16.0)
    assert not absences.see(told({1: 1, 2: 1}, missed_steps={(2, 1): 8}))
    assert absences.see(told({1: 1, 2: 2}, missed_steps={(2, 1): 12}))
    first = Absence(2, "host-b", 10.0, ["killed", "killed again"], [11.0, 16.0], has_joined=True, missed_steps=12)
    assert absences.all == (first,)
    absences.lose(2, "host-b", 20.0, "killed", told({1: 1, 2: 3}))
    # Worker 2 has joined once more before the supervisor looked, so the first absence has the steps of both.
    assert not absences.see(told({2: 3}, missed_steps={(2, 1): 12, (2, 2): 4, (2, 3): 20}))
    assert [(each.missed_steps, each.has_joined) for each in absences.all] == [(16, True), (20, False)]


@pytest.mark.unit
def test_the_record_of_members_is_the_same_after_its_file():
    record = MembersRecord([0, 2], {1: 1, 2: 3}, {1: 2, 2: 4}, {(1, 1): 40, (2, 2): 8}, 120.0, {1: 1, 2: 2})
    assert MembersRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_worker_that_does_not_connect_in_time_is_killed_and_one_that_joins_is_told(tmp_path):
    files, changes = RunFiles(tmp_path), []
    files.attempt(0).mkdir()
    files.tell_of_members(0, MembersRecord([0], {1: 1}, {1: 1}, {}, start_seconds=30.0))
    with subprocess.Popen(["sleep", "100"]) as hangs:
        group = types.SimpleNamespace(pids={1: hangs.pid}, running=(1,), exits=[WorkerExit(1, -9, 1, 10.0)])
        group.forget = lambda index: group.exits.clear()
        group.start_again = lambda index: None
        lone = LoneRestarts(group, files, 0, LostWorkers(3, 600.0), changes.append)
        assert lone.goes_on() and group.exits == []  # Worker 1 was killed, and starts again at once.
        assert [len(each[0].starts) for each in changes] == [0, 1]
        assert not lone.look(time.monotonic())
        assert hangs.poll() is None
        lone.look(time.monotonic() + 31.0)
        assert hangs.wait(SECONDS) == -signal.SIGKILL
    files.tell_of_members(0, MembersRecord([0, 1], {1: 2}, {1: 2}, {(1, 1): 8}, start_seconds=30.0))
    lone.look(time.monotonic())
    assert (changes[-1][0].has_joined, changes[-1][0].missed_steps) == (True, 8) and len(changes) == 3


@pytest.mark.unit
def test_a_worker_whose_process_cannot_be_started_again_does_not_end_the_job(tmp_path):
    files, changes = RunFiles(tmp_path), []
    files.attempt(0).mkdir()
    files.tell_of_members(0, told({1: 1}))

    def refuse(index):
        raise ClusterError("Worker 1 could not be started: Resource temporarily unavailable.")

    group = types.SimpleNamespace(running=(0,), exits=[WorkerExit(1, -9, 1, time.time())])
    group.forget, group.start_again = lambda index: group.exits.clear(), refuse
    policy = LostWorkers(limit=1, window_seconds=600.0)
    lone = LoneRestarts(group, files, 0, policy, changes.append)
    assert lone.goes_on() and policy.is_due(time.monotonic())  # Of the limit for failures, not of that for kills.
    assert lone.goes_on() and not policy.is_due(time.monotonic() + 100.0)  # No restart is left.
    (absence,) = changes[-1]
    assert not absence.starts
    assert ["could not be started" in reason for reason in absence.reasons] == [False, True, True]


@pytest.mark.unit
def test_a_worker_that_has_saved_and_left_ends_the_attempt(tmp_path):
    files = RunFiles(tmp_path)
    files.attempt(0).mkdir()
    files.tell_of_members(0, told({1: 1}))
    group = types.SimpleNamespace(running=(1,), exits=[WorkerExit(0, PREEMPTED, 1, time.time())])
    assert not LoneRestarts(group, files, 0, LostWorkers(3, 600.0), lambda _: None).goes_on()


@pytest.mark.unit
def test_worker_0_and_errors_that_come_again_end_the_attempt_for_all():
    assert LostWorkers.concerns_all(0, FailureKind.MACHINE, is_exception=False)
    assert LostWorkers.concerns_all(1, FailureKind.PROGRAM, is_exception=True)
    assert not LostWorkers.concerns_all(1, FailureKind.MACHINE, is_exception=False)


@pytest.mark.unit
@pytest.mark.parametrize("kind", [tfdist.LocalSGD, tfdist.DiLoCo])
def test_options_that_exclude_each_other_are_refused(kind):
    with pytest.raises(ValueError, match="equal_time"):
        kind(every=4, equal_time=True)
    with pytest.raises(ValueError, match="tolerate_lost_workers"):
        kind(every=4, tolerate_lost_workers=1)
    with pytest.raises(ValueError, match="compress"):
        check_synchronization(kind(every=4, tolerate_lost_workers=True), None, "int8")
    with pytest.raises(ValueError, match="exchange_group_size=2"):
        check_synchronization(kind(every=4, tolerate_lost_workers=True), None, None, 2)
    check_synchronization(kind(every=4), None, None, 2)
    with pytest.raises(ValueError, match="all weights synchronize at once"):
        tfdist.DiLoCo(every=4, fragments=2, tolerate_lost_workers=True)
    with pytest.raises(ValueError, match="all weights synchronize at once"):
        tfdist.DiLoCo(every=4, overlap_steps=2, tolerate_lost_workers=True)
    with pytest.raises(ValueError, match="one worker"):
        tfdist.MirroredStrategy(["CPU:0"], synchronization=kind(every=4, tolerate_lost_workers=True))


# The outer step.


def test_the_outer_step_equals_nesterov_momentum_on_the_average_change():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 2)).astype("float32")
    outer = OuterStep(tfdist.DiLoCo(every=4, tolerate_lost_workers=True), [start])
    weights, momentum = start.astype("float64"), 0.0
    rows = {0: 3, 2: 1}
    for _ in range(3):
        outer.begin([weights.astype("float32")])
        ends = {worker: [(weights + rng.normal(size=(3, 2))).astype("float32")] for worker in rows}
        change = sum(rows[worker] / 4 * (weights - ends[worker][0]) for worker in rows)
        momentum = 0.9 * momentum - 0.7 * change
        weights = weights + 0.9 * momentum - 0.7 * change
        np.testing.assert_allclose(outer.next(ends, rows)[0], weights, rtol=1e-5, atol=1e-5)
    again = OuterStep(tfdist.DiLoCo(every=4, tolerate_lost_workers=True), [start], outer.values())
    np.testing.assert_equal(again.values(), outer.values())


@pytest.mark.parametrize("other", [None, keras.optimizers.RMSprop(0.1), keras.optimizers.SGD(0.1)])
def test_another_outer_optimizer_than_in_a_backup_begins_anew(other):
    start = [np.ones([2], "float32")]
    before = OuterStep(tfdist.DiLoCo(every=4, outer_optimizer=keras.optimizers.Adam(0.1)), start)
    before.next({0: [np.zeros([2], "float32")]}, {0: 1})
    fresh = OuterStep(tfdist.DiLoCo(every=4, outer_optimizer=other), start)
    after = OuterStep(tfdist.DiLoCo(every=4, outer_optimizer=other), start, before.values())
    np.testing.assert_equal(after.values(), fresh.values())


def test_the_outer_step_of_local_sgd_is_the_average():
    outer = OuterStep(tfdist.LocalSGD(every=4, tolerate_lost_workers=True), [np.zeros(1, "float32")])
    outer.begin([np.zeros(1, "float32")])
    ends = {0: [np.array([1.0], "float32")], 1: [np.array([3.0], "float32")]}
    np.testing.assert_allclose(outer.next(ends, {0: 3, 1: 1})[0], [1.5])


def test_the_state_of_averages_continues_them():
    rng = np.random.default_rng(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    synchronization = tfdist.DiLoCo(every=4, tolerate_lost_workers=True)
    weights = model.get_weights()

    def answered(averaging):
        averaging.begin(model, weights)
        own = Contribution(rows=4, steps=4, seconds=1.0)
        part = Message("weights", {"done": dataclasses.asdict(own)}, [1.5 * each for each in ends])
        return averaging.averaged(0, own, ends, {2: part}, len(weights), 4)

    first = RoundAveraging(synchronization, 3)
    ends = [rng.normal(size=each.shape).astype("float32") for each in weights]
    answered(first)
    again = RoundAveraging(synchronization, 3)
    again.restore(*first.state())
    expected, answer = answered(first), answered(again)
    assert answer.fields == expected.fields and again.ledger.report(3).missed_rounds == (0, 2, 0)
    for own, other in zip(answer.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(own, other)


# Rows.


@pytest.mark.parametrize("rows", [3, 4, 10])
def test_workers_take_their_rows_of_each_batch(rows):
    data = tf.data.Dataset.from_tensors((np.arange(rows), {"y": np.arange(rows)[:, None]}))
    parts = [next(iter(own_rows(data, worker, 3))) for worker in range(3)]
    assert np.concatenate([x for x, _ in parts]).tolist() == list(range(rows))
    assert np.concatenate([y["y"][:, 0] for _, y in parts]).tolist() == list(range(rows))


# Messages and members.


@pytest.mark.unit
def test_messages_keep_kinds_and_bits():
    bfloat16 = tf.bfloat16.as_numpy_dtype
    arrays = [np.arange(6, dtype="float32").reshape(2, 3).T, np.array([1.5], bfloat16), np.zeros([0, 2]), np.array(7)]
    own, other = socket.socketpair()
    with own, other:
        send_message(MemberSocket(own, SECONDS), Message("weights", {"a": [1, None]}, arrays))
        received = receive_message(MemberSocket(other, SECONDS))
    assert (received.kind, received.fields) == ("weights", {"a": [1, None]})
    for array, sent in zip(received.arrays, arrays, strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent)


def connected(is_tls, directory):
    """Returns both ends of a connection between two workers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname(), timeout=SECONDS)
        other, _ = server.accept()
    if not is_tls:
        return own, other
    tls = Tls(Authority(directory).worker())
    accepted = []
    accepting = threading.Thread(target=lambda: (accepted.append(tls.accept(other)), accepted[0].do_handshake()))
    accepting.start()
    own = tls.connect(own, "127.0.0.1")
    accepting.join(SECONDS)
    return own, accepted[0]


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def ends(request, tmp_path):
    own, other = connected(request.param, tmp_path)
    with own, other:
        yield MemberSocket(own, 0.2), MemberSocket(other, 0.2)


def test_each_byte_is_a_sign_of_life(ends):
    own, other = ends
    received = []
    receiving = threading.Thread(target=lambda: received.append(other.receive_exactly(4)))
    receiving.start()
    for byte in b"slow":
        before = other.heard
        own.send_all(bytes([byte]))
        assert eventually(lambda before=before: other.heard > before)
    receiving.join(SECONDS)
    assert received == [b"slow"]


def test_messages_travel_in_both_directions_at_once(ends):
    sent = [np.random.default_rng(i).bytes(5_000_000) for i in range(2)]
    for end in ends:
        end._silence_seconds = SECONDS
    received = [None, None]

    def receive(i):
        received[i] = bytes(ends[i].receive_exactly(len(sent[i])))

    threads = [threading.Thread(target=receive, args=[i]) for i in range(2)]
    threads += [threading.Thread(target=ends[i].send_all, args=[sent[1 - i]]) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert received == sent


def test_a_peer_that_takes_no_bytes_ends_the_sending(ends):
    with pytest.raises(TimeoutError, match="has taken no bytes"):
        ends[0].send_all(bytes(100_000_000))


def test_delivery_is_awaited_until_the_peer_takes_the_bytes(ends):
    own, other = ends
    own._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    # More than the peer's kernel keeps, and less than the own one.
    content = bytes(min(1 << 20, own._connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2))
    own.send_all(content)
    with pytest.raises(TimeoutError, match="has taken no bytes"):
        own.await_delivery(threading.Lock())
    taking = threading.Thread(target=other.receive_exactly, args=[len(content)])
    taking.start()
    own.await_delivery(threading.Lock())
    taking.join(SECONDS)
    assert not taking.is_alive()
    own.close()
    with pytest.raises(ConnectionError, match="was closed"):
        own.await_delivery(threading.Lock())


def test_a_sign_of_life_that_cannot_be_sent_ends_the_connection(monkeypatch):
    ended = []

    def fail(*_):
        raise TimeoutError("the peer has taken no bytes")

    monkeypatch.setattr(member_link, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(member_link, "send_message", fail)
    own, other = connected(False, None)
    with own, other:
        MemberLink(own, SECONDS, lambda *_: None, lambda _, why: ended.append(why))
        assert eventually(lambda: ended)


class Job:
    """Worker 0's end of rounds, and members in this process."""

    def __init__(self, workers):
        self.ports, self.lost, self.told = free_ports(workers), [], []
        self.chief = RoundChief(
            *(self.spec(0, workers), SILENCE_SECONDS, Message("greeting")),
            lambda *loss: self.lost.append(loss),
            self.told.append,
        )
        self.workers = workers

    def spec(self, worker, workers):
        return ClusterSpec.local(workers, worker, self.ports)

    def member(self, worker, fit=0, seconds=SECONDS, **fields):
        member = RoundMember(self.spec(worker, self.workers), seconds, SILENCE_SECONDS)
        member.hear("greeting")
        member.send(Message("join", {"fit": fit, **fields}))
        return member


@pytest.fixture
def job():
    return Job(3)


def test_a_round_goes_on_without_a_member_that_is_lost_in_it(job):
    members = {worker: job.member(worker) for worker in (1, 2)}
    assert job.chief.await_workers(0, [1, 2], SECONDS) == [1, 2]
    job.chief.welcome([1, 2], Message("state", {"fit": 0}))
    for member in members.values():
        assert member.hear("state").fields == {"fit": 0}
    members[2].send(Message("progress", {"rows": 7}))
    members[1].send(Message("weights", {"place": [0, 0, 4]}, [np.ones(2)]))
    threading.Timer(0.3, members[2].close).start()
    parts = job.chief.gather("weights", [0, 0, 4], SECONDS)
    assert list(parts) == [1] and job.chief.members == [1]
    assert job.lost == [(2, 7)] and (job.told[-1].members, job.told[-1].joins) == ([0, 1], {1: 1, 2: 1})
    assert job.told[-1].took_part == {}
    job.chief.close_round([1], 4)
    assert job.told[-1].took_part == {1: 1}
    assert job.told[-1].missed_steps == {(2, 1): 4} and job.told[-1].connections == {1: 1, 2: 1}
    job.chief.answer({1: Message("weights", {"fit": 0})})
    assert members[1].hear("weights").fields == {"fit": 0}

    again = job.member(2)  # It joins before the next round.
    deadline = time.monotonic() + SECONDS
    while job.chief.joining(0) != [2] and time.monotonic() < deadline:
        time.sleep(0.01)
    job.chief.welcome([2], Message("state", {"fit": 0}))
    assert again.hear("state") and job.chief.members == [1, 2]
    for member in (members[1], again):
        member.send(Message("weights", {"place": [0, 0, 8]}))
    assert list(job.chief.gather("weights", [0, 0, 8], SECONDS)) == [1, 2]


def test_a_worker_that_comes_during_a_fit_learns_the_place_first(job):
    job.chief.present = Message("place", {"fit": 0, "place": [1, 8]})
    worker = job.member(1, is_warm=False)
    assert worker.hear("place", fit=0).fields["place"] == [1, 8] and job.chief.joining(0) == []
    worker.send(Message("join", {"fit": 0, "is_warm": True}))
    assert job.chief.await_workers(0, [1], SECONDS) == [1]


def test_a_member_at_another_place_is_an_error(job):
    member = job.member(1)
    job.chief.await_workers(0, [1], SECONDS)
    job.chief.welcome([1], Message("state", {"fit": 0}))
    member.send(Message("weights", {"place": [0, 0, 5]}))
    with pytest.raises(ClusterError, match="after the same steps"):
        job.chief.gather("weights", [0, 0, 4], SECONDS)


def begin(job, *workers):
    members = [job.member(worker) for worker in workers]
    job.chief.await_workers(0, workers, SECONDS)
    job.chief.welcome(workers, Message("state", {"fit": 0}))
    return members


def weights_at(step, rows):
    return Message("weights", {"place": [0, 0, step], "done": dataclasses.asdict(Contribution(rows=rows))})


def await_members(job, expected):
    deadline = time.monotonic() + SECONDS
    while job.chief.members != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert job.chief.members == expected


def test_a_member_at_another_place_is_left_out_if_others_agree(job):
    stray, other = begin(job, 1, 2)
    stray.send(weights_at(3, rows=6))
    other.send(weights_at(4, rows=8))
    assert list(job.chief.gather("weights", [0, 0, 4], SECONDS)) == [2]
    assert job.chief.members == [2] and job.lost == [(1, 6)] and job.told[-1].members == [0, 2]
    with pytest.raises(WorkerLostError, match=r"after the same steps.*worker 1 at weights"):
        stray.hear("weights")


def test_the_complete_part_of_a_member_counts_if_it_is_lost_after_it(job):
    ends, other = begin(job, 1, 2)
    ends.send(Message("progress", {"rows": 5}))
    ends.send(weights_at(4, rows=8))
    ends.close()
    await_members(job, [2])
    other.send(weights_at(4, rows=8))
    parts = job.chief.gather("weights", [0, 0, 4], SECONDS)
    assert [part.fields["done"]["rows"] for part in parts.values()] == [8, 8]
    assert sum(rows for _, rows in job.lost) == 0
    job.chief.answer(dict.fromkeys(parts, Message("weights", {"fit": 0})))
    assert other.hear("weights", fit=0)


def test_the_rows_of_a_lost_member_at_another_place_are_lost(job):
    ends, other = begin(job, 1, 2)
    ends.send(weights_at(3, rows=6))
    ends.close()
    await_members(job, [2])
    other.send(weights_at(4, rows=8))
    assert list(job.chief.gather("weights", [0, 0, 4], SECONDS)) == [2]
    assert sum(rows for worker, rows in job.lost if worker == 1) == 6


def test_members_are_told_in_the_next_round_if_the_disk_failed():
    tries, told = [], []

    def tell(record):
        tries.append(record)
        if len(tries) == 2:
            raise OSError("no space left")
        told.append(record)

    spec = ClusterSpec.local(2, 0, free_ports(2))
    chief = RoundChief(spec, SILENCE_SECONDS, Message("greeting"), lambda *_: None, tell)
    chief.close_round([], 4)
    assert len(told) == 1
    chief.close_round([1], 4)
    assert told[-1].missed_steps == {(1, 0): 4}
    chief.close_round([1], 4)
    assert len(told) == 2  # Nothing has changed.


def test_a_member_that_is_late_is_left_out(job):
    member = job.member(1)
    job.chief.await_workers(0, [1], SECONDS)
    job.chief.welcome([1], Message("state", {"fit": 0}))
    assert job.chief.gather("weights", [0, 0, 4], 0.2) == {}
    member.hear("state")
    with pytest.raises(WorkerLostError, match="averages the weights"):
        member.hear("weights")


def test_a_missing_worker_is_named_at_the_start(job):
    with pytest.raises(WorkerLostError, match=r"worker 1 at .*worker 2 at"):
        job.chief.await_workers(0, [1, 2], 0.2)


def test_weights_that_arrive_slowly_count(job):
    members = {worker: job.member(worker) for worker in (1, 2)}
    job.chief.await_workers(0, [1, 2], SECONDS)
    job.chief.welcome([1, 2], Message("state", {"fit": 0}))
    sent = []
    own, other = socket.socketpair()
    with own, other:  # Only to make the bytes of the message.
        send_message(MemberSocket(own, SECONDS), Message("weights", {"place": [0, 0, 4]}, [np.ones(8)]))
        own.shutdown(socket.SHUT_WR)
        while piece := other.recv(1 << 16):
            sent.append(piece)
    content = b"".join(sent)
    slow = members[1]._link

    def send():
        with slow._lock:  # No sign of life in between.
            for start in range(0, len(content), 20):
                slow._socket.send_all(content[start : start + 20])
                time.sleep(0.3)

    threading.Thread(target=send).start()
    assert eventually(lambda: job.chief._links[1].is_receiving)
    parts = job.chief.gather("weights", [0, 0, 4], 0.1)
    assert list(parts) == [1] and job.chief.members == [1]  # Worker 2 has sent nothing.


def test_a_worker_whose_host_has_ended_is_not_awaited(job):
    job.member(1)
    assert eventually(lambda: job.chief.joining(0) == [1])
    silent = job.member(2, fit=-1)
    assert eventually(lambda: job.chief.joining(-1) == [2])
    job.chief._links[2]._socket.heard = -np.inf
    silent._link._is_closed.set()  # It sends no sign of life any more.
    assert job.chief.await_workers(0, None, SECONDS) == [1]
    assert 2 not in job.chief._links  # It was not awaited until the deadline.


def test_a_member_leaves_although_worker_0_has_ended(job):
    member = job.member(1)
    job.chief.await_workers(0, [1], SECONDS)
    job.chief._links[1].close()
    with pytest.raises(WorkerLostError):
        while True:
            member.send(Message("progress", {"rows": 1}))
    role = types.SimpleNamespace(_member=member)
    MemberRole.end_fit(role, types.SimpleNamespace(is_over=False, number=0))


def test_worker_0_may_end_during_a_handshake(job, monkeypatch):
    failures = [RefusedError("the TLS handshake failed (unexpected end)")] * 2

    def introduced(*arguments):
        if failures:
            raise failures.pop()
        introduce(*arguments)

    monkeypatch.setattr(round_member, "introduce", introduced)
    job.member(1)
    assert not failures
    monkeypatch.setattr(round_member, "_REFUSED_SECONDS", 0.1)
    failures += [RefusedError("it uses TLS, but this worker does not")] * 1000
    with pytest.raises(ClusterError, match=r"must admit each worker, but it uses TLS") as caught:
        job.member(2)
    assert not isinstance(caught.value, WorkerLostError)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_with_another_cluster_learns_the_difference(workers):
    cluster = ClusterSpec.local(workers, 0, free_ports(workers))
    # The worker knows the address of worker 0 only.
    stranger = ClusterSpec({"worker": [cluster.training_addresses[0], "127.0.0.1:1"]}, "worker", 1)
    setups = [setup_of_worker(tfdist.LocalSGD(every=4), 1, each) for each in (cluster, stranger)]
    greeting = Message("greeting", {"setup": setups[0], "random": []})
    chief = RoundChief(cluster, SILENCE_SECONDS, greeting, lambda *_: None, lambda _: None)
    member = RoundMember(stranger, SECONDS, SILENCE_SECONDS)
    with pytest.raises(ClusterError, match=r"same cluster in TF_CONFIG.*127\.0\.0\.1:1\. Give"):
        take_greeting(member.hear("greeting"), setups[1], 1)
    member.close()
    assert chief.members == []


def test_a_fit_that_worker_0_does_not_begin_is_an_error(job):
    job.chief.fit = 0
    member = job.member(1, fit=1, seconds=3.0)
    with pytest.raises(ClusterError, match=r"`fit` number 2 of the program, and worker 0 has begun 1"):
        member.hear("state", fit=1)


def test_the_end_of_a_fit_reaches_members_and_late_workers_but_not_those_of_the_next_fit(job):
    first = job.member(1)
    job.chief.await_workers(0, [1], SECONDS)
    job.chief.welcome([1], Message("state", {"fit": 0}))
    ahead = job.member(2, fit=1)
    deadline = time.monotonic() + SECONDS
    while job.chief.joining(1) != [2] and time.monotonic() < deadline:
        time.sleep(0.01)
    over = Message("over", {"fit": 0})
    job.chief.late = lambda fit: over
    job.chief.end_fit(0, over)
    assert first.hear("over", fit=0).fields == {"fit": 0}
    first.send(Message("join", {"fit": 0}))  # As a process that has started again.
    assert first.hear("over", fit=0).fields == {"fit": 0}
    assert job.chief.joining(1) == [2]
    job.chief.await_workers(1, [2], SECONDS)
    job.chief.welcome([2], Message("state", {"fit": 1}))
    assert ahead.hear("state", "over", fit=1).kind == "state"


def test_rounds_are_encrypted_with_tls(tmp_path, monkeypatch):
    files = Authority(tmp_path).worker()
    for variable, path in zip(TLS_VARIABLES, dataclasses.astuple(files), strict=True):
        monkeypatch.setenv(variable, path)
    job = Job(2)
    member = job.member(1)
    job.chief.await_workers(0, [1], SECONDS)
    job.chief.welcome([1], Message("state", {"fit": 0}, [np.arange(3)]))
    np.testing.assert_array_equal(member.hear("state").arrays[0], [0, 1, 2])
    for variable in TLS_VARIABLES:
        monkeypatch.delenv(variable)
    with pytest.raises((ClusterError, WorkerLostError), match="TFDIST_TLS_CERT"):
        RoundMember(job.spec(1, 2), 1.0, 5.0)


# Real runs.


def test_a_slow_worker_takes_fewer_steps_of_arrays_with_equal_time(tmp_path):
    with nothing_left(tmp_path) as run:
        code, out, err = run.finish(
            "--workers", 2, "--log-dir", tmp_path / "logs", SCRIPTS / "slow_worker.py", tmp_path
        )
    assert code == 0, out + err
    results = [json.loads((tmp_path / f"result-{worker}.json").read_text()) for worker in range(2)]
    for name in ("weights", "losses", "report"):
        assert results[0][name] == results[1][name], name
    steps, report = [result["steps"] for result in results], results[0]["report"]
    assert 6 <= steps[1] < steps[0] <= 24  # One step of a round at least; there are 6 rounds of 4 steps.
    assert report["trained"] == [4 * each for each in steps]
    assert report["skipped"] == [4 * (24 - each) for each in steps]
    assert (report["rounds"], report["lost"], report["missed_rounds"]) == (6, [0, 0], [0, 0])


def test_three_workers_go_on_without_one_which_joins_again(tmp_path):
    with nothing_left(tmp_path) as run:
        code, out, err = run.finish(
            *(
                "--workers",
                3,
                "--devices-per-worker",
                2,
                "--log-dir",
                tmp_path / "logs",
                SCRIPTS / "lost_worker.py",
                tmp_path,
            ),
            restarts=1,
        )
    assert code == 0, out + err
    assert [path.name for path in (tmp_path / "logs").glob("attempt-*")] == ["attempt-0"]
    (absence,) = json.loads((tmp_path / "logs" / "run.json").read_text())["attempts"][0]["absences"]
    assert (absence["worker"], absence["has_joined"], len(absence["starts"])) == (2, True, 1)
    assert absence["missed_steps"] == 6 and absence["reasons"] == ["worker 2 was killed by SIGKILL"]
    results = [json.loads((tmp_path / f"result-{worker}.json").read_text()) for worker in range(3)]
    assert [len(list(tmp_path.glob(f"life-{worker}-*"))) for worker in range(3)] == [1, 1, 2]
    # 4 epochs of 10 steps, with synchronizations after 4, 8 and 10 steps. Worker 2 is lost after 6 steps of epoch 2,
    # passes over the rest of this epoch, and is back when epoch 3 begins.
    assert [result["steps"] for result in results] == [40, 40, 30]
    assert [len(result["losses"]) for result in results] == [4, 4, 3]
    for result in results[1:]:
        for name in ("losses", "weights", "position"):
            # A worker that joins late has the losses of its epochs, also of the one that it passes over.
            own = results[0][name][-len(result[name]) :]
            assert result[name] == own, name
        assert (result["evaluated"], result["report"]) == (results[0]["evaluated"], results[0]["report"])
    report = results[0]["report"]
    assert report["rounds"] == 12 and report["missed_rounds"] == [0, 0, 2]
    assert report["trained"] == [160, 160, 136] and report["lost"] == [0, 0, 8] and report["skipped"] == [0, 0, 0]
    assert results[0]["position"] == [4, 0]
    assert all(np.isfinite(results[0]["losses"])) and results[0]["losses"][-1] < results[0]["losses"][0]
