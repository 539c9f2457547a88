"""`tfdist report` says who was missing from which exchange and where each worker was, from files of any quality."""

import dataclasses
import json
import os
import random
import re
import socket
import time

import pytest

from recorded_runs import BEGUN, write_times
from tfdist.events.asked_by_signal import process_start
from tfdist.events.event_buffer import Event, EventBuffer
from tfdist.events.event_file import ASKED, EXCHANGE, START, EventFile, read_events, read_header, write_events
from tfdist.events.phase_names import OWN_LOOP
from tfdist.events.time_record import BEGINNING, TIMED_PHASES, SignOfLife, TimeRecordFile, read_time_record
from tfdist.launch import cli
from tfdist.report.earlier_runs import FolderSpan, earlier_runs
from tfdist.report.missing_workers import WAITS, elsewhere, held_up, last_exchange, last_position, missed_exchanges
from tfdist.report.recorded_run import read_run
from tfdist.report.report_page import page_of

SECOND = 10**9


def header(worker, why="lost peer", pending=(), phase="exchange", workers=3, **others):
    clock = {"time": 1_764_184_000.0 + worker / 10, "ns": 100 * SECOND, "start": 1_764_183_000.0}
    place = {"worker": worker, "workers": workers, "host": "host-a", "pid": 70 + worker, "attempt": 0}
    return {
        "format": 1,
        **place,
        **clock,
        "why": why,
        "step": 40,
        "phase": phase,
        "call": "fit",
        "pending": list(pending),
    } | others


def pending(key, *missing, seconds=2, size=4096, group=7, workers=()):
    since = None if seconds is None else (100 - seconds) * SECOND
    members = {"workers": list(workers)} if workers else {}
    return {"group": group, "key": key, "bytes": size, "missing": list(missing), "since": since, **members}


def exchanged(key, seconds, step=39, group=7, **members):
    details = {"group": group, "key": key, "since": (99 - seconds) * SECOND, **members}
    return Event((100 - seconds) * SECOND, "exchange", step, details)


def test_the_worker_that_others_wait_for_is_missing_from_their_exchange():
    files = {
        0: EventFile(header(0, pending=[pending(12, 1, seconds=3), pending(13, 1, 2, seconds=1)])),
        2: EventFile(header(2, pending=[pending(12, 1, seconds=2)])),
    }
    first, second = missed_exchanges(files)
    assert (first.key, first.bytes, first.step, first.waiting) == (12, 4096, 40, {0: 3.0, 2: 2.0})
    assert (first.absent, first.unheard) == ([1], []) and (second.absent, second.unheard) == ([1, 2], [])


def test_a_worker_that_has_begun_an_exchange_is_not_absent_but_its_bytes_are():
    files = {worker: EventFile(header(worker, pending=[pending(12, 1 - worker)])) for worker in range(2)}
    (missed,) = missed_exchanges(files)
    assert (missed.absent, missed.unheard) == ([], [0, 1])


def test_an_exchange_that_only_peers_have_begun_makes_nobody_wait():
    assert missed_exchanges({0: EventFile(header(0, pending=[pending(12, 0, 2, seconds=None)]))}) == []


def test_without_seen_exchanges_the_phases_tell_for_whom_workers_wait():
    files = {0: EventFile(header(0)), 1: EventFile(header(1, phase="input")), 2: EventFile(header(2, phase=WAITS[1]))}
    assert elsewhere(files, range(4), culprit=3) == [3] and elsewhere(files, range(4), culprit=0) == []
    assert elsewhere(files, range(4), None) == [3]  # Worker 1 was stopped by the loss of a peer.
    files[1] = EventFile(header(1, why="stall", phase="input"))
    assert elsewhere(files, range(4), None) == [1, 3]
    files[0] = EventFile(header(0, peer=3))
    assert elsewhere(files, range(4), None) == [3]
    assert elsewhere({1: files[1]}, range(3), None) == []


