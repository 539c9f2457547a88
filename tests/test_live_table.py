"""The live table of `tfdist run`: its rows by the times of workers, and the screen by the bytes that are written."""

import dataclasses
import os
import random
import re
import subprocess
import sys

import pytest

from emulated_terminal import EmulatedTerminal
from tfdist.events.phase_names import OWN_LOOP
from tfdist.events.straggler_file import StragglerRecord
from tfdist.events.time_record import (
    CALLBACK,
    COMPUTE,
    EXCHANGE,
    INPUT,
    START,
    TIMED_PHASES,
    TRACING,
    UNDECIDED,
    VALIDATION,
    SignOfLife,
    TimeRecord,
)
from tfdist.launch.ansi_text import as_line, begun_sequence, crop, moves_cursor, width_of
from tfdist.launch.live_figures import (
    DONE,
    SeenWorker,
    WorkerRow,
    chosen_rows,
    progress_line,
    rest_line,
    row_of,
    slow_workers,
)
from tfdist.launch.live_region import LiveRegion
from tfdist.launch.live_screen import LiveScreen
from tfdist.launch.live_table import LiveTable
from tfdist.launch.recent_steps import RecentSteps
from tfdist.launch.run_terminal import can_draw_table


def record(time, steps=0, phase=COMPUTE, **seconds):
    return TimeRecord(0.0, time, phase, steps, UNDECIDED, 0, {**dict.fromkeys(TIMED_PHASES, 0.0), **seconds})


def recent_of(records):
    steps = RecentSteps()
    for each in records:
        steps.add(each)
    return steps.recent


def trained(seconds, rate=4, exchange=0.25):
    """Returns the records of a worker that is looked at every second."""
    return [
        record(second, rate * second, compute=(1 - exchange) * second, exchange=exchange * second)
        for second in range(seconds)
    ]


def test_rate_and_parts_are_those_of_the_last_seconds():
    slow = trained(30, rate=1, exchange=0.75)
    fast = [
        record(30 + second, 30 + 10 * second, compute=7.5 + 0.5 * second, exchange=22.5 + 0.5 * second)
        for second in range(30)
    ]
    assert recent_of(slow).steps_per_second == pytest.approx(1)
    recent = recent_of(slow + fast)
    assert recent.steps_per_second == pytest.approx(10)
    assert recent.parts == pytest.approx({COMPUTE: 0.5, EXCHANGE: 0.5, INPUT: 0})


def test_the_parts_of_a_loop_of_the_users_own_are_not_known():
    recent = recent_of([record(second, 4 * second, **{OWN_LOOP: second, INPUT: second / 4}) for second in range(9)])
    assert recent.steps_per_second == pytest.approx(3.2) and recent.parts == {}


def test_tracing_belongs_to_no_rate():
    traced = [record(20, 0, TRACING, tracing=20.0), record(60, 1, tracing=60.0)]
    assert recent_of(traced).steps_per_second is None
    assert recent_of([*traced, record(61, 11, tracing=60.0, compute=1.0)]).steps_per_second == pytest.approx(10)


def test_a_step_longer_than_the_window_has_a_rate():
    assert recent_of([record(60 * n, n, compute=60.0 * n) for n in range(4)]).steps_per_second == pytest.approx(1 / 60)


def test_a_fit_that_continues_at_an_earlier_step_begins_anew():
    again = [record(31, 5, compute=30.0), record(32, 6, compute=31.0)]
    assert recent_of([*trained(30), *again]).steps_per_second == pytest.approx(1)


def signed(record, time, phase, step=8):
    return dataclasses.replace(record, sign=SignOfLife(time, step, phase))


