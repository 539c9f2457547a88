"""The time of a run is divided into parts that sum to it, and lost work is what the commits say."""

import dataclasses
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from launched import nothing_left
from tfdist.events import phase_times
from tfdist.events.phase_names import (
    BUILDING,
    CALLBACK,
    COMPUTE,
    EXCHANGE,
    INPUT,
    OUTSIDE,
    OWN_LOOP,
    RESTORE,
    SAVE,
    START,
    TRACING,
    VALIDATION,
)
from tfdist.events.time_record import (
    BEGINNING,
    KEPT_SAVES,
    TIMED_PHASES,
    UNDECIDED,
    SaveMoment,
    SignOfLife,
    TimeRecord,
    TimeRecordFile,
    read_time_record,
)
from tfdist.launch import cli
from tfdist.report.goodput import (
    AGAIN,
    LOST,
    PARTS,
    REST,
    RESTART,
    UNRECORDED,
    LostWork,
    TimeAccount,
    WorkerAttempt,
    account_for,
)
from tfdist.report.recorded_run import RecordedRun
from tfdist.report.report_figures import RunFigures
from tfdist.report.report_summary import tiles_of
from tfdist.report.training_speed import speed_of

BEGUN = 1_764_184_000.0


def seconds(**given):
    names = {"start": START, "loop": OWN_LOOP, **{name: name for name in TIMED_PHASES}}
    return dict.fromkeys(TIMED_PHASES, 0.0) | {names[name]: float(value) for name, value in given.items()}


def record(start, /, resumed=(UNDECIDED, 0), steps=0, phase=OUTSIDE, saves=(), **spent):
    """A record that begins `start` seconds after the run."""
    parts = seconds(**spent)
    return TimeRecord(BEGUN + start, BEGUN + start + sum(parts.values()), phase, steps, *resumed, parts, saves)


def attempt(number, worker, start, length, outcome, times, failed_at=None, committed=None):
    failed = None if failed_at is None else BEGUN + failed_at
    return WorkerAttempt(worker, number, BEGUN + start, length, outcome, failed, committed, times)


def killed_once(steps=18, second=None):
    """Two workers; worker 1 is killed in step 19, after a commit of step 10; a second attempt continues from it."""
    save = SaveMoment(10, 10, seconds(start=4, tracing=3, compute=5, exchange=3, callback=1))
    before = {"resumed": (BEGINNING, 0), "steps": steps, "saves": [save], "start": 4, "tracing": 3}
    first = record(1, **before, compute=9, exchange=5, callback=2, save=1, phase=EXCHANGE)
    victim = record(1, **before, compute=9, exchange=5, callback=2, phase=COMPUTE)
    after = {"start": 5, "restore": 1, "tracing": 2, "compute": 8, "exchange": 6, "callback": 1, "outside": 0.5}
    second = second or record(30, resumed=(10, 10), steps=40, **after)
    return [
        attempt(0, 0, 0, 27, "failed", first, failed_at=24.5, committed=10),
        attempt(0, 1, 0, 27, "failed", victim, failed_at=24.5, committed=10),
        attempt(1, 0, 29, 25, "done", second, committed=40),
        attempt(1, 1, 29, 25, "done", second, committed=40),
    ]


def test_the_parts_of_a_run_with_a_kill_sum_to_its_time_and_lost_work_is_since_the_commit():
    account = account_for(killed_once())
    assert account.seconds == pytest.approx(54) and sum(account.parts.values()) == pytest.approx(54)
    assert account.lost == [LostWork(0, last_step=18, steps=8, commit=10)]
    first = account.attempts[0]
    assert first[LOST] == pytest.approx(7.25) and first[RESTART] == pytest.approx(4.25) and AGAIN not in first
    assert account.attempts[1][AGAIN] == pytest.approx(9) and account.attempts[1].get(LOST, 0.0) == 0
    of_victim, of_survivor = account.workers[1], account.workers[0]
    # Since the save. The last write of the victim was at 24 s, and it died half a second later.
    assert of_victim[LOST] == pytest.approx(4 + 2 + 1 + 0.5) and of_survivor[LOST] == pytest.approx(7)
    assert of_victim[RESTART] == pytest.approx(2.5 + 2) and of_survivor[RESTART] == pytest.approx(2 + 2)
    assert of_victim[COMPUTE] == pytest.approx(5 + 8) and of_victim[EXCHANGE] == pytest.approx(3 + 6)
    assert of_victim[START] == pytest.approx(1 + 4) and of_victim[AGAIN] == pytest.approx(1 + 5 + 1 + 2)
    assert of_victim[OUTSIDE] == pytest.approx(0.5 + 0.5), "and the time after its last write"
    assert account.goodput == pytest.approx(22 / 54) and REST not in account.parts
    assert [part for part in PARTS if part in account.parts] == list(account.parts)


