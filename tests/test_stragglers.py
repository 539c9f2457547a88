"""Verdicts about slow workers and links: the right cause, soon, and none for noise; what files and readers get."""

import dataclasses
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import types

import numpy as np
import pytest
from absl import logging

from benchmarks import netlab
from launched import DEADLINE_SECONDS, nothing_left
from tfdist.events.straggler_file import (
    CALLBACK,
    COMPUTATION,
    INPUT,
    LINK,
    StragglerRecord,
    append_record,
    pairs_of,
    read_records,
)
from tfdist.faults import straggler_watch
from tfdist.faults.straggler_policy import (
    Block,
    Link,
    Straggler,
    StragglerJudge,
    StragglerVerdict,
    WorkerLinks,
    _medians_of_others,
)
from tfdist.faults.straggler_watch import StragglerWatch
from tfdist.faults.straggler_words import remedy_of
from tfdist.launch import cli
from tfdist.run_files import RunFiles
from tfdist.strategies.collectives.link_counts import LinkCounts, LinkRate, rate_between
from tfdist.strategies.collectives.link_speeds import LinkSpeeds, slowest_of

WORKERS, MB = 4, 1e6
OTHERS = [w for w in range(WORKERS) if w != 1]


def links(rates, seconds=0.5):
    """Returns the links of all workers, by rate of each directed link in MB/s: rates[sender][receiver]."""
    found = []
    for sender, row in enumerate(rates):
        own = {receiver: [LinkRate(rate * MB, True)] * 5 for receiver, rate in enumerate(row) if receiver != sender}
        found.append(slowest_of(own, {receiver: seconds * rate.rate for receiver, (rate, *_) in own.items()}))
    return found


def block(number, compute=1.0, waits=0.0, rows=8.0, slow=None, **others):
    """Returns block `number` of 5 steps, in which worker 1 alone has the given times and rows."""
    slow = {"compute": compute, "input": waits, "rows": rows, **(slow or {})}
    usual = {"compute": compute, "input": waits, "rows": rows}
    by_worker = {name: [slow[name] if worker == 1 else usual[name] for worker in range(WORKERS)] for name in usual}
    seconds = others.pop("seconds", max(map(sum, zip(by_worker["compute"], by_worker["input"], strict=True))) + 0.2)
    by_worker["outside"] = [(slow if worker == 1 else others).get("outside", 0.0) for worker in range(WORKERS)]
    others.pop("outside", None)
    others = {"jitter": [0.02] * WORKERS, **others}
    return Block(5 * number + 1, 5 * number + 5, seconds, **by_worker, **others)


def judged(blocks):
    """Returns the verdicts of successive blocks, in order."""
    judge = StragglerJudge()
    return [verdict for each in blocks for verdict in judge.add(each)]


SLOW = {
    COMPUTATION: {"slow": {"compute": 2.0}},
    INPUT: {"slow": {"input": 1.5}},
    LINK: {"links": links([[0, 99, 99, 99], [10, 0, 99, 99], [99, 99, 0, 99], [99, 99, 99, 0]])},
    CALLBACK: {"slow": {"outside": 0.8}},
}


@pytest.mark.parametrize("cause", SLOW)
def test_a_slow_worker_is_named_once_with_its_cause_within_20_steps_and_again_when_it_is_over(cause):
    slow = [block(number, **SLOW[cause]) for number in range(10, 30)]
    verdicts = judged([*map(block, range(10)), *slow, *map(block, range(30, 40))])
    begun, ended = verdicts
    assert begun.straggler == Straggler(cause, 1) and begun.link == (Link(1, 0) if cause == LINK else None)
    assert begun.since == 51 and begun.step == 65 and not begun.is_over and not begun.is_balanced
    assert ended.is_over and ended.since == 51 and 155 < ended.step <= 170
    assert begun.amount == pytest.approx({COMPUTATION: 2.0, INPUT: 1.5 / 2.7, LINK: 10 / 99, CALLBACK: 0.4}[cause])


def test_a_worker_that_is_slow_now_and_then_gets_no_verdict():
    often = [block(number, slow={"compute": 3.0} if number % 2 else None) for number in range(50)]
    assert judged(often) == []


