"""`tfdist run` on a terminal: the live table of real runs, what stays on the screen, and `--quiet`."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading

import pytest

from emulated_terminal import EmulatedTerminal
from launched import ARRIVE, DEADLINE_SECONDS, eventually, nothing_left
from tfdist.launch import run_terminal
from tfdist.launch.live_figures import WorkerRow

TRAIN = """
import keras
import numpy as np
import tfdist

class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
        {then}

strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rng = np.random.default_rng(0)
model.fit(rng.normal(size=(1920, 8)), rng.integers(0, 3, 1920), batch_size=32, epochs=2, callbacks=[Pause()])
print("trained")
"""


@pytest.fixture
def run(tmp_path):
    with nothing_left(tmp_path) as run:
        yield run


class OnTerminal:
    """A run whose standard output and error are an emulated terminal, which controls it."""

    def __init__(self, run, *arguments, width=200, height=30, env=(), **options):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))
        self.settings = termios.tcgetattr(self._ours)
        self.terminal, self.output, self.screens = EmulatedTerminal(width, height), "", []

        def own_session():
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        env = {"TERM": "xterm-256color", "CI": "", **dict(env)}
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": own_session}
        self.process = run.start(*arguments, env=env, **{**streams, **options})
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with contextlib.suppress(OSError):  # A terminal ends with an error.
            while chunk := os.read(self._ours, 65536):
                text = decoder.decode(chunk)
                self.output += text
                self.terminal.feed(text)
                self.screens.append(self.terminal.screen)

    def type(self, keys):
        os.write(self._ours, keys)

    def finish(self):
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        assert termios.tcgetattr(self._ours) == self.settings
        assert "\x1b[?25l" not in self.output  # A process that is killed could not show the cursor again.
        os.close(self._ours)
        return code


def table_of(screen):
    """Returns the state and the step of each worker on a screen, and the lines above and below the table."""
    rows = [number for number, line in enumerate(screen) if re.match(r" +\d+  [a-zS]", line)]
    if not rows:
        return {}, screen, []
    found = [re.match(r" +(\d+)  (.{20})  ([ \d]{7})", screen[number].ljust(80)) for number in rows]
    table = {int(each[1]): (each[2].strip(), int(each[3].strip() or 0)) for each in found if each}
    return table, screen[: rows[0]], screen[rows[-1] + 1 :]


def has_bar(below):
    return bool(below and re.search(r"\d/60 .*step", below[-1]))


def shows_step(screen, step):
    """Returns whether a screen has the progress bar, and both workers in this step."""
    table, _, below = table_of(screen)
    return has_bar(below) and all(table.get(worker, ("", 0))[1] >= step - 1 for worker in range(2))


def test_the_table_grows_above_the_progress_bar_and_is_gone_at_the_end(run):
    holds = (10, 25, 40, 55)  # Workers wait after these steps until the screen shows them.
    then = f"""
        step = int(self.model.optimizer.iterations)
        deadline = time.monotonic() + 100
        while step in {holds} and not (here / f"seen-{{step}}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
"""
    on = OnTerminal(run, "--workers", 2, run.script(TRAIN.format(then=then.strip())), width=500)
    for step in holds:
        assert eventually(lambda step=step: shows_step(on.terminal.screen, step)), on.output
        (run.directory / f"seen-{step}").touch()
    assert on.finish() == 0, on.output
    tables = [table_of(screen) for screen in on.screens]
    for worker in range(2):
        steps = [table[worker][1] for table, _, _ in tables if table.get(worker, ("", 0))[1]]
        assert steps == sorted(steps) and len(set(steps)) > 3 and steps[-1] > 50, on.output
    bars = [below for table, _, below in tables if table and has_bar(below)]
    assert bars and all("2 workers" in below[0] and below[1].startswith("Epoch ") for below in bars), bars
    last = on.terminal.text
    assert not any(table_of([line])[0] or line.startswith("worker") for line in last), last
    # On a busy machine, a worker starts so late that the other one prints that it waits.
    shown = [line for line in last if line and " workers have joined; waiting " not in line]
    assert re.fullmatch(r"tfdist: 2 workers on this machine; logs in .*", shown[0]), shown
    epochs = ["Epoch 1/2", "60/60 \u2501\u2501\u2501", "Epoch 2/2", "60/60 \u2501\u2501\u2501"]
    assert [line[:9] for line in shown[1:]] == [*epochs, "trained", "tfdist: d"]


def test_the_first_failure_is_shown_once(run):
    then = "worker == 1 and self.model.optimizer.iterations > 20 and os.kill(os.getpid(), signal.SIGKILL)"
    # The last line has the folder of the run, whose path may be long.
    on = OnTerminal(run, "--workers", 2, run.script(TRAIN.format(then=then)), width=500)
    assert on.finish() == 137
    text = "\n".join(on.terminal.text)
    assert text.count("was killed by SIGKILL") == text.count("worker 1 was killed by SIGKILL") == 1, text
    assert not re.search("Traceback|Error|abort", text), text


QUIET = {
    "success": ("print('output', file=sys.stderr)", 0, r"tfdist: done in .*\n"),
    "killed": (
        "print('output'); worker and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)",
        137,
        r"tfdist: worker 1, from .*:\noutput\ntfdist: failed after .*; worker 1 was killed by SIGKILL\n",
    ),
    "exception": (
        "print('output')\nif worker == 0: raise ValueError('on purpose')\ntime.sleep(60)",
        1,
        r"tfdist: worker 0, from .*:\nTraceback [^\0]*ValueError: on purpose\ntfdist: failed after .*on purpose.*\n",
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_quiet_run_prints_the_first_failure_and_the_outcome(run, name):
    body, expected, printed = QUIET[name]
    code, out, err = run.finish("--workers", 2, "--quiet", run.script("import tfdist\n" + body))
    assert (code, out) == (expected, "") and re.fullmatch(printed, err), err


def test_redirected_output_has_no_escape_sequences(run):
    script = run.script("print('output'); print('error', file=sys.stderr); time.sleep(1)")
    code, out, err = run.finish("--workers", 2, script, env={"TERM": "xterm-256color"})
    assert (code, out) == (0, "output\n") and "\x1b" not in err and len(err.splitlines()) == 3, err


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"CI": "true"}], ids=["dumb", "ci"])
def test_a_terminal_without_a_table_gets_plain_lines(run, environ):
    on = OnTerminal(run, "--workers", 2, run.script("print('output'); time.sleep(1)"), env=environ)
    assert on.finish() == 0 and "\x1b" not in on.output and "output\r\n" in on.output


SLEEP = "signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + ARRIVE + "print('50 %', end='', flush=True)\ntime.sleep(600)"


def all_run(run, on):
    """Returns whether soon all workers handle signals, and the table and the output of worker 0 are on the screen."""
    run.wait_for_pids(2)
    return eventually(lambda: all(any(text in line for line in on.terminal.screen) for text in ("running", "50 %")))


def test_ctrl_c_ends_the_run_and_removes_the_table(run):
    on = OnTerminal(run, "--workers", 2, run.script(SLEEP))
    assert all_run(run, on), on.output
    on.type(b"\x03")
    assert on.finish() == 130
    text = [line for line in on.terminal.text if line]
    assert [line[:15] for line in text] == ["tfdist: 2 worke", "tfdist: SIGINT:", "50 %", "tfdist: stopped"], text


def test_a_killed_supervisor_leaves_a_terminal_that_works(run):
    on = OnTerminal(run, "--workers", 2, run.script(SLEEP))
    assert all_run(run, on), on.output
    on.process.send_signal(signal.SIGKILL)
    assert on.finish() == -signal.SIGKILL and run.gone()


def test_a_minute_without_output_gets_a_line_about_the_progress(monkeypatch):
    monkeypatch.setattr(run_terminal, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_terminal, "_SILENCE_SECONDS", 0.5)

    class Watch:
        def rows(self):
            return [WorkerRow(0, "training", "training", 1200, 3.14, {}, None, 3)]

    terminal = run_terminal.RunTerminal()
    target = terminal.target(None)
    told = []
    monkeypatch.setattr(run_terminal.logging, "info", lambda text, *arguments: told.append(text % arguments))
    with terminal.watching(Watch()):
        assert eventually(lambda: len(told) >= 2, 60)  # A busy machine may look later, at more lines.
    assert set(told) == {"step 1200, 3.14 steps/s, 1 worker"} and target