STATES = {
    "no times": (SeenWorker(0), 50, "running", None),
    "start": (SeenWorker(0, record(1, phase=START)), 2, "start-up", 0),
    "long start": (SeenWorker(0, record(1, phase=START)), 41, "start-up 40 s", 0),
    "training": (SeenWorker(0, record(49.5, 8)), 50, "training", 8),
    "callback between steps": (SeenWorker(0, record(49, 8, CALLBACK)), 50, "training", 8),
    "callback of an epoch": (SeenWorker(0, record(45, 8, CALLBACK)), 50, "callback 5 s", 8),
    "first step": (SeenWorker(0, record(45)), 50, "training", 0),
    "stuck": (SeenWorker(0, record(5, 8)), 50, "in a step 45 s", 8),
    "stuck in its input": (SeenWorker(0, signed(record(5, 8), 49, INPUT)), 50, "input 45 s", 8),
    "waits in a step": (SeenWorker(0, signed(record(5, 8), 49, EXCHANGE)), 50, "exchange 45 s", 8),
    "a sign of an earlier step": (SeenWorker(0, signed(record(5, 8), 49, INPUT, step=7)), 50, "in a step 45 s", 8),
    "frozen": (SeenWorker(0, signed(record(30, 8), 38, COMPUTE)), 50, "no sign of life 12 s", 8),
    "frozen in a validation": (
        SeenWorker(0, signed(record(5, 8, VALIDATION), 9, None)),
        500,
        "no sign of life 8 min",
        8,
    ),
    "trains on without new signs": (SeenWorker(0, signed(record(49, 8), 20, COMPUTE)), 50, "training", 8),
    "validation": (SeenWorker(0, record(45, 8, VALIDATION)), 500, "validation 8 min", 8),
    "own loop": (SeenWorker(0, record(49.5, 0, OWN_LOOP)), 50, "training", None),
    "own loop in a graph": (SeenWorker(0, record(5, 0, OWN_LOOP)), 50, "own loop 45 s", None),
    "own loop with backups": (SeenWorker(0, record(49.5, 8, OWN_LOOP)), 50, "training", 8),
    "input of an own loop": (SeenWorker(0, record(49.5, 0, INPUT, **{OWN_LOOP: 3.0})), 50, "training", None),
    "own loop without a batch": (SeenWorker(0, record(5, 0, INPUT, **{OWN_LOOP: 3.0})), 50, "input 45 s", None),
    "straggler": (SeenWorker(0, record(49.5, 8), slow="input"), 50, "slow: input", 8),
    "killed": (SeenWorker(0, record(49.5, 8), ended="SIGKILL", slow="input"), 50, "SIGKILL", 8),
    "done": (SeenWorker(0, record(49.5, 8), ended=DONE), 50, "done", 8),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_says_what_a_worker_does(name):
    seen, now, state, step = STATES[name]
    row = row_of(seen, now)
    assert (row.state, row.step) == (state, step)
    assert row.kind == re.sub(r" \d+ (s|min|h)$", "", state)
    assert row.is_calm == (state in ("training", "done", "own loop 45 s")) and row.has_failed == (state == "SIGKILL")


def test_a_worker_without_a_sign_of_life_is_named_before_those_that_wait_for_it():
    frozen, waiting = signed(record(30, 8), 38, COMPUTE), signed(record(30, 8), 49, EXCHANGE)
    rows = [row_of(SeenWorker(worker, frozen if worker == 2 else waiting), 50) for worker in range(4)]
    assert progress_line(rows) == "step 8, worker 2: no sign of life 12 s, 4 workers"
    assert chosen_rows(rows, 1) == [rows[2]] and rows[2].holds_up_others and not rows[1].holds_up_others
    for width, shown in ((60, "no sign 12 s "), (80, "no sign 12 s "), (94, "no sign of life 12 s")):
        assert shown in "".join(LiveTable().lines("", rows, width, 24)), width
    input_ = [row_of(SeenWorker(0, waiting), 50), row_of(SeenWorker(1, signed(record(30, 8), 49, INPUT)), 50)]
    assert progress_line(input_) == "step 8, worker 1: input 20 s, 2 workers"


def test_a_slow_step_is_no_stuck_step():
    recent = recent_of([record(60 * n, n, compute=60.0 * n) for n in range(4)])
    assert row_of(SeenWorker(0, record(180, 3), recent), 240).state == "training"
    assert row_of(SeenWorker(0, record(180, 3), recent), 400).state == "in a step 4 min"


def verdict(worker, cause, *, is_over=False):
    return StragglerRecord(0.0, 9, 5, is_over, cause, worker, "a", None, 2.0, "", "")


def test_a_worker_is_slow_until_a_verdict_ends_that():
    assert slow_workers([verdict(1, "input"), verdict(2, "computation")]) == {1: "input", 2: "compute"}
    assert slow_workers([verdict(1, "input"), verdict(1, "link"), verdict(1, "input", is_over=True)]) == {1: "link"}
    assert slow_workers([verdict(1, "callback")]) == {1: "callback"}


def row(worker, kind="training", duration="", step=100, exchange=0.5, urgency=3, rate=3.14):
    parts = {COMPUTE: 1 - exchange, EXCHANGE: exchange, INPUT: 0.0}
    return WorkerRow(worker, f"{kind} {duration}".strip(), kind, step, rate, parts, 1 << 30, urgency)


def test_without_room_for_all_the_workers_that_need_a_look_are_shown():
    rows = [row(worker) for worker in range(20)]
    rows[7], rows[11], rows[13] = row(7, "SIGKILL", urgency=0), row(11, "slow: input", urgency=1), row(13, exchange=0.1)
    assert chosen_rows(rows, 20) == rows
    assert [each.worker for each in chosen_rows(rows, 4)] == [0, 7, 11, 13]
    assert rest_line(rows, chosen_rows(rows, 4)) == "and 16 more, training at step 100"
    assert rest_line(rows, rows) is None
    for kind, duration in (("own loop", "45 s"), ("slow: input", ""), ("in a step", "2 min")):
        assert rest_line([row(worker, kind, duration) for worker in range(3)], []) == f"and 3 more, {kind} at step 100"
    assert rest_line([row(worker, step=None) for worker in range(3)], []) == "and 3 more, training"
    assert rest_line([row(0, "slow: input"), row(1, "slow: link")], []) == "and 2 more at step 100"
    own_loops = [row(0, "own loop", "45 s"), row(1, "own loop", "2 min")]
    assert rest_line(own_loops, []) == "and 2 more, own loop at step 100"


def test_the_line_for_a_log_has_the_step_and_the_rate_or_what_the_last_worker_does():
    rows = [row(0, step=1201), row(1, step=1200)]
    assert progress_line(rows) == "step 1200, 3.14 steps/s, 2 workers"
    late = row(1, "start-up", "40 s", step=0, urgency=2, rate=None)
    assert progress_line([rows[0], late]) == "step 0, worker 1: start-up 40 s, 2 workers"
    stuck = [row(worker, "in a step", "70 s", urgency=2, rate=None) for worker in range(2)]
    assert progress_line(stuck) == "step 100, in a step 70 s, 2 workers"
    assert progress_line([row(0, "running", step=None)]) is None
    own_loops = [row(worker, "own loop", "45 s", step=None) for worker in range(2)]
    assert progress_line(own_loops) == "own loop 45 s, 2 workers"


LOOPS = {
    "its script": [("training", 3), ("script 40 s", 2)],
    "its end": [("training", 3), ("SIGKILL", 0)],
    "no batch": [("training", 3), ("own loop 45 s", 3)],
    "a later end": [("done", 3), ("training", 3)],
    "no times yet": [("running", 2), ("training", 3)],
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_line_for_a_log_names_the_worker_of_an_own_loop_that_needs_a_look(name):
    states = LOOPS[name]
    rows = [row(worker, state, step=None, urgency=urgency) for worker, (state, urgency) in enumerate(states)]
    assert progress_line(rows) == f"worker 1: {states[1][0]}, 2 workers"
    assert progress_line(rows[1:]) == f"{states[1][0]}, 1 worker"


@pytest.mark.parametrize("width", [32, 40, 45, 46, 60, 80, 200])
@pytest.mark.parametrize("workers", [1, 4, 100])
def test_the_table_fits_the_terminal(width, workers):
    rows = [row(worker, step=1_000_000) for worker in range(workers)]
    lines = LiveTable().lines(f"{workers} workers, 3 min 5 s, newest backup step-1200", rows, width, 24)
    assert len(lines) <= 12 and all(width_of(line) < width for line in lines)
    shown = "\n".join(as_line(line.encode()) for line in lines)
    assert "training" in shown and "1000000" in shown
    assert ("3.14" in shown, "50%" in shown) == (width >= 40, width >= 77)
    assert ("and 91 more, training at step 1000000"[: width - 1] in shown) == (workers == 100)


def test_a_tiny_terminal_has_no_table():
    assert LiveTable().lines("", [row(0)], 31, 24) == LiveTable().lines("", [row(0)], 80, 9) == []


def test_colors_are_left_out_on_request(monkeypatch):
    killed = [row(0, "SIGKILL", urgency=0)]
    assert "\x1b[" in "".join(LiveTable().lines("", killed, 80, 24))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in "".join(LiveTable().lines("", killed, 80, 24))


@pytest.mark.parametrize(
    ("environ", "is_terminal", "can"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm", "CI": "false"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "CI": "true"}, True, False),
    ],
)
def test_plain_lines_where_no_table_can_be_drawn(environ, is_terminal, can):
    assert can_draw_table(environ, is_terminal=is_terminal) == can


BAR = "\x1b[1m 3/10\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m loss: 1"


def test_a_line_is_cut_at_the_width_of_the_terminal():
    assert [width_of(crop(BAR, width)) for width in range(20)] == [min(width, 18) for width in range(20)]
    assert crop(BAR, 80) == BAR + "\x1b[0m" and crop("plain", 3) == "pla" and width_of(crop("日本", 3)) == 2
    assert as_line(b"a\tb\x07\x1b[2Kc\x1b]0;title\x07d\x1b[1m") == "a       bcd\x1b[1m"


MOVES = {
    "up": (b"a\x1b[1Ab", True),
    "clear": (b"\x1b[2J", True),
    "saved": (b"\x1b7", True),
    "color": (b"\x1b[1;32ma\x1b[0m", False),
    "erased line": (b"\r\x1b[Ka\x1b[2K", False),
    "hidden": (b"\x1b[?25la\x1b[?25h", False),
    "title": (b"\x1b]0;a\x1b\\", False),
    "link": (b"\x1b]8;;http://a\x07a\x1b]8;;\x07", False),
}


@pytest.mark.parametrize("name", MOVES)
def test_output_that_leaves_its_line_is_noticed(name):
    output, moves = MOVES[name]
    assert moves_cursor(output) == moves
    begin = output.index(b"\x1b")
    for end in range(begin + 1, output.index(b"a", begin) if b"a" in output[begin:] else len(output)):
        if not moves_cursor(output[:end]) and name in ("up", "clear", "color"):
            assert begun_sequence(output[:end]) == end - begin


def drawn(width=40, height=12):
    terminal = EmulatedTerminal(width, height)

    def put(data):
        terminal.feed(data.decode().replace("\n", "\r\n"))  # As the kernel does.

    return terminal, LiveScreen(put, lambda: (terminal.width, terminal.height))


@pytest.mark.parametrize("seed", range(10))
def test_output_scrolls_above_the_table_and_the_bar_is_below_it(seed):
    """Whatever is drawn when, nothing of an earlier table remains and no complete line is lost."""
    numbers = random.Random(seed)
    terminal, screen = drawn()
    stream, errors = screen.stream(), screen.stream()
    lines = []
    for step in range(100):
        act = numbers.randrange(5)
        if act == 0:
            lines.append(f"line {step} {'x' * numbers.randrange(60)}")
            numbers.choice([stream, errors]).write_now(f"\r{lines[-1]}\n".encode())
        elif act == 1:
            stream.write_now(f"\r{step} % {'#' * numbers.randrange(60)}".encode())
        elif act == 2:
            screen.refresh([f"row {n} {step}" for n in range(numbers.randrange(6))])
        elif act == 3:
            errors.write_now(b"\rloading " + b"." * step)
        else:
            stream.write_now(b"\b" * 90 + b"\r" + BAR.encode())
    screen.refresh(["the table"])
    stream.write_now(b"\r99 %")
    errors.write_now(b"\rdone\n")
    assert terminal.screen[-2:] == ["the table", "99 %"]
    stream.end()
    screen.refresh(())
    wrapped = [part for line in [*lines, "done", "99 %"] for part in pieces(line, terminal.width)]
    assert terminal.text == [*wrapped, ""]


def pieces(line, width):
    return [line[place : place + width].rstrip() for place in range(0, len(line), width)]


def test_the_name_of_an_epoch_stays_beside_its_bar():
    terminal, screen = drawn()
    stream = screen.stream()
    screen.refresh(["the table"])
    stream.write_now(b"before\nEpoch 1/3\n")
    assert terminal.screen == ["before", "the table", "Epoch 1/3"]
    stream.write_now(BAR.encode())
    assert terminal.screen == ["before", "the table", "Epoch 1/3", " 3/10 ━━━━ loss: 1"]
    stream.write_now(b"\r10/10\nEpoch 2/3\n")
    assert terminal.screen == ["before", "Epoch 1/3", "10/10", "the table", "Epoch 2/3"]


def test_a_narrower_terminal_leaves_no_part_of_the_table():
    terminal, screen = drawn(40)
    screen.stream().write_now(b"output\n")
    screen.refresh([f"row {n} " + "x" * 30 for n in range(3)])
    terminal.resize(20)
    screen.refresh(["small", "table"])
    assert terminal.screen == ["output", "small", "table"]


def test_a_script_that_draws_itself_has_the_screen(monkeypatch):
    terminal, screen = drawn()
    stream, messages = screen.stream(), screen.stream()
    screen.refresh(["the table"])
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream.write_now(b"outer 1 %\ninner 1 %\x1b[1A\router 2 %")
    screen.refresh(["the table"])
    assert terminal.screen == ["outer 2 %", "inner 1 %"]
    now += 10
    screen.refresh(["the table"])  # The cursor is still within a line of the script.
    assert terminal.screen == ["outer 2 %", "inner 1 %"]
    stream.write_now(b"\n\n")
    messages.write_now(b"tfdist: a message\n")
    screen.refresh(["the table"])
    assert terminal.screen == ["outer 2 %", "inner 1 %", "tfdist: a message", "the table"]


def test_an_unchanged_screen_is_not_written_again():
    written = []
    region = LiveRegion(written.append)
    for _ in range(3):
        region.draw(["a", "b"], width=80)
    assert len(written) == 1
    region.draw(["a", "c"], width=80)
    assert written[1] == b"\rc\x1b[K\x1b[J"


def test_a_shell_keeps_its_lines_after_a_stop():
    terminal, screen = drawn()
    screen.refresh(["row 1", "row 2"])
    terminal.feed("\r\n$ fg\r\n")
    screen.was_left()
    screen.refresh(["row 1", "row 3"])
    assert terminal.screen == ["row 1", "row 2", "$ fg", "row 1", "row 3"]


@pytest.mark.slow
def test_the_table_needs_no_tensorflow():
    code = "import sys, tfdist.launch.live_terminal; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=300).returncode == 0