def test_without_backups_all_training_before_a_failure_is_lost():
    restarted = record(30, steps=40, compute=20)
    runs = [each for each in killed_once(second=restarted) if each.attempt or each.worker]
    account = account_for(runs)
    assert account.lost == [LostWork(0, last_step=18, steps=18, commit=BEGINNING)]
    assert account.parts[LOST] == pytest.approx(9 + 5 + 2 + 0.5) and account.parts[COMPUTE] == pytest.approx(20)


def test_an_attempt_that_fails_for_good_loses_the_steps_after_its_newest_commit():
    first = killed_once()[:2]
    assert account_for(first).lost == [LostWork(0, last_step=18, steps=8, commit=10)]
    done = [attempt(0, 0, 0, 27, "done", first[0].record, committed=10)]
    assert not account_for(done).lost and LOST not in account_for(done).parts


def test_an_attempt_that_ends_before_it_restored_loses_nothing_and_the_next_one_tells_the_commit():
    early = record(30, start=3)
    runs = killed_once()
    late = [attempt(2, each.worker, 60, 25, "done", each.record) for each in runs[2:]]
    dead = [attempt(1, worker, 29, 10, "failed", early, failed_at=34, committed=10) for worker in range(2)]
    account = account_for([*runs[:2], *dead, *late])
    assert account.lost == [LostWork(0, last_step=18, steps=8, commit=10)]


def test_lost_work_since_a_commit_that_the_record_does_not_know_is_by_the_number_of_steps():
    second = record(30, resumed=(3, 3), steps=40, compute=20)
    account = account_for([each for each in killed_once(second=second) if each.worker])
    assert account.lost == [LostWork(0, last_step=18, steps=15, commit=3)]
    assert account.parts[LOST] == pytest.approx((9 + 5 + 2 + 0.5) * 15 / 18)


def test_a_worker_without_a_record_is_counted_and_a_clock_that_jumps_is_shown_as_rest():
    runs = killed_once()
    runs[2] = attempt(1, 0, 29, 25, "done", None)
    runs[1] = attempt(0, 1, 0, 27, "failed", None, failed_at=24)
    account = account_for(runs)
    assert account.workers[0][UNRECORDED] == 25 and account.workers[1][START] == 27
    assert sum(account.parts.values()) == pytest.approx(54)
    jumped = record(1, compute=40)
    account = account_for([attempt(0, 0, 0, 27, "done", jumped)])
    assert account.parts[REST] == pytest.approx(-14) and sum(account.parts.values()) == pytest.approx(27)
    assert account_for([]).goodput is None


def own_loops(**first):
    """A loop of the script's own fails after 24 s, and begins again."""
    loop = record(1, start=4, tracing=1, input=2, loop=17, phase=OWN_LOOP, **first)
    again = record(30, start=5, tracing=1, input=2, loop=11, phase=OWN_LOOP)
    return [
        attempt(0, 0, 0, 27, "failed", loop, failed_at=25, committed=10 if first else None),
        attempt(1, 0, 29, 20, "done", again, committed=10 if first else None),
    ]


def test_of_a_loop_of_the_users_own_without_backups_the_lost_work_is_unknown():
    account = account_for(own_loops())
    assert account.unknown == [0] and not account.lost and LOST not in account.parts
    assert account.parts[OWN_LOOP] == pytest.approx(17 + 11) and account.parts[INPUT] == pytest.approx(4)
    assert account.is_at_most and account.goodput == pytest.approx(32 / 49)
    assert sum(account.parts.values()) == pytest.approx(49)
    only = account_for(own_loops()[1:])
    assert not only.unknown and not only.lost, "nothing has failed"


def test_the_goodput_is_at_most_what_is_known_if_lost_work_is_unknown_or_a_loop_is_the_users_own():
    def told(unknown=(), **spent):
        return TimeAccount(100.0, {"not recorded": 0.0, **seconds(**spent)}, {}, [], unknown)

    assert not told(compute=100).is_at_most and not told(compute=99.9, loop=0.1).is_at_most
    assert told(compute=90, loop=10).is_at_most and told([0], compute=99.9, loop=0.1).is_at_most
    hidden = dataclasses.replace(told([0], loop=40), parts={UNRECORDED: 60.0, OWN_LOOP: 40.0})
    assert hidden.goodput is None and not hidden.is_at_most
    figures = RunFigures(RecordedRun(pathlib.Path(), (), {}, ()), {}, hidden, [], None, None)
    assert tiles_of(figures, [])[0] == ("Goodput", "unknown")