def test_a_worker_that_has_worked_on_since_it_was_asked_is_not_missing():
    def asked(worker, seconds_later, **others):
        clock = {"time": 1_764_184_000.0 + seconds_later, "ns": (100 + seconds_later) * SECOND}
        return EventFile(header(worker, ASKED, workers=2, **others) | clock)

    waits = asked(0, 0, pending=[pending(12, 1)])
    later = asked(1, 5)
    assert missed_exchanges({0: waits, 1: later})[0].absent == [1]
    done = EventFile(later.header, [exchanged(12, -1)])
    assert missed_exchanges({0: waits, 1: done}) == []
    assert missed_exchanges({0: waits, 1: asked(1, -5)}) == []
    ended = EventFile(asked(1, -5).header | {"why": "exception"})
    assert missed_exchanges({0: waits, 1: ended})[0].absent == [1]


def test_the_last_exchange_of_a_worker_is_the_newest_that_a_peer_has_completed():
    files = {
        0: EventFile(header(0), [exchanged(10, 9), exchanged(11, 2), Event(0, "step", 39, {})]),
        1: EventFile(header(1), [exchanged(12, 1)]),
        2: EventFile(header(2), [exchanged(11, 3)]),
    }
    last = last_exchange(files, 1)
    assert (last.peer, last.group, last.key, last.step, last.seconds) == (0, 7, 11, 39, 2.0)
    assert last_exchange({1: files[1]}, 1) is None


def test_the_last_exchange_of_a_worker_may_lack_the_part_of_another():
    files = {
        0: EventFile(header(0, pending=[pending(12, 2), pending(13, 1, 2)]), [exchanged(11, 9)]),
        3: EventFile(header(3, pending=[pending(12, 1, 2)]), [exchanged(11, 8)]),
    }
    last = last_exchange(files, 1)
    assert (last.peer, last.key, last.step, last.seconds) == (0, 12, 40, None)
    last = last_exchange(files, 2)
    assert (last.peer, last.key, last.step, last.seconds) == (3, 11, 39, 8.0)


def frozen_in_a_group():
    """Events of workers in the groups 0, 1 and 2, 3, while worker 1 is frozen: worker 2 waits for 0, which waits."""
    first, second, evens, odds = (0, 1), (2, 3), (0, 2), (1, 3)
    own = [exchanged(11, 4, group=20, workers=[0, 1]), exchanged(11, 3, group=30, workers=evens)]
    other = [exchanged(11, 4, group=30, workers=evens), exchanged(12, 1, group=22, workers=second)]
    odd = [exchanged(11, 3, group=31, workers=odds), exchanged(12, 1, group=22, workers=second)]
    return {
        0: EventFile(header(0, pending=[pending(12, 1, seconds=3, group=20, workers=first)], workers=4), own),
        2: EventFile(header(2, pending=[pending(12, 0, seconds=2, group=30, workers=evens)], workers=4), other),
        3: EventFile(header(3, pending=[pending(12, 1, seconds=2.5, group=31, workers=odds)], workers=4), odd),
    }


def test_only_workers_of_the_group_are_missing_and_a_worker_that_waits_is_held_up():
    files = frozen_in_a_group()
    missed = missed_exchanges(files)
    assert [(each.group, each.absent, each.workers) for each in missed] == [
        (20, [1], (0, 1)),
        (31, [1], (1, 3)),
        (30, [0], (0, 2)),
    ]
    assert held_up(missed) == {0: [1]}
    # Worker 3 has completed an exchange after its last one with worker 1, in a group without worker 1.
    last = last_exchange(files, 1)
    assert (last.peer, last.group, last.key) == (3, 31, 11)
    files[0].header["pending"][0]["missing"] = [1, 3]  # A damaged entry: worker 3 is not in the group.
    assert missed_exchanges(files)[0].absent == [1]


def test_workers_that_wait_for_each_other_are_all_missing():
    one = EventFile(header(0, pending=[pending(12, 1, group=20)]))
    two = EventFile(header(1, pending=[pending(12, 0, group=30)]))
    missed = missed_exchanges({0: one, 1: two})
    assert [each.absent for each in missed] == [[1], [0]] and held_up(missed) == {}