def test_a_machine_with_jitter_needs_more_blocks():
    steps = []
    for jitter in (0.05, 0.15, 0.3, 9.0):
        own = [jitter if worker == 1 else 0.02 for worker in range(WORKERS)]
        slow = [block(number, slow={"compute": 2.0}, jitter=own) for number in range(30)]
        (verdict,) = judged(slow)
        steps.append(verdict.step)
    assert steps[0] == 15 and steps == sorted(steps) and 30 < steps[1] < 60 and steps[3] == 120


def test_jitter_of_others_that_compute_little_does_not_delay_a_verdict():
    noisy = [0.05 if worker == 1 else 0.9 for worker in range(WORKERS)]
    (verdict,) = judged([block(number, slow={"compute": 40.0}, jitter=noisy) for number in range(30)])
    assert verdict.step <= 30 and verdict.amount == pytest.approx(40.0)
    (verdict,) = judged([block(number, slow={"compute": 2.0}, jitter=noisy) for number in range(30)])
    assert verdict.step == 120


def test_a_verdict_stays_while_a_worker_recovers_a_little():
    factors = [2.0] * 4 + [1.3] * 20
    verdicts = judged([block(number, slow={"compute": factor}) for number, factor in enumerate(factors)])
    assert [verdict.is_over for verdict in verdicts] == [False]


BALANCED = {"compute": 1.0, "rows": 4.0}


def test_a_worker_that_gets_fewer_rows_since_a_moment_before_the_verdict_is_balanced():
    (verdict,) = judged([block(0, slow={"compute": 2.0}), *(block(number, slow=BALANCED) for number in range(1, 50))])
    assert verdict.is_balanced and not verdict.is_over


def test_a_change_of_balance_is_told_and_back():
    slow = [{"compute": 2.0}] * 10 + [BALANCED] * 10 + [{"compute": 2.0}] * 10 + [None] * 10
    verdicts = judged(block(number, slow=each) for number, each in enumerate(slow))
    told = [(verdict.is_over, verdict.has_changed, verdict.is_balanced) for verdict in verdicts]
    assert told == [
        (False, False, False),
        *((True, True, False), (False, False, True)),
        *((True, True, True), (False, False, False)),
        (True, False, False),
    ]
    assert [verdict.step for verdict in verdicts] == [15, 65, 65, 115, 115, 165]


@pytest.mark.parametrize(
    ("others", "may_balance"), [({}, True), ({"is_measured": True}, False), ({"rows": 4.0}, False)]
)
def test_a_balanced_sharding_is_a_remedy_only_where_shares_are_equal_and_stay_so(others, may_balance):
    slow = {"compute": 2.0, **({"rows": 20.0} if "rows" in others else {})}
    verdicts = judged(block(number, slow=slow, **{**others, "rows": 8.0}) for number in range(9))
    verdicts = verdicts or judged(block(number, slow={"compute": 4.0, "rows": 6.0}) for number in range(9))
    (verdict,) = verdicts
    assert verdict.may_balance is may_balance
    assert ("BalancedSharding" in remedy_of(verdict)) is may_balance


def test_a_verdict_on_a_noisy_machine_ends_as_soon_as_on_a_quiet_one():
    noisy = {"jitter": [0.3] * WORKERS}
    slow = [block(number, slow={"compute": 2.0}, **noisy) for number in range(30)]
    _, ended = judged([*slow, *(block(number, **noisy) for number in range(30, 60))])
    assert ended.is_over and ended.step == 165


@pytest.mark.parametrize("cause", [{"waits": 3.0}, {"outside": 3.0, "slow": {"outside": 3.0}}])
def test_all_workers_that_wait_for_their_input_or_run_the_same_callbacks_are_no_stragglers(cause):
    assert judged(block(number, **cause) for number in range(9)) == []


@pytest.mark.parametrize("worker", [0, 1])
def test_chief_only_is_a_remedy_for_all_but_the_chief(worker):
    remedy = remedy_of(StragglerVerdict(Straggler(CALLBACK, worker), 0.5, 1, 20))
    assert ("ChiefOnly" in remedy) is bool(worker) and "shorter" in remedy


def test_a_worker_whose_computation_is_a_small_part_of_the_step_holds_nobody_up():
    assert judged(block(number, slow={"compute": 2.0}, seconds=20.0) for number in range(9)) == []


def test_a_slow_worker_with_fewer_rows_is_balanced():
    (verdict,) = judged(block(number, slow={"rows": 4.0}) for number in range(9))
    assert verdict.is_balanced and verdict.amount == 2.0 and verdict.straggler == Straggler(COMPUTATION, 1)