def test_a_loop_of_the_users_own_beside_fit_has_none_of_the_counted_steps():
    fit = {"compute": 6, "exchange": 2, "input": 1, "callback": 1}
    for own in (0, 30):
        speed = speed_of([record(0, (BEGINNING, 0), 20, **fit, loop=own)] * 2, {})
        assert (speed.steps, speed.step_seconds, speed.efficiency) == (20, pytest.approx(0.5), pytest.approx(0.8))
    only = speed_of([record(0, (BEGINNING, 0), 20, input=2, exchange=1, loop=7)], {})
    assert (only.step_seconds, only.efficiency) == (pytest.approx(0.5), None)


def test_a_record_hides_the_steps_of_a_loop_of_the_users_own_without_backups():
    assert record(0, loop=3, phase=INPUT).hides_steps and record(0, phase=OWN_LOOP).hides_steps
    assert not record(0, steps=3, loop=3, phase=OWN_LOOP).hides_steps and not record(0, phase=COMPUTE).hides_steps


def test_lost_work_of_a_loop_with_backups_is_since_the_commit():
    save = SaveMoment(10, 10, seconds(start=4, tracing=1, input=1, loop=9))
    account = account_for(own_loops(resumed=(BEGINNING, 0), steps=18, saves=[save]))
    assert account.lost == [LostWork(0, last_step=18, steps=8, commit=10)] and not account.unknown
    assert account.parts[LOST] == pytest.approx(1 + 8) and account.parts[OWN_LOOP] == pytest.approx(9 + 11)


def test_parts_sum_to_the_time_whatever_the_records_say():
    rng = random.Random(0)
    for _ in range(200):
        runs, now = [], 0.0
        for number in range(rng.randrange(1, 5)):
            length, now = rng.uniform(0, 50), now + rng.uniform(0, 5)
            for worker in range(rng.randrange(1, 4)):
                names = (COMPUTE, EXCHANGE, INPUT, SAVE, BUILDING, VALIDATION, rng.choice([COMPUTE, OWN_LOOP]))
                spent = {name: rng.uniform(0, 5) for name in names}
                saves = [SaveMoment(step, step, seconds(compute=rng.uniform(0, 5))) for step in range(3)]
                origin = (rng.randrange(-2, 4), rng.randrange(4))
                times = record(now, origin, rng.randrange(9), rng.choice(TIMED_PHASES), saves, **spent)
                outcome = rng.choice(["done", "failed", "running", "preempted"])
                end = rng.choice([None, now + length / 2])
                times = rng.choice([times, times, None])
                runs.append(attempt(number, worker, now, length, outcome, times, end, rng.choice([None, 2])))
            now += length
        account = account_for(runs)
        assert sum(account.parts.values()) == pytest.approx(now - (runs[0].start - BEGUN))
        assert all(each >= -1e-9 for part, each in account.parts.items() if part != REST)
        by_attempt = [sum(spent.values()) for spent in account.attempts.values()]
        assert sum(by_attempt) == pytest.approx(account.seconds) and len(by_attempt) == number + 1


# The file of a worker.


def test_a_file_has_the_newest_record_and_saves(tmp_path):
    path = tmp_path / "times-0.bin"
    file = TimeRecordFile(path)
    for steps in (1, 2):
        file.write(record(1, (7, 6), steps, TRACING, start=2, tracing=steps))
    saves = [SaveMoment(step, step, seconds(compute=step)) for step in range(KEPT_SAVES + 2)]
    for save in saves:
        file.add_save(save)
    read = read_time_record(path)
    assert sorted(read.saves, key=lambda save: save.commit) == saves[2:]
    assert (read.steps, read.phase, read.resumed_commit, read.resumed_steps) == (2, TRACING, 7, 6)
    assert read.seconds == seconds(start=2, tracing=2) and read.time == read.start + 4 and read.sign is None
    for sign in (SignOfLife(BEGUN + 9, 7, "the beginning of a call"), SignOfLife(BEGUN + 10, 8, None)):
        file.write_sign(sign)
        assert read_time_record(path).sign == sign
    assert sorted(read_time_record(path).saves, key=lambda save: save.commit) == saves[2:]


@pytest.mark.parametrize("content", [b"", b"{}", b"tfdtime2", b"tfdtime2" + b"\xff" * 900, bytes(900)])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "times-0.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"has (no|impossible) times"):
        read_time_record(path)