def test_the_report_names_the_workers_of_a_group(tmp_path, reported):
    killed_job(tmp_path)
    for worker, file in frozen_in_a_group().items():
        write_events(tmp_path / f"attempt-0/events-{worker}.jsonl", file.header, file.events, {})
    out = reported()[1]
    for line in (
        "worker 1 was missing from exchange 12 (group 20 of worker 0, worker 1, 4096 bytes) in step 41: worker 0 ",
        "worker 1 was missing from exchange 12 (group 31 of worker 1, worker 3, 4096 bytes) in step 41: worker 3 ",
        "worker 0 had not begun exchange 12 (group 30 of worker 0, worker 2, 4096 bytes) in step 41, waiting for ",
        "worker 1 last took part in exchange 11 (group 31), in step 40: worker 3 had all parts 3.0 s before",
    ):
        assert line in out, out
    assert "worker 0 was missing" not in out and "worker 0 last took part" not in out


def test_the_age_of_a_position_is_the_time_since_the_last_event_or_the_begin_of_the_wait():
    assert last_position(EventFile(header(0), [exchanged(10, 9)])).seconds == 9.0
    assert last_position(EventFile(header(0, pending=[pending(11, 1)]), [exchanged(10, 9)])).seconds == 2.0
    assert last_position(EventFile(header(0))).seconds == 1000.0
    failed = Event(90 * SECOND, "run", 40, {"error": "ValueError"})
    assert last_position(EventFile(header(0, phase=None), [failed])).error == "ValueError"


# The files.


def test_the_buffer_keeps_the_newest_events_and_none_if_it_is_off():
    events = EventBuffer()
    events.note("step")
    assert events.copy() == []
    events.start(3)
    for key in range(5):
        events.step = key
        events.note("exchange", key=key)
    assert [(event.step, event.details) for event in events.copy()] == [(key, {"key": key}) for key in (2, 3, 4)]
    assert events.copy()[0].ns <= events.copy()[1].ns


def test_steps_after_a_restore_have_the_numbers_of_commits():
    events = EventBuffer()
    events.count(1)
    events.count_from(30)  # A commit, restored after a step of another fit.
    assert events.step == 30
    events.count(2)
    assert (events.step, events.steps_before) == (31, 29)


def test_a_file_has_what_was_written(tmp_path):
    path = tmp_path / "attempt-0" / "events-1.jsonl"
    events = [exchanged(10, 9), Event(5, "step", 3, {"rows": [4, 4]})]
    stacks = {"MainThread": [("/a/train.py", 3, "<module>")]}
    write_events(path, header(1), events, stacks)
    assert read_events(path) == EventFile(header(1), events, stacks)
    assert read_header(path) == header(1) and [each.name for each in path.parent.iterdir()] == [path.name]
    path.write_text(path.read_text()[:-20])
    assert read_events(path).damaged == 1 and read_events(path).events == events


@pytest.mark.parametrize("text", ["", "[]", "{}", "\0", '{"format": 2, "worker": 1}', "[" * 100_000])
def test_a_file_that_has_no_events_is_refused(tmp_path, text):
    path = tmp_path / "events-0.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"worker|file of events"):
        read_events(path)
    assert read_header(path) == {}


# The command.


@pytest.fixture
def reported(tmp_path, capsys):
    """Returns a function that runs `tfdist report` on the folder of the test."""

    def run(*arguments):
        code = cli.main(["report", str(tmp_path), "--no-html", *arguments])
        return code, capsys.readouterr().out

    return run