def test_a_worker_without_rows_is_not_slow():
    assert judged(block(number, slow={"rows": 0.0}) for number in range(9)) == []


def test_of_two_workers_the_slow_one_is_named():
    two = [
        Block(5 * number, 5 * number + 4, 2.2, [8, 8], [1.0, 2.0], [0, 0], [0, 0], links([[0, 99], [10, 0]]))
        for number in range(9)
    ]
    assert {(*verdict.straggler, verdict.link) for verdict in judged(two)} == {
        (COMPUTATION, 1, None),
        (LINK, 1, Link(1, 0)),
    }


@pytest.mark.parametrize("ends", [Link(1, None), Link(None, 1)])
def test_the_slow_links_of_one_worker_are_one_verdict(ends):
    place = 0 if ends.sender is not None else 1
    rates = [[9 if (i, j)[place] == 1 else 99 for j in range(WORKERS)] for i in range(WORKERS)]
    verdicts = judged(block(number, links=links(rates)) for number in range(9))
    assert [(*verdict.straggler, verdict.link) for verdict in verdicts] == [(LINK, 1, ends)]


@pytest.mark.parametrize("others", [(40, 40), (40, 99)])
def test_a_slow_link_whose_sender_has_other_slow_links_is_one_verdict(others):
    rates = [[0, 99, 99, 99], [10, 0, *others], [99, 99, 0, 99], [99, 99, 99, 0]]
    (verdict,) = judged(block(number, links=links(rates)) for number in range(50))
    assert verdict.link == Link(1, 0) and not verdict.is_over


