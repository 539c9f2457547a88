"""A worker writes its events when it fails, stalls, loses a peer or gets SIGUSR2, and then trains on."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tfdist.events.event_file import read_events

DEADLINE_SECONDS = 60

LISTENS = """
import os, signal, sys, threading, time
from tfdist.events.asked_by_signal import call_when_asked
heard = threading.Event()
def told():
    print("told", flush=True)
    heard.set()
"""


def asked(body, signals=1):
    """Sends SIGUSR2 to a program that prints "ready". Returns its exit code and output."""
    command = [sys.executable, "-u", "-c", LISTENS + textwrap.dedent(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            for _ in range(signals):
                process.send_signal(signal.SIGUSR2)
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()
    return process.returncode, output


def test_a_signal_is_answered_while_native_code_runs():
    code, output = asked(
        """
        import ctypes
        lock = ctypes.create_string_buffer(128)
        libc = ctypes.CDLL("libpthread.so.0")
        libc.pthread_mutex_init(lock, None)
        libc.pthread_mutex_lock(lock)
        def told():
            print("told", flush=True)
            os._exit(3)
        assert call_when_asked(told)
        print("ready")
        libc.pthread_mutex_lock(lock)  # for ever, and no signal breaks in
        """
    )
    assert (code, output) == (3, "told\n")


def test_a_handler_of_the_program_stays():
    for order in ("early", "late"):
        body = f"""
            mine = lambda *_: print("mine", flush=True)
            if {order == "early"}: signal.signal(signal.SIGUSR2, mine)
            assert call_when_asked(told) == {order == "late"}
            signal.signal(signal.SIGUSR2, mine)
            print("ready")
            time.sleep(0.5)
        """
        assert asked(body) == (0, "mine\n")


def test_a_preemption_and_its_end_leave_the_signal_to_the_events():
    code, output = asked(
        """
        assert call_when_asked(told)
        import types
        from tfdist.faults import preemption, FaultTolerance
        reports = preemption.LoneReports()
        strategy = types.SimpleNamespace(reports=reports, fault_tolerance=FaultTolerance())
        watch = preemption.install(strategy)
        print("ready")
        heard.wait(30)
        heard.clear()
        preemption.uninstall(watch)
        os.kill(os.getpid(), signal.SIGUSR2)
        print(heard.wait(30), reports.asked_here)
        """
    )
    assert (code, output) == (0, "told\ntold\nTrue False\n")


def test_a_forked_child_has_the_default_of_the_signal():
    body = """
        assert call_when_asked(told)
        print("ready")
        heard.wait(30)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"forked")
            time.sleep(30)
            os._exit(0)
        os.read(reader, 6)
        os.kill(child, signal.SIGUSR2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert asked(body) == (0, f"told\n{-signal.SIGUSR2}\n")


FAILS = """
import keras, numpy as np, tfdist
strategy = tfdist.MirroredStrategy(["CPU:0"])
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
def fails(batch, logs):
    if batch == 2:
        raise KeyError("x")
x = np.ones((16, 2))
callback = keras.callbacks.LambdaCallback(on_train_batch_end=fails)
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[callback])
"""


@pytest.mark.parametrize("count", ["", pytest.param("0", marks=pytest.mark.exhaustive)])
def test_a_process_without_tfdist_run_writes_to_the_folder_of_the_environment(tmp_path, count):
    own = {"TFDIST_EVENTS_DIR": str(tmp_path / "events"), "TFDIST_EVENT_COUNT": count}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", **own}
    done = subprocess.run([sys.executable, "-c", FAILS], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("KeyError: 'x'"), done.stderr
    if count == "0":
        assert list(tmp_path.iterdir()) == []
        return
    file = read_events(tmp_path / "events" / "attempt-0" / "events-0.jsonl")
    expected = {"why": "exception", "exception": "KeyError", "phase": "callback", "call": "fit", "step": 3, "worker": 0}
    assert {name: file.header[name] for name in expected} == expected
    assert file.stacks["MainThread"][0][2] == "fails" and file.stacks["MainThread"][-1][2] == "<module>"
    assert [event.details["rows"] for event in file.events if event.kind == "step"] == [[4]] * 3