def killed_job(folder, worker_folders=False):
    """Makes the files of a run in which worker 1 was killed."""
    failure = {"attempt": 0, "worker": 1, "host": "host-a", "time": 1_764_184_000.0, "kind": "signal", "exit_code": 137}
    attempt = {"number": 0, "workers": 2, "seconds": 41.0, "outcome": "failed", "committed": 30}
    attempt["failure"] = {**failure, "signal": "SIGKILL", "category": "machine"}
    runs = [folder / f"worker-{worker}" if worker_folders else folder for worker in range(2)]
    for run in dict.fromkeys(runs):
        (run / "attempt-0").mkdir(parents=True)
        (run / "failure.json").write_text(
            json.dumps({"outcome": "failed", "run_exit_code": 137, "attempts": [attempt]})
        )
    waits = header(0, workers=2, pending=[pending(12, 1)], peer=1)
    stacks = {"MainThread": [("/lib/x/site-packages/keras/a.py", 1, "fit"), ("/home/me/train.py", 40, "main")]}
    write_events(runs[0] / "attempt-0" / "events-0.jsonl", waits, [exchanged(11, 3)], stacks)
    write_events(runs[1] / "attempt-0" / "events-1.jsonl", header(1, START, workers=2), [], {})
    (runs[1] / "attempt-0" / "worker-1.log").write_text("")


@pytest.mark.parametrize("has_worker_folders", [False, True])
def test_the_report_names_failure_positions_and_the_missing_worker(tmp_path, reported, has_worker_folders):
    killed_job(tmp_path, has_worker_folders)
    code, out = reported()
    assert code == 0
    for line in (
        f"run in {tmp_path}: failed, exit code 137\n",
        "attempt 0: 2 workers, 41 s, newest backup step-30, failed\n",
        "  first failure: worker 1 was killed by SIGKILL [",
        "worker 1 was missing from exchange 12 (group 7, 4096 bytes) in step 41: worker 0 waited 2.0 s\n",
        "worker 1 last took part in exchange 11 (group 7), in step 40: worker 0 had all parts 3.0 s before it wrote ",
        "worker 0: exchange of `fit`, in step 41, for 2.0 s; the process of worker 1 ended [",
        "    MainThread: train.py:40 in main\n",
        "worker 1: has left no events: it was killed (process 71 on host-a)\n",
    ):
        assert line in out, out
    assert "problem" not in out
    assert 'File "/home/me/train.py", line 40, in main' in reported("--stacks")[1]


def test_a_frozen_worker_is_described_by_its_times_and_by_what_its_peers_say(tmp_path, reported):
    killed_job(tmp_path)
    write_times(tmp_path, 0, 1, 0, 40, (BEGINNING, 0), exchange=2)
    failure = {"worker": 0, "host": "host-a", "time": 5.0, "kind": "exception", "exception": "UnavailableError"}
    message = "The following tasks are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1\nCrashed."
    attempt = {"number": 0, "workers": 2, "outcome": "failed", "failure": {**failure, "attempt": 0, "exit_code": 1}}
    again = {"number": 1, "workers": 2, "time": BEGUN, "outcome": "running"}
    (tmp_path / "failure.json").write_text(json.dumps({"outcome": "running", "attempts": [attempt]}))
    (tmp_path / "run.json").write_text(json.dumps({"outcome": "running", "attempts": [attempt, again]}))
    waits = header(0, EXCHANGE, workers=2, pending=[pending(12, 1)], message=message)
    write_events(tmp_path / "attempt-0" / "events-0.jsonl", waits, [exchanged(11, 3)], {})
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / "worker-0.log").write_text("")
    out = reported()[1]
    assert "it had no failure, was frozen, or was killed; its times end in step 41 [" in out
    assert "its exchange failed: worker 1 sent no more heartbeats. It is frozen, " in out and "Crashed" not in out
    assert "attempt 1: 1 worker, running\n  worker 0: has written no events yet; its log: " in out


def frozen(folder, step=40):
    """Writes the times of worker 1 of a killed job, with a sign of life 3 s after the begin of a step."""
    write_times(folder, 0, 1, 0, 40, (BEGINNING, 0), exchange=2)
    path = folder / "attempt-0/times-1.bin"
    other = folder / "other.bin"
    TimeRecordFile(other).write_sign(SignOfLife(BEGUN + 5, step, EXCHANGE))
    whole = path.read_bytes()
    path.write_bytes(whole + other.read_bytes()[len(whole) :])