@pytest.fixture
def times(tmp_path, monkeypatch):
    """The times of a process that began now, on a clock of the test."""
    now = [0.0]
    monkeypatch.setattr(phase_times.time, "monotonic", lambda: now[0])
    times = phase_times.PhaseTimes()
    times.path = tmp_path / "attempt-0" / "times-0.bin"
    times.begin(times.path)

    def after(seconds, act, *arguments):
        now[0] += seconds
        return act(*arguments)

    times.after = after
    return times


def test_steps_are_divided_and_the_rest_is_of_python(times):
    parts = {INPUT: 0.5, COMPUTE: 2.0, EXCHANGE: 1.0}
    times.after(4, times.switch, BUILDING)
    times.after(1, times.switch, phase_times.STEP)
    times.after(0.1, times.switch, TRACING)
    times.after(2, times.switch, phase_times.STEP)
    times.after(4, times.stepped, parts)  # Half a second in which TensorFlow optimized the graph.
    times.after(0.2, times.switch, CALLBACK)
    times.after(1, times.switch, phase_times.STEP)
    times.after(3.6, times.stepped, parts)
    times.after(0.3, times.switch, CALLBACK)
    told = read_time_record(times.path)
    assert told.steps == 2 and told.phase == CALLBACK
    assert told.seconds == pytest.approx(
        seconds(start=4, building=1, tracing=2.5, input=1, compute=4.1, exchange=2, callback=0.2 + 1 + 0.1 + 0.3)
    )
    assert told.time - told.start == pytest.approx(sum(told.seconds.values()))


def test_a_step_that_does_not_report_computes_and_a_save_counts_as_one(times):
    times.resumed(None, 0)
    times.switch(phase_times.STEP)
    times.after(2, times.switch, CALLBACK)
    with times.within(SAVE):
        times.after(1, times.switch, EXCHANGE)
        times.after(1, times.saved, 1, 1)
        with times.within(RESTORE):
            times.after(1, times.switch, CALLBACK)
    times.after(3, times.count_steps, 1)
    times.after(0, times.switch, OUTSIDE)
    told = read_time_record(times.path)
    assert told.seconds == pytest.approx(seconds(compute=2, save=3, callback=3))
    (save,) = told.saves
    assert (save.commit, save.steps) == (1, 1) and save.seconds == pytest.approx(seconds(compute=2, save=2))
    assert told.resumed_commit == BEGINNING
    times.resumed(None, 5)  # A second `fit` of this process.
    times.resumed(9, 9)
    assert read_time_record(times.path).resumed_commit == 9


def test_a_thread_that_hangs_in_a_write_does_not_keep_the_signs_of_life_back(times):
    with times._lock:
        thread = threading.Thread(target=times.show_life, args=(EXCHANGE, 7))
        thread.start()
        thread.join(60)
    sign = read_time_record(times.path).sign
    assert (sign.phase, sign.step) == (EXCHANGE, 7)


def test_a_process_that_no_longer_shows_signs_of_life_has_none(times):
    times.show_life(EXCHANGE, 7)
    times.end_signs()
    assert read_time_record(times.path).sign is None
    times.show_life(None, 8)  # Of the watchdog of another strategy.
    assert read_time_record(times.path).sign.step == 8