def test_links_to_a_worker_that_are_not_all_slow_for_certain_make_a_bounded_number_of_verdicts():
    """The third sender is below one limit and above the other, then above both, then below both."""
    blocks = []
    for number in range(200):
        third = (40, 20, 40, 20, 40, 60, 10)[number // 3 % 7]
        rates = [[0, 9, 99, 99], [99, 0, 99, 99], [99, 9, 0, 99], [99, third, 99, 0]]
        blocks.append(block(number, links=links(rates)))
    verdicts = judged(blocks)
    assert {0, 2} <= {verdict.straggler.worker for verdict in verdicts}
    assert len(verdicts) < 5 or len(verdicts) < len(blocks) / 6


def test_equally_slow_links_that_alternate_as_the_slowest_are_one_verdict():
    def rates(number):
        one, other = (9, 10) if number % 2 else (10, 9)
        return [[0, 99, 99, 99], [one, 0, other, 99], [99, 99, 0, 99], [99, 99, 99, 0]]

    (verdict,) = judged(block(number, links=links(rates(number))) for number in range(50))
    assert verdict.straggler == Straggler(LINK, 1) and not verdict.is_over


def test_a_verdict_that_ends_begins_again_only_by_blocks_after_its_end():
    factors = [2.0] * 10 + [1.0] * 3 + [2.0] * 2 + [1.0]
    own = {"jitter": [0.2] * WORKERS}
    blocks = [block(number, slow={"compute": factors[number % 16]}, **own) for number in range(320)]
    assert len(judged(blocks)) <= 2 * 320 / 13


def test_a_slow_link_that_carries_little_is_no_straggler():
    rates = [[0, 99, 99, 99], [10, 0, 99, 99], [99, 99, 0, 99], [99, 99, 99, 0]]
    assert judged(block(number, links=links(rates, seconds=0.01)) for number in range(9)) == []


@pytest.mark.parametrize("workers", range(2, 9))
def test_the_median_of_the_others_is_that_of_a_list_without_the_worker(workers):
    values = random.Random(workers).choices(range(5), k=workers)
    expected = [statistics.median(values[:worker] + values[worker + 1 :]) for worker in range(workers)]
    assert _medians_of_others(values) == expected


# The links.


def counts(sent=10**7, rate=10**8, is_limited=False, busy=4000, blocked=0):
    return LinkCounts(sent, rate, is_limited, busy, blocked)


@pytest.mark.parametrize(
    ("now", "is_of_link"),
    [
        (counts(), True),
        (counts(is_limited=True), False),
        (counts(blocked=2000), False),  # The peer does not read.
        (counts(sent=10**5), None),
        (counts(rate=0), None),
    ],
)
def test_only_a_link_that_is_full_tells_its_rate(now, is_of_link):
    rate = rate_between(LinkCounts(0, 10**8, False, 0, 0), now)
    assert rate == (None if is_of_link is None else LinkRate(1e8, is_of_link))


def test_a_peer_that_does_not_read_is_no_slow_link():
    rates = {0: [LinkRate(1e9, True)] * 5, 2: [LinkRate(1e6, False)] * 5}
    assert slowest_of(rates, {0: 1e6, 2: 1e6}) == WorkerLinks(0, 1e9, 1e6, 1e-3)
    assert slowest_of({2: rates[2]}, {2: 1e6}) == WorkerLinks(None, 0.0, 1e6, 0.0)


def test_one_fast_transfer_of_five_shows_that_a_link_is_fast():
    rates = {0: [LinkRate(rate, True) for rate in (1e7, 1e9, 1e7, 1e7, 1e7)], 2: [LinkRate(5e8, True)] * 5}
    assert slowest_of(rates, {0: 1e6, 2: 1e6}).peer == 2
    assert slowest_of({0: [LinkRate(1e7, True)] * 2}, {0: 1e6}) is None


def test_a_burst_does_not_make_a_slow_link_fast():
    slow = [LinkRate(1e6, True)] * 4 + [LinkRate(1e9, False)]
    found = slowest_of({0: slow, 2: [LinkRate(1e8, True)] * 5}, {0: 1e6, 2: 1e6})
    assert (found.peer, found.rate, found.typical) == (0, 1e6, 1e8)


def test_each_link_is_looked_at_in_turn():
    looked = []
    speeds = LinkSpeeds(range(20), lambda peer: looked.append(peer) or counts(sent=len(looked) * 10**6))
    for step in range(20):
        speeds.look(step)
    assert looked == [place % 20 for place in range(160)] and speeds.slowest().peer is not None


# The watch.


@dataclasses.dataclass
class Store:
    """A coordination store in memory, of worker 0."""

    workers: int
    worker: int = 0

    def say_once(self, subject, what):
        self.own = what

    def hear(self, subject, worker, timeout_seconds):
        return f"host-{worker}"


class Job:
    """A simulated job: its steps report to a watch, and what the watch logs is kept."""

    def __init__(self, workers=3, links=None, worker=0):
        self.published, self.number = [], 0
        self.watch = StragglerWatch(Store(workers, worker), ["10.0.0.1:1"] * workers, links, self.published.append)
        self.workers = workers

    def step(self, compute, waits=(0, 0, 0), outside=(0, 0, 0, 0), **others):
        self.number += 1
        compute, waits, outside = (np.array(each, np.float32) for each in (compute, waits, outside))
        told = {
            "number": self.number,
            "rows": np.full(len(compute), 8),
            "compute_seconds": compute,
            "input_seconds": waits[: self.workers],
            "links": (),
            "outside_seconds": outside[: self.workers],
            "cycle_seconds": float(compute.max() + waits.max() + outside.max()) + 0.01,
            "has_traced": False,
        }
        self.watch.add(types.SimpleNamespace(**{**told, **others}))


@pytest.fixture(autouse=True)
def first_attempt(monkeypatch):
    """Counts steps from 1, whatever an earlier test of this process has restored."""
    monkeypatch.setattr(straggler_watch.EVENTS, "steps_before", 0)


@pytest.fixture
def logged(monkeypatch):
    lines = []
    for level in ("info", "warning", "exception"):
        monkeypatch.setattr(logging, level, lambda text, *args, level=level: lines.append((level, text % args)))
    return lines


@pytest.fixture
def run_files(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    monkeypatch.setattr(straggler_watch, "is_supervised", lambda: True)
    monkeypatch.setattr(RunFiles, "of_worker", classmethod(lambda cls: files))
    return files


def test_a_slow_worker_is_logged_and_written_and_measured(logged, run_files):
    job = Job()
    for _ in range(30):
        job.step([0.1, 0.1, 0.2])
    assert job.watch.own_causes() == {COMPUTATION: 0, INPUT: 0, LINK: 0, CALLBACK: 0}
    (level, line), *more = logged
    assert level == "warning" and not more
    assert "worker 2 on host-2 computes 2.0 times slower than the median of the others since step 3." in line
    for _ in range(30):
        job.step([0.1, 0.1, 0.1])
    assert len(logged) == 2 and "worker 2 on host-2 no longer computes slower" in logged[1][1]
    records, damaged = read_records(run_files.stragglers(0))
    assert [record.is_over for record in records] == [False, True] and not damaged
    assert records[0].worker == 2 and records[0].host == "host-2" and records[0].amount == 2.0
    assert records[0].text in line and records[0].remedy in line and records[0].step <= 30


MORE = [*range(10, 47), *range(48, 200)]  # In seed 47, chance slows one worker down in 18 of 24 blocks.


@pytest.mark.parametrize("seed", [*range(10), 47, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in MORE)])
def test_noise_of_equal_workers_makes_no_verdict(logged, seed):
    """A second job halves the core of one worker for a second at times. Steps vary, and some are ten times as long."""
    rng, pauses, job, victim = random.Random(seed), random.Random(seed), Job(WORKERS), None
    for step in range(500):
        victim = rng.choice([None, *range(WORKERS)]) if step % 10 == 0 else victim
        factors = [rng.choice([1, 1, 1.6]) * (10 if rng.random() < 0.02 else 1) for _ in range(WORKERS)]
        compute = [0.1 * factor * (2 if worker == victim else 1) for worker, factor in enumerate(factors)]
        waits = [rng.uniform(0, 0.02) for _ in range(WORKERS)]
        rates = [[rng.uniform(30, 100) for _ in range(WORKERS)] for _ in range(WORKERS)]
        outside = [pauses.uniform(0, 0.02) * (10 if pauses.random() < 0.02 else 1) for _ in range(WORKERS)]
        job.step(compute, waits, outside, links=links(rates))
    assert logged == []


def test_this_worker_knows_that_it_holds_up_the_others(logged):
    job = Job()
    for _ in range(30):
        job.step([0.1, 0.1, 0.1], waits=(0.3, 0, 0))
    assert job.watch.own_causes() == {COMPUTATION: 0, INPUT: 1, LINK: 0, CALLBACK: 0}
    assert "worker 0 on host-0 waits for its input 73% of the time since step 3." in logged[0][1]


def test_steps_that_are_traced_and_the_next_one_do_not_count(logged):
    job = Job()
    for _ in range(40):
        job.step([0.1, 9.0, 0.1], has_traced=True)
        job.step([0.1, 9.0, 0.1])
        for _ in range(4):
            job.step([0.1, 0.1, 0.1])
    assert logged == []


def test_a_worker_is_as_slow_as_its_slowest_device(logged):
    job = Job(workers=2)
    for _ in range(30):
        job.step([0.1, 0.1, 0.1, 0.25], waits=(0, 0))
    assert "worker 1 on host-1 computes 2.5 times slower" in logged[0][1]


def test_short_steps_are_judged_by_seconds(logged):
    job = Job()
    for _ in range(110):
        job.step([0.001, 0.001, 0.003])
    assert logged == []
    for _ in range(120):
        job.step([0.001, 0.001, 0.003])
    assert len(logged) == 1


def test_a_worker_that_is_slow_in_a_few_steps_of_each_block_gets_no_verdict(logged):
    job = Job()
    for number in range(400):
        job.step([0.01, 0.01, 0.1 if number % 5 == 2 else 0.01])
    assert logged == []


def test_a_worker_with_a_slow_callback_is_named(logged):
    job = Job()
    for _ in range(30):
        job.step([0.05] * 3, outside=(0.002, 0.06, 0.002))
        if not logged:
            named_after = job.number
    ((level, line),) = logged
    assert level == "warning" and named_after < 20
    assert "worker 1 on host-1 spends 50% of the time in callbacks, and Python between steps, since step 3." in line
    assert "ChiefOnly" in line
    for _ in range(30):
        job.step([0.05] * 3, outside=(0.002, 0.002, 0.002))
    assert len(logged) == 2 and "worker 1 on host-1 no longer spends more time than the others" in logged[1][1]


@pytest.mark.parametrize("steps_per_epoch", [5, 10, 12, 30])
def test_a_worker_that_saves_once_per_epoch_gets_no_verdict(logged, steps_per_epoch):
    job = Job()
    for number in range(300):
        job.step([0.05] * 3, outside=(0 if number % steps_per_epoch else 1.0, 0, 0))
    assert logged == []


def test_the_pauses_of_one_worker_do_not_hide_that_another_computes_slowly(logged):
    job = Job()
    for number in range(30):
        job.step([0.1, 0.1, 0.2], outside=(0 if number % 5 else 1.0, 0, 0))
    assert len(logged) == 1 and "worker 2 on host-2 computes 2.0 times slower" in logged[0][1]


@pytest.mark.parametrize("seed", range(5))
def test_all_workers_come_to_the_same_verdicts_after_the_same_step(monkeypatch, seed):
    """Whatever their own clocks say: a clock here goes backwards, and another one jumps."""
    rng, told, now = random.Random(seed), [[] for _ in range(WORKERS)], [0.0] * WORKERS
    jobs = [Job(WORKERS, worker=worker) for worker in range(WORKERS)]
    cause, slow = rng.choice(["compute", "waits", "outside"]), rng.randrange(WORKERS)
    for number in range(200):
        if number % 40 == 0:
            cause, slow = rng.choice(["compute", "waits", "outside"]), rng.randrange(WORKERS)
        times = {name: [rng.uniform(0, 0.01) for _ in range(WORKERS)] for name in ("compute", "waits", "outside")}
        times["compute"] = [each + 0.05 for each in times["compute"]]
        times[cause][slow] += 0.1
        step = {**times, "has_traced": rng.random() < 0.01}
        for worker, job in enumerate(jobs):
            now[worker] += rng.uniform(-1, 100)
            monkeypatch.setattr(straggler_watch.time, "time", lambda worker=worker: now[worker])
            noted = told[worker]
            monkeypatch.setattr(
                straggler_watch.EVENTS, "note", lambda kind, noted=noted, number=number, **_: noted.append((number, _))
            )
            job.step(**step)
    without_time = [
        [
            (number, {name: value for name, value in each.items() if name not in ("time", "host", "text")})
            for number, each in noted
        ]
        for noted in told
    ]
    assert len(without_time[0]) > 2 and all(each == without_time[0] for each in without_time)


def test_the_metric_follows_the_balance(logged):
    job = Job()
    rows = np.array([4, 8, 8])
    for compute, shares, expected in ([0.2, 0.1, 0.1], None, 1), ([0.1, 0.1, 0.1], rows, 0), ([0.2, 0.1, 0.1], rows, 1):
        for _ in range(40):
            job.step(compute, **({} if shares is None else {"rows": shares}))
        assert job.watch.own_causes()[COMPUTATION] == expected
    assert [level for level, _ in logged] == ["warning", "info", "info", "info", "warning"]
    assert "gets fewer rows, and no longer holds up the others, after step" in logged[1][1]


def test_the_number_of_verdicts_that_are_told_is_bounded(logged, run_files, monkeypatch):
    monkeypatch.setattr(straggler_watch, "_MOST_VERDICTS", 5)
    job = Job()
    for number in range(600):
        job.step([0.1, 0.1, 0.2 if number % 50 < 25 else 0.1])
    assert len(read_records(run_files.stragglers(0))[0]) == 5 and len(logged) == 6
    assert logged[-1][1] == "5 verdicts about slow workers were written. No more are."


def test_an_event_gives_the_first_slow_step_as_since_step(logged, monkeypatch):
    noted = []
    monkeypatch.setattr(straggler_watch.EVENTS, "note", lambda kind, **details: noted.append((kind, details)))
    job = Job()
    for _ in range(30):
        job.step([0.1, 0.1, 0.2])
    ((kind, details),) = noted
    assert kind == "straggler" and details["since_step"] == 3 and "since" not in details


def test_an_error_of_the_watch_does_not_fail_a_step(logged):
    job = Job()
    for _ in range(9):
        job.step([0.1, 0.1, 0.1], compute_seconds=None)
    (line,) = logged
    assert line == ("exception", "Slow workers are not looked for any more:")


def test_what_is_known_about_links_is_published(logged):
    slowest = WorkerLinks(1, 1e7, 1e8, 0.5)
    seen = types.SimpleNamespace(look=lambda step: None, slowest=lambda: slowest)
    job = Job(links=seen)
    rates = [WorkerLinks(1, 1e7, 1e8, 0.1), WorkerLinks(0, 1e8, 1e8, 0.01), WorkerLinks(0, 1e8, 1e8, 0.01)]
    for _ in range(30):
        job.step([0.1, 0.1, 0.1], links=rates)
    assert set(job.published) == {slowest}
    assert "the link from worker 0 on host-0 to worker 1 carries 10% of the median of the other links" in logged[0][1]


# The file and the report.


def record(**given):
    told = {"time": 1e9, "step": 25, "since": 11, "is_over": False, "cause": LINK, "worker": 1, "host": "b"}
    return StragglerRecord(
        **{**told, "link": (1, 0), "amount": 0.1, "text": "the link ...", "remedy": "look at it", **given}
    )


def test_a_file_has_the_records_that_were_added(tmp_path):
    path = tmp_path / "attempt-0/stragglers.jsonl"
    records = [record(), record(cause=INPUT, link=None), record(is_over=True, step=90)]
    for each in records:
        append_record(path, each)
    assert read_records(path) == (records, 0)
    assert pairs_of(records) == [(records[0], records[2]), (records[1], None)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({**dataclasses.asdict(record()), "cause": "magic"}),
        json.dumps({**dataclasses.asdict(record()), "link": [1]}),
        json.dumps({**dataclasses.asdict(record()), "worker": "one"}),
    ],
)
def test_damaged_lines_are_counted_and_the_others_used(tmp_path, line):
    path = tmp_path / "stragglers.jsonl"
    append_record(path, record())
    with path.open("a") as file:
        file.write(line + "\n")
    assert read_records(path) == ([record()], 1)