def test_a_frozen_workers_last_sign_of_life_has_its_phase(tmp_path, reported):
    killed_job(tmp_path)
    frozen(tmp_path)
    moment = re.escape(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGUN + 5)))
    assert re.search(rf"it was killed; its last sign of life: exchange, in step 41 \[{moment}\]", reported()[1])
    frozen(tmp_path, step=39)  # It is of an earlier step, whose end came in the same second.
    assert re.search(rf"its last sign of life: step 41 \[{moment}\]", reported()[1])


@pytest.mark.parametrize(
    ("phase", "steps", "text"),
    [
        ("start-up", 0, "its times end in start-up ["),
        ("outside", 40, "its times end in the script outside of Keras' calls, after step 40 ["),
        ("tracing", 40, "its times end in tracing, in step 41 ["),
    ],
)
def test_a_worker_without_events_is_described_by_the_phase_of_its_times(tmp_path, reported, phase, steps, text):
    killed_job(tmp_path)
    write_times(tmp_path, 0, 1, 0, 40, (BEGINNING, 0))
    record = read_time_record(tmp_path / "attempt-0/times-1.bin")
    TimeRecordFile(tmp_path / "attempt-0/times-1.bin").write(dataclasses.replace(record, phase=phase, steps=steps))
    assert text in reported()[1]


def test_a_running_worker_without_a_sign_of_life_may_be_frozen(tmp_path, reported):
    own = {"pid": os.getpid(), "host": socket.gethostname(), "process_start": process_start(), "hears": True}
    write_events(tmp_path / "attempt-0" / "events-1.jsonl", header(1, START, workers=2) | own, [], {})
    frozen(tmp_path)
    out = reported()[1]
    assert re.search(
        r"exchange, in step 41, without a sign of life since 20\d\d-.*, so it may be frozen; `kill", out
    ), out


def test_a_loop_of_the_users_own_has_no_number_of_its_step(tmp_path, reported):
    killed_job(tmp_path)
    for worker, why in enumerate((EXCHANGE, START)):
        waits = [pending(12, 1)] if worker == 0 else []
        lost = header(worker, why, workers=2, pending=waits, phase=OWN_LOOP, peer=1) | {"step": 0, "call": None}
        write_events(tmp_path / f"attempt-0/events-{worker}.jsonl", lost, [exchanged(11, 3, step=0)], {})
    out = reported()[1]
    assert "worker 1 was missing from exchange 12 (group 7, 4096 bytes): worker 0 waited 2.0 s\n" in out, out
    assert "worker 1 last took part in exchange 11 (group 7): worker 0 had all parts 3.0 s before" in out, out
    assert "worker 0: a training loop of your own, for 2.0 s; its exchange failed" in out, out


@pytest.mark.parametrize("steps", [0, 40])
def test_the_input_of_a_loop_of_the_users_own_has_a_step_only_if_backups_tell_it(tmp_path, reported, steps):
    killed_job(tmp_path)
    write_times(tmp_path, 0, 1, 0, steps, (BEGINNING, 0))
    path = tmp_path / "attempt-0/times-1.bin"
    spent = {**dict.fromkeys(TIMED_PHASES, 0.0), OWN_LOOP: 3.0}
    reads = dataclasses.replace(read_time_record(path), phase="input", seconds=spent)
    TimeRecordFile(path).write(reads)
    assert f"its times end in input{', in step 41' if steps else ''} [" in reported()[1]