@pytest.mark.slow
def test_a_killed_process_leaves_its_times(tmp_path):
    body = f"""
        import os, pathlib, signal, time
        from tfdist.events.phase_times import TIMES
        TIMES.begin(pathlib.Path({str(tmp_path)!r}, "times-0.bin"))
        time.sleep(0.2)
        TIMES.switch("building")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(body)], check=False).returncode == -9
    told = read_time_record(tmp_path / "times-0.bin")
    assert told.phase == BUILDING and told.seconds[START] >= 0.2


def test_a_change_of_the_phase_costs_microseconds_and_nothing_if_off(tmp_path):
    times = phase_times.PhaseTimes()
    times.switch(COMPUTE)
    with times.within(SAVE):
        times.saved(1, 1)
    assert times._phase == START
    times.begin(tmp_path / "times-0.bin")
    best = 1.0
    for _ in range(5):
        since = time.thread_time()  # Other processes do not count.
        for _ in range(100):
            times.switch(COMPUTE)
            times.switch(CALLBACK)
        best = min(best, (time.thread_time() - since) / 200)
    assert best < 100e-6


def test_a_file_that_cannot_be_made_is_not_needed(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path / "other")
    times = phase_times.PhaseTimes()
    times.begin(tmp_path / "link")
    times.switch(COMPUTE)
    assert not times.is_on and not os.path.exists(tmp_path / "other")


# The report.


def write(folder, runs):
    """Writes the folder of a run."""
    attempts = {}
    for each in runs:
        told = {name: getattr(each, name) for name in ("seconds", "outcome", "committed")}
        failure = {"time": each.failed_at} if each.failed_at else None
        attempts[each.attempt] = {"number": each.attempt, "time": each.start, **told, "failure": failure}
        path = folder / f"attempt-{each.attempt}" / f"times-{each.worker}.bin"
        path.parent.mkdir(exist_ok=True)
        file = TimeRecordFile(path)
        file.write(each.record)
        for save in each.record.saves:
            file.add_save(save)
    run = {"outcome": "done", "run_exit_code": 0, "attempts": list(attempts.values())}
    (folder / "run.json").write_text(json.dumps(run))


def test_the_report_has_a_table_of_the_parts(tmp_path, capsys):
    write(tmp_path, killed_once())
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"run in {tmp_path}: done, exit code 0\n" in out
    assert "goodput 40.7%: the share of training steps that were kept in 54 s\n" in out
    assert "  training steps: computation                              13 s   24.1%\n" in out
    assert "  lost work                                               7.2 s   13.4%\n" in out
    assert "attempt 0 lost 8 steps: it had finished step 18, training continues from backup step-10\n" in out
    assert "(worker" not in out


def test_the_report_names_workers_that_differ(tmp_path, capsys):
    runs = killed_once()[2:]
    slow = record(30, resumed=(10, 10), steps=40, compute=2, exchange=1, input=20)
    write(tmp_path, [runs[0], attempt(1, 1, 29, 25, "done", slow)])
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "(worker 1: 80%, worker 0: 0%)\n" in capsys.readouterr().out


def test_the_report_says_what_it_does_not_know_of_a_loop_of_the_users_own(tmp_path, capsys):
    write(tmp_path, own_loops())
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "goodput at most 65.3%: the share of training steps that were kept in 49 s\n" in out
    assert re.search(r"  training loop of your own +28 s +57\.1%\n", out), out
    assert "  at most: a training loop of your own does not tell its steps, so its evaluations and other code " in out
    assert "attempt 0: how much work was lost is not known, since its training loop has no tfdist.callbacks." in out
    page = (tmp_path / "report.html").read_text()
    assert "<td>unknown</td><td>none</td>" in page, "steps and newest backup"
    assert "At most 65.3&#160;% of the time" in page and "How much work was lost is not known" in page
    cost = re.findall(r"(?:It cost|Failures cost)? ?at least [0-9.]+&#160;s", page, re.IGNORECASE)
    assert len(cost) == 3, cost


LOOP = """
import keras
import numpy as np
import tensorflow as tf
import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

def slow(x):
    return tf.numpy_function(lambda x: time.sleep(0.02) or x, [x], tf.float32)

data = tf.data.Dataset.from_tensor_slices(np.ones((480, 8), "float32")).batch(32)
data = strategy.experimental_distribute_dataset(data.map(lambda x: tf.ensure_shape(slow(x), [None, 8])))

@tf.function
def step(x):
    def on_replica(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True))) / 32
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    strategy.run(on_replica, args=(x,))

time.sleep(0.5)
for epoch in range(4):
    for x in data:
        step(x)
        time.sleep(0.03)
"""


@pytest.mark.slow
def test_a_loop_of_the_users_own_is_no_start_up(tmp_path, capsys):
    with nothing_left(tmp_path) as run:
        code, out, err = run.finish("--workers", 2, "--log-dir", tmp_path / "run", run.script(LOOP))
    assert code == 0, out + err
    for worker in range(2):
        told = read_time_record(tmp_path / f"run/attempt-0/times-{worker}.bin")
        assert told.phase == OWN_LOOP and told.seconds[OWN_LOOP] >= 60 * 0.03, told
        assert told.seconds[INPUT] + told.seconds[EXCHANGE] > 0.2 and told.seconds[TRACING] > 0, told
        assert told.seconds[START] >= 0.5 and told.seconds[OUTSIDE] == 0 and told.sign is None
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "goodput at most " in out and "  training loop of your own  " in out, out


def test_damaged_files_never_end_the_report(tmp_path, capsys):
    rng = random.Random(0)
    names = ["run.json", *(f"attempt-{number}/times-{worker}.bin" for number in range(2) for worker in range(2))]
    for _ in range(60):
        write(tmp_path, killed_once())
        for name in rng.sample(names, 2):
            content = bytearray((tmp_path / name).read_bytes())
            for _ in range(rng.randrange(20)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            (tmp_path / name).write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        assert cli.main(["report", str(tmp_path)]) == 0
        assert f"run in {tmp_path}" in capsys.readouterr().out