def test_the_report_lists_slow_workers_under_their_attempt(tmp_path, capsys):
    files = RunFiles(tmp_path)
    for attempt, text in enumerate(("worker 1 computes slowly", "worker 2 waits")):
        append_record(files.stragglers(attempt), record(text=text))
    append_record(files.stragglers(0), record(is_over=True, step=90))
    assert cli.main(["report", str(tmp_path)]) == 0
    before, after = capsys.readouterr().out.split("attempt 1")
    assert "  worker 1 computes slowly, until step 90 [" in before and "  worker 2 waits [" in after
    assert "look at it" not in before and "look at it" in after


# Real jobs. Layers and generators that sleep make a worker slow, since their time does not depend on the machine.

TRAIN = """
import keras, numpy as np, tensorflow as tf, tfdist

class Sleep(keras.layers.Layer):
    def call(self, x):
        def sleep(x):
            time.sleep(COMPUTE[worker])
            return x
        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape)

def batches():
    while True:
        time.sleep(WAITS[worker])
        yield x, y

strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(width) for width in (WIDTH, WIDTH, 2)]
    model = keras.Sequential([keras.Input((64,)), Sleep(), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, steps_per_execution=STEPS_PER_EXECUTION)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(12, 64)).astype("float32"), rng.integers(0, 2, 12)
spec = tf.TensorSpec((None, 64)), tf.TensorSpec((None,), tf.int64)
callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(PAUSES[worker]))]
if SAVES:
    callbacks.append(keras.callbacks.ModelCheckpoint(str(here / "model-{epoch}.keras")))
data = tf.data.Dataset.from_generator(batches, output_signature=spec)
model.fit(data, steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0, callbacks=callbacks)
"""
FAST = {
    **{"COMPUTE": [0.05] * 3, "WAITS": [0] * 3, "PAUSES": [0] * 3, "SAVES": False},
    **{"WIDTH": 8, "STEPS": 30, "EPOCHS": 1, "STEPS_PER_EXECUTION": 1},
}