def test_the_report_names_workers_that_were_lost_and_started_again_alone(tmp_path, reported):
    absence = {"worker": 2, "host": "host-b", "time": BEGUN + 9, "reasons": ["worker 2 was killed by SIGKILL"]}
    absence |= {"starts": [BEGUN + 9], "has_joined": True, "missed_steps": 40}
    tries = {**absence, "worker": 1, "time": BEGUN + 5, "has_joined": False, "missed_steps": 1}
    tries |= {"reasons": ["worker 1 raised OSError: no route", *["worker 1 was killed by SIGKILL"] * 2], "starts": []}
    never = {**tries, "starts": [BEGUN + 6, BEGUN + 7]}
    for number in range(2):
        (tmp_path / f"attempt-{number}").mkdir()
    entries = [{"number": n, "time": BEGUN, "outcome": "done"} for n in range(2)]
    entries[0]["absences"], entries[1]["absences"] = [absence, tries], [never]
    (tmp_path / "run.json").write_text(json.dumps({"outcome": "done", "run_exit_code": 0, "attempts": entries}))
    out, page = reported()[1], page_of(read_run(tmp_path), BEGUN + 60)
    again = "started again alone once, has joined again; the weights lack 40 steps of it"
    failed = "failed 2 times while it started, has not joined again; the weights lack 1 step of it"
    place = out.index(f"  worker 1 raised OSError: no route; not started again, {failed} [")
    assert (
        place
        < out.index(f"  worker 2 was killed by SIGKILL; {again} [")
        < out.index(f"; started again alone 2 times, {failed} [")
    )
    assert again in page and failed in page and "No failure is recorded" not in page


@pytest.mark.parametrize("stale", ["run.json", "failure.json"])
@pytest.mark.parametrize("is_other_run", [True, False])
def test_an_old_summary_does_not_hide_a_newer_one(tmp_path, reported, stale, is_other_run):
    """A full disk may keep a file as it was: `run.json` of a job that goes on, or the files of an earlier job."""
    killed_job(tmp_path)
    failed = json.loads((tmp_path / "failure.json").read_text())
    failed["attempts"][0]["time"] = BEGUN
    running = {"number": 0, "workers": 2, "time": BEGUN - 99 * is_other_run, "outcome": "running"}
    old = {"outcome": "running", "run_exit_code": None, "attempts": [running]}
    (tmp_path / stale).write_text(json.dumps(old))
    newer = "failure.json" if stale == "run.json" else "run.json"
    (tmp_path / newer).write_text(json.dumps(failed))
    out = reported()[1]
    assert f"run in {tmp_path}: failed, exit code 137\n" in out and "41 s, newest backup step-30, failed\n" in out, out
    assert "first failure: worker 1 was killed by SIGKILL" in out and "running" not in out, out


def test_a_run_without_a_supervisors_summary_is_described_by_the_reports_of_its_workers(tmp_path, reported):
    killed_job(tmp_path)
    (tmp_path / "failure.json").unlink()
    report = {
        "worker": 0,
        "host": "host-a",
        "time": 5.0,
        "kind": "exception",
        "exception": "KeyError",
        "message": "'x'",
    }
    (tmp_path / "attempt-0" / "failure-0.json").write_text(json.dumps(report))
    out = reported()[1]
    assert "no failure.json" in out and "first failure: worker 0 raised KeyError: 'x'" in out


def test_a_worker_that_was_asked_has_a_position(tmp_path, reported):
    write_events(tmp_path / "attempt-0" / "events-0.jsonl", header(0, ASKED, phase="input", workers=1), [], {})
    out = reported()[1]
    assert "worker 0: input of `fit`, in step 41" in out and "written on request (SIGUSR2)" in out


@pytest.mark.parametrize("seconds", [2, 9])
def test_workers_of_a_healthy_job_wait_only_shortly(tmp_path, reported, seconds):
    folder = tmp_path / "attempt-0"
    waits = header(0, ASKED, workers=4, pending=[pending(12, 1, 3, seconds=seconds)])
    write_events(folder / "events-0.jsonl", waits, [], {})
    out = reported()[1]
    assert ("worker 1, worker 3 were missing from exchange 12" in out) == (seconds > 5), out
    assert "did not take part" not in out and "last took part" not in out


