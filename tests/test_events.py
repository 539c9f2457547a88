"""A worker writes its events when it fails, stalls, loses a peer or gets SIGUSR2, and then trains on."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from tfdist._compat import call_stack
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
            mine = lambda *_: (print("mine", flush=True), came.set())
            came = threading.Event()
            if {order == "early"}: signal.signal(signal.SIGUSR2, mine)
            assert call_when_asked(told) == {order == "late"}
            signal.signal(signal.SIGUSR2, mine)
            print("ready")
            came.wait(30)
            time.sleep(0.5)  # for `told`, if it were called too
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
        import warnings
        warnings.simplefilter("ignore")  # From 3.12 on, Python warns of a fork beside threads.
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


def test_a_signal_at_the_exit_does_not_kill_the_process():
    """Python has taken its handlers back when it deletes the modules."""
    body = """
        assert call_when_asked(told)
        class Late:
            def __del__(self, kill=os.kill, write=os.write, own=os.getpid(), asked=signal.SIGUSR2):
                kill(own, asked)
                write(1, b"deleted\\n")
        print("ready")
        heard.wait(30)
        sys.modules["late"] = Late()
    """
    assert asked(body) == (0, "told\ndeleted\n")


RECORDS = """
import os, pathlib, sys, threading
from tfdist.events import recorder
from tfdist.events.event_file import EXCHANGE, LOST_PEER, read_header
path = pathlib.Path(os.environ["TFDIST_EVENTS_DIR"], "attempt-0", "events-0.jsonl")
"""


def recorded(folder, body):
    """Runs a program that writes events to a folder. Returns its exit code and output, and the events."""
    env = {**os.environ, "TFDIST_EVENTS_DIR": str(folder)}
    command = [sys.executable, "-c", RECORDS + textwrap.dedent(body)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    return done.returncode, done.stdout, read_events(folder / "attempt-0" / "events-0.jsonl")


def test_a_better_record_is_written_even_if_it_comes_while_another_is_written(tmp_path):
    code, _, file = recorded(
        tmp_path,
        """
        recorder.begin()
        writes, may_end = threading.Event(), threading.Event()
        class Slow:
            def __str__(self):
                writes.set()
                may_end.wait(30)
                return "slow"
        first = threading.Thread(target=recorder.write_failure, args=[LOST_PEER], kwargs={"peer": Slow()})
        first.start()
        writes.wait(30)
        recorder.capture_failure(EXCHANGE, message="better")
        second = threading.Thread(target=recorder.write_failure, args=[EXCHANGE])
        second.start()
        may_end.set()
        first.join()
        second.join()
        recorder.write_failure("stall")
        """,
    )
    assert (code, file.header["why"], file.header.get("message")) == (0, "exchange", "better")


def test_an_exception_is_reported_before_its_events_are_written(tmp_path):
    code, output, file = recorded(
        tmp_path,
        """
        sys.excepthook = lambda *_: print(read_header(path)["why"])
        recorder.begin()
        raise KeyError("x")
        """,
    )
    assert (code, output, file.header["why"]) == (1, "start\n", "exception")
    assert file.stacks["MainThread"][0][2] == "<module>"


def test_stacks_are_read_by_several_threads_and_leave_the_garbage_collector_as_it_was():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for is_enabled in (True, False):
            (gc.enable if is_enabled else gc.disable)()
            threads = [
                threading.Thread(target=lambda: [call_stack.calls_of_threads() for _ in range(300)]) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
        sys.setswitchinterval(before)


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