def script(run, **settings):
    """Writes the script of a job with these settings. Returns its path."""
    told = {**FAST, **settings}
    return run.script("".join(f"{name} = {value}\n" for name, value in told.items()) + TRAIN)


def trained(run, workers=2, **settings):
    """Runs a job. Returns the records of its verdicts, and the output of the terminal."""
    logs = run.directory / "logs"
    code, out, err = run.finish("--workers", workers, "--log-dir", logs, script(run, **settings))
    assert code == 0, err
    path = RunFiles(logs).stragglers(0)
    return read_records(path)[0] if path.exists() else [], out + err


@pytest.mark.slow
def test_a_job_names_the_worker_that_computes_longer_within_30_steps(tmp_path):
    with nothing_left(tmp_path) as run:
        (found,), output = trained(run, COMPUTE=[0.05, 0.35])  # Far apart, as a busy machine slows either worker.
    assert (found.cause, found.worker, found.host) == (COMPUTATION, 1, socket.gethostname())
    assert found.step <= 30 and 2 < found.amount < 10
    assert found.text in output


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_a_job_names_the_worker_that_waits_for_its_input_within_30_steps(tmp_path, steps_per_execution):
    settings = {"WAITS": [0, 0, 0.2], "COMPUTE": [0.05] * 3, "STEPS_PER_EXECUTION": steps_per_execution}
    with nothing_left(tmp_path) as run:
        (found,), _ = trained(run, 3, **settings)
    assert (found.cause, found.worker) == (INPUT, 2) and found.step <= 30 and found.amount > 0.4


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_job_names_the_worker_with_a_slow_callback_within_30_steps(tmp_path):
    with nothing_left(tmp_path) as run:
        (found,), output = trained(run, 3, PAUSES=[0, 0.06, 0])
    assert (found.cause, found.worker) == (CALLBACK, 1) and found.step <= 30 and 0.3 < found.amount < 0.7
    assert found.text in output


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"PAUSES": [0.06] * 3, "STEPS": 60}, {"SAVES": True, "STEPS": 10, "EPOCHS": 6}])
def test_a_callback_of_all_workers_or_between_epochs_gets_no_verdict(tmp_path, settings):
    with nothing_left(tmp_path) as run:
        found, _ = trained(run, 3, **settings)
    assert found == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_equal_workers_beside_a_second_job_get_no_verdict_in_500_steps(tmp_path):
    """The steps really compute, so that the second job slows one worker or the other."""
    with nothing_left(tmp_path) as run:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            found, _ = trained(run, COMPUTE=[0, 0], WIDTH=1500, STEPS=500)
        finally:
            busy.kill()
            busy.wait()
    assert found == []