def test_a_healthy_worker_needs_no_line_and_a_stall_names_its_suspect(tmp_path, reported):
    attempts = [{"number": number, "outcome": outcome} for number, outcome in enumerate(("failed", "done"))]
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "failure.json").write_text(json.dumps({"outcome": "done", "run_exit_code": 0, "attempts": attempts}))
    write_events(tmp_path / "attempt-0" / "events-0.jsonl", header(0, "stall", workers=2, suspect=1), [], {})
    write_events(tmp_path / "attempt-1" / "events-0.jsonl", header(0, START, workers=2), [], {})
    before, after = reported()[1].split("attempt 1")
    assert "the watchdog ended it, with worker 1 as the probable cause" in before and "worker 1: has left no" in before
    assert after == ": 2 workers, done\n"


@pytest.mark.parametrize("hears", [True, False, None])
@pytest.mark.parametrize("is_own", [True, False])
def test_only_a_worker_that_hears_the_signal_is_to_get_it(tmp_path, reported, hears, is_own):
    began = process_start() if is_own else process_start() - 1
    own = {"pid": os.getpid(), "host": socket.gethostname(), "process_start": began, "hears": hears}
    write_events(tmp_path / "attempt-0" / "events-0.jsonl", header(0, START, workers=1) | own, [], {})
    out = reported()[1]
    assert (f"`kill -USR2 {os.getpid()}`" in out) == (hears is True and is_own), out
    assert ("it cannot be asked" in out) == (hears is not True and is_own), out


def test_a_running_worker_that_does_one_step_for_long_is_told_and_the_time_is_that_until_now(
    tmp_path, reported, monkeypatch
):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    start = now - 60
    own = {"pid": os.getpid(), "host": socket.gethostname(), "process_start": process_start(), "hears": True}
    write_events(tmp_path / "attempt-0" / "events-0.jsonl", header(0, START, workers=1) | own, [], {})
    write_times(tmp_path, 0, 0, start - BEGUN, 40, (BEGINNING, 0), compute=20)
    running = {"number": 0, "workers": 1, "time": start, "outcome": "running"}
    (tmp_path / "run.json").write_text(json.dumps({"outcome": "running", "attempts": [running]}))
    out = reported()[1]
    assert re.search(r"runs as process \d+ on .*, for 40 s in step 41; `kill -USR2", out), out
    assert re.search(r"goodput 33.3%: .* in 60 s\n", out), out
    assert re.search(r"a step or callback that has not ended yet +40 s", out), out


def test_events_from_before_the_failure_tell_nothing_of_it(tmp_path, reported):
    killed_job(tmp_path)
    earlier = header(1, ASKED, workers=2, pending=[pending(10, 0)]) | {"time": 1_764_183_999.0}
    write_events(tmp_path / "attempt-0" / "events-1.jsonl", earlier, [], {})
    out = reported()[1]
    assert "worker 0 was missing" not in out and "worker 1 was missing from exchange 12" in out, out
    assert "worker 1 last took part in exchange 11" in out and "written on request (SIGUSR2)" in out, out


def test_other_files_among_the_attempts_are_passed_over(tmp_path, reported):
    killed_job(tmp_path)
    (tmp_path / "attempt-007").mkdir()
    (tmp_path / "attempt-1").write_text("")
    code, out = reported()
    assert code == 0 and "attempt 0: " in out and "attempt 1" not in out and "attempt 7" not in out


@pytest.mark.parametrize("workers", [10**9, -1, True])
def test_a_wrong_number_of_workers_makes_no_lines(tmp_path, reported, workers):
    write_events(tmp_path / "attempt-0" / "events-0.jsonl", header(0, ASKED, workers=workers), [], {})
    out = reported()[1]
    assert len(out.splitlines()) < 9 and "attempt 0: 1 worker" in out, out


def run_of_hosts(folder, begin, workers):
    """Makes the folders of the workers of a run of several hosts, which start one second apart."""
    for worker in range(workers):
        attempt = folder / f"worker-{worker}" / "attempt-0"
        attempt.mkdir(parents=True, exist_ok=True)
        entry = {"number": 0, "workers": 1, "time": begin + worker, "seconds": 60.0, "outcome": "done"}
        (attempt.parent / "run.json").write_text(json.dumps({"outcome": "done", "attempts": [entry]}))
        write_events(attempt / f"events-{worker}.jsonl", header(worker, START, workers=workers), [], {})


def test_workers_of_an_earlier_and_larger_run_are_left_out_and_named(tmp_path, reported):
    run_of_hosts(tmp_path, BEGUN, 4)
    assert "attempt 0: 4 workers" in (out := reported()[1]) and "problem" not in out
    run_of_hosts(tmp_path, BEGUN + 90, 2)
    out = reported()[1]
    assert "attempt 0: 2 workers" in out and "worker 2" not in out and "worker 3" not in out, out
    folders = ", ".join(f"{tmp_path}/worker-{worker}/attempt-*" for worker in (2, 3))
    assert f"problem: files of an earlier run are left out: {folders}\n" in out


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        # Worker, begin, end, workers of the job.
        pytest.param([(0, 9000, 9100, None), (1, 8990, 8992, 2)], [], id="failed before a late host began"),
        pytest.param([(0, 9000, 9100, 2), (1, 100, None, 2)], [], id="unknown end"),
        pytest.param([(0, 9000, 9100, 2), (2, None, 200, 4)], [], id="unknown begin"),
        pytest.param([(0, 100, 9999, 3), (1, 9000, 9999, 3), (2, 100, 200, 3)], [], id="lost worker"),
        pytest.param([(0, 100, 200, 2), (2, 9000, 9999, 4)], [], id="worker 0 of the earlier run"),
        pytest.param([(1, 9000, 9100, 2), (2, 100, 200, 3)], [], id="no folder of worker 0"),
        pytest.param([(0, 9000, 9100, 2), (1, 100, 200, 2)], [1], id="missing host"),
        pytest.param([(0, 9000, 9100, 2), (2, 8990, None, 3)], [2], id="fewer workers"),
        pytest.param([(None, 9000, 9100, 2), (0, 8990, 9050, 2)], [0], id="hosts before one supervisor"),
        pytest.param([(None, 100, 8990, 2), (0, 9000, 9050, 2)], [None], id="one supervisor before hosts"),
    ],
)
def test_only_folders_that_are_certainly_of_an_earlier_run_are_left_out(folders, expected):
    assert earlier_runs({folder[0]: FolderSpan(*folder) for folder in folders}) == expected


@pytest.mark.parametrize("make", [lambda path: None, lambda path: (path / "other.txt").write_text("x")])
def test_another_folder_is_refused(tmp_path, make, capsys, caplog):
    make(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 1
    assert cli.main(["report", str(tmp_path / "none")]) == 1
    assert "RUN_DIR must be the folder of a run" in caplog.text and "does not exist" in caplog.text
    assert capsys.readouterr().out == ""


def test_damaged_files_are_named_and_never_end_the_report(tmp_path, reported):
    killed_job(tmp_path)
    names = ["failure.json", "attempt-0/events-0.jsonl", "attempt-0/events-1.jsonl"]
    whole = {name: (tmp_path / name).read_text() for name in names}
    draw = random.Random(1)
    for _ in range(100):
        name = draw.choice(names)
        text = whole[name]
        place = draw.randrange(len(text))
        damage = [text[:place], text[:place] + draw.choice('"{}[]0ax,:') + text[place + 1 :], "null", "[1]", ""]
        words = [word for word in ("40", "fit", "7", "12", "false", "null") if word in text]
        damage += [text.replace(draw.choice(words), draw.choice(['"x"', "[]", "{}", "null", "-1"]))]
        (tmp_path / name).write_text(draw.choice(damage))
        code, out = reported()
        assert code == 0 and "attempt 0" in out
        (tmp_path / name).write_text(whole[name])
    (tmp_path / "failure.json").write_text("{")
    (tmp_path / names[1]).write_text("x")
    (tmp_path / names[2]).unlink()
    out = reported()[1]
    assert f"problem: {tmp_path}/failure.json is damaged: it is no JSON object\n" in out
    assert f"problem: {tmp_path / names[1]} is damaged: it is no file of events" in out
    assert f"worker 1: has left no events; its log: {tmp_path}/attempt-0/worker-1.log\n" in out