def shape(host, slow_peer=None):
    """Limits the rate of a virtual host to 400 Mbit/s, and to 20 Mbit/s on the way to `slow_peer`."""

    def tc(*words):
        return subprocess.run(["tc", "-n", host.name, *words], capture_output=True, text=True, timeout=20)

    made = tc("qdisc", "replace", "dev", host.interface, "root", "handle", "1:", "htb", "default", "1")
    if made.returncode:
        pytest.skip(f"the kernel cannot shape links to one host: {made.stderr.strip()}")
    for number, rate in ((1, "400mbit"), (2, "20mbit")):
        place = ("dev", host.interface, "parent", "1:", "classid", f"1:{number}")
        assert tc("class", "add", *place, "htb", "rate", rate, "burst", "100k").returncode == 0
    if slow_peer is not None:
        place = ("dev", host.interface, "parent", "1:", "protocol", "ip", "prio", "1")
        match = ("u32", "match", "ip", "dst", f"{slow_peer.address}/32", "flowid", "1:2")
        assert tc("filter", "add", *place, *match).returncode == 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.privileged
@pytest.mark.parametrize("workers", [2, 3])
def test_a_job_names_the_slow_link_within_30_steps(tmp_path, workers):
    reason = netlab.why_not()
    if reason:
        pytest.skip(reason)
    with nothing_left(tmp_path) as run, netlab.Netlab(workers, None) as lab:
        for worker, host in enumerate(lab.hosts):
            shape(host, lab.hosts[0] if worker == 1 else None)
        path = script(run, COMPUTE=[0.02] * workers, WAITS=[0] * workers, WIDTH=400, STEPS=40)
        command = [
            sys.executable,
            "-m",
            "tfdist.launch.cli",
            "run",
            "--max-restarts=0",
            "--log-dir",
            str(tmp_path),
            path,
        ]
        addresses = [f"{host.address}:7100" for host in lab.hosts]
        processes = []
        for worker, host in enumerate(lab.hosts):
            spec = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
            env = {**os.environ, "TF_CONFIG": json.dumps(spec), "TFDIST_SECRET": "secret of this test"}
            processes.append(subprocess.Popen(host.command(command), env=env, stderr=subprocess.DEVNULL))
        assert [process.wait(DEADLINE_SECONDS) for process in processes] == [0] * workers
    (found,), _ = read_records(RunFiles(tmp_path / "worker-0").stragglers(0))
    assert (found.cause, found.link) == (LINK, (1, 0)) and found.step <= 30 and found.amount < 0.4
