"""If workers are missing, unfit, preempted or dead, all peers learn within their deadlines which worker failed."""

import contextlib
import dataclasses
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

import tfdist
from certificates import Authority
from launched import eventually
from tfdist.cluster import DEVICES_PER_WORKER_VARIABLE, ClusterSpec, free_ports
from tfdist.exit_codes import PREEMPTED, STALLED
from tfdist.faults import FaultTolerance, preemption
from tfdist.faults.peer_liveness import PeerLiveness
from tfdist.network.tls import TLS_VARIABLES

DEADLINE_SECONDS = 180
START_SECONDS = 3


class Job:
    """Starts workers that run one script, each in a new interpreter."""

    def __init__(self, directory):
        self.directory = directory
        self.processes = []

    def start(self, body, workers=2, which=None, **environ):
        script = self.directory / "script.py"
        script.write_text(textwrap.dedent(body))
        ports = free_ports(workers)
        for index in which or range(workers):
            spec = ClusterSpec.local(workers, index, ports)
            env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ, **environ}
            with (self.directory / f"worker-{index}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", str(script)],
                        env={**env, "TF_CONFIG": spec.to_json(), "HERE": str(self.directory)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def train(self, body, workers=2, **environ):
        """Starts the workers, and waits until all train."""
        self.start(body, workers, **environ)
        for index in range(workers):
            self.wait_for(index, "training")

    def output(self, index):
        return (self.directory / f"worker-{index}.log").read_text()

    def wait(self):
        """Returns the exit codes."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def wait_for(self, index, words):
        assert eventually(lambda: words in self.output(index), DEADLINE_SECONDS), self.output(index)
        return time.monotonic()

    def kill(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.kill()


# Options.


@pytest.mark.parametrize(
    "wrong",
    [
        {"start_timeout_seconds": 0},
        {"heartbeat_timeout_seconds": -1},
        {"shutdown_timeout_seconds": math.inf},
        {"preemption_timeout_seconds": math.nan},
        {"stall_timeout_seconds": 0},
        {"start_timeout_seconds": "5"},
        {"preemption_signals": (signal.SIGKILL,)},
        {"preemption_signals": (0,)},
        {"preemption_signals": signal.SIGTERM},
        {"preemption_signals": ([signal.SIGTERM],)},
    ],
    ids=str,
)
def test_a_wrong_deadline_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FaultTolerance(**wrong)


def test_the_environment_comes_before_the_script():
    options = FaultTolerance(start_timeout_seconds=7, stall_timeout_seconds=8)
    given = options.with_environment({"TFDIST_START_TIMEOUT_SECONDS": "2.5", "TFDIST_STALL_TIMEOUT_SECONDS": "inf"})
    assert given == dataclasses.replace(options, start_timeout_seconds=2.5, stall_timeout_seconds=math.inf)
    assert options.with_environment({"TFDIST_START_TIMEOUT_SECONDS": ""}) == options
    assert options.with_environment({}) == options and tfdist.FaultTolerance is FaultTolerance


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_wrong_environment_is_refused_by_name(text):
    with pytest.raises(ValueError, match="TFDIST_HEARTBEAT_TIMEOUT_SECONDS.*" + text):
        FaultTolerance().with_environment({"TFDIST_HEARTBEAT_TIMEOUT_SECONDS": text})


# The end of a process.


def test_a_closed_connection_is_a_loss_only_if_its_process_has_ended():
    gone, *_ = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as serving:
        addresses = [f"127.0.0.1:{gone}", f"127.0.0.1:{serving.getsockname()[1]}", f"127.0.0.1:{gone}"]
        pairs = {worker: connected_pair() for worker in range(3)}
        losses = []
        PeerLiveness({worker: ours for worker, (ours, _) in pairs.items()}, addresses, losses.append)
        pairs[2][1].sendall(b"bye\n")
        for _, theirs in pairs.values():
            theirs.close()
        assert eventually(lambda: losses == [0])
        time.sleep(2)
        assert losses == [0]
    for ours, _ in pairs.values():
        ours.close()


def test_the_end_of_a_peer_is_seen_over_a_slow_link(monkeypatch):
    def refused_late(address, timeout):
        if timeout < 0.5:  # The round trip of the link.
            raise TimeoutError("timed out")
        raise ConnectionRefusedError("refused")

    ours, theirs = connected_pair()
    monkeypatch.setattr(socket, "create_connection", refused_late)
    losses = []
    PeerLiveness({1: ours}, ["127.0.0.1:1", "127.0.0.1:2"], losses.append)
    theirs.close()
    assert eventually(lambda: losses == [1])
    ours.close()


def connected_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


PREEMPTION = """
import os, signal, sys, threading, time
from tfdist.faults import preemption, FaultTolerance

was_asked = threading.Event()

class Reports:
    listeners = []
    def ask_to_stop(self):
        print("asked", flush=True)
        was_asked.set()

class Strategy:
    reports = Reports()
    fault_tolerance = FaultTolerance(
        preemption_timeout_seconds=SAVE_SECONDS, preemption_signals=(signal.SIGTERM, signal.SIGUSR1)
    )

def earlier(signum, frame):
    print("earlier", signum, flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, earlier)
preemption.install(Strategy())
"""


def preempted(body, signum=signal.SIGTERM, save_seconds=DEADLINE_SECONDS):
    """Sends a signal to a program that prints "ready". Returns exit code, output and seconds since the signal."""
    command = [sys.executable, "-u", "-c", f"SAVE_SECONDS = {save_seconds}{PREEMPTION}{textwrap.dedent(body)}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            before = ""
            while "ready" not in before:
                line = process.stdout.readline()
                assert line, before
                before += line
            start = time.monotonic()
            process.send_signal(signum)
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()
    return process.returncode, before + output, time.monotonic() - start


def test_a_signal_requests_a_save_even_while_native_code_runs():
    code, output, seconds = preempted(
        """
        import ctypes
        lock = ctypes.create_string_buffer(128)
        libc = ctypes.CDLL("libpthread.so.0")
        libc.pthread_mutex_init(lock, None)
        libc.pthread_mutex_lock(lock)
        print("ready")
        libc.pthread_mutex_lock(lock)  # for ever, and no signal breaks in
        """,
        save_seconds=3,
    )
    assert code == PREEMPTED and "asked" in output and "No save within" in output
    assert f"earlier {int(signal.SIGTERM)}" in output
    assert seconds > 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.exhaustive)])
def test_after_the_save_the_process_runs_exit_handlers_and_exits_with_75(signum):
    code, output, _ = preempted(
        """
        import atexit
        preemption._LEAVE_SECONDS = 60
        atexit.register(print, "atexit", flush=True)
        print("ready")
        was_asked.wait(30)
        try:
            preemption.leave()
        finally:
            print("finally", flush=True)
        """,
        signum,
    )
    assert code == PREEMPTED and "No save within" not in output
    assert all(word in output for word in ("asked", "finally", "atexit"))
    assert ("earlier" in output) == (signum == signal.SIGTERM)


def test_exit_handlers_do_not_hold_the_process_beyond_the_deadline_of_the_signal():
    code, output, _ = preempted(
        """
        import atexit
        preemption._LEAVE_SECONDS = 1000
        atexit.register(time.sleep, 1000)
        print("ready")
        was_asked.wait(30)
        preemption.leave()
        """,
        save_seconds=5,
    )
    assert code == PREEMPTED and "Saved" in output and "No save within" not in output


@pytest.mark.parametrize(("is_supervised", "expected"), [(True, PREEMPTED), (False, -signal.SIGTERM)])
def test_under_a_supervisor_sigterm_always_requests_a_save(is_supervised, expected):
    code, output, _ = preempted(
        f"""
        preemption.uninstall()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if {is_supervised}:
            os.setsid()
            os.environ.update(TFDIST_RUN_DIR="/nowhere", TFDIST_ATTEMPT="0")
        Strategy.fault_tolerance = FaultTolerance(preemption_signals=(signal.SIGUSR1,))
        preemption.install(Strategy())
        print("ready")
        was_asked.wait(30)
        preemption.leave()
        """
    )
    assert code == expected and ("asked" in output) == is_supervised


def test_ctrl_c_saves_and_tells_how_to_resume():
    code, output, _ = preempted("print('ready'); was_asked.wait(30); preemption.leave([], '/backup')", signal.SIGINT)
    assert code == PREEMPTED and "asked" in output and "Traceback" not in output
    assert "Saved to /backup, and leaving with exit code 75. To continue, start the same command again." in output


def test_a_second_ctrl_c_ends_at_once():
    code, output, seconds = preempted(
        """
        def again():
            time.sleep(1.1)
            os.kill(os.getpid(), signal.SIGINT)
        print("ready")
        was_asked.wait(30)
        os.kill(os.getpid(), signal.SIGINT)  # the same request, passed on by a launcher
        threading.Thread(target=again).start()
        time.sleep(100)
        """,
        signal.SIGINT,
    )
    assert code == 128 + signal.SIGINT and "Ctrl-C again" in output and "Traceback" not in output
    assert seconds < 60


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("preemption.uninstall()", -signal.SIGINT),
        (
            "preemption.uninstall(); preemption._MAIN_SECONDS = 60; "
            "preemption.install(Strategy(), is_under_way=lambda: False)",
            -signal.SIGINT,
        ),
        ("preemption.uninstall(); sys.ps1 = '>>> '; preemption.install(Strategy())", -signal.SIGINT),
        (
            "preemption.uninstall(); signal.signal(signal.SIGINT, lambda *_: sys.exit(4)); "
            "preemption.install(Strategy())",
            4,
        ),
    ],
    ids=["no training", "no training under way", "interactive", "own handler"],
)
def test_ctrl_c_keeps_its_usual_handler(before, expected):
    code, output, _ = preempted(f"{before}\nprint('ready')\ntime.sleep(30)", signal.SIGINT)
    assert code == expected and "asked" not in output


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_handler_that_the_program_sets_later_gets_the_signal_alone(signum):
    code, output, _ = preempted(
        f"""
        def mine(signum, frame):
            print("mine", was_asked.wait(1), flush=True)
            os._exit(4)
        signal.signal({int(signum)}, mine)
        print("ready")
        time.sleep(60)
        """,
        signum,
    )
    assert code == 4 and "mine False" in output and "asked" not in output


def test_a_process_that_leaves_without_a_save_logs_it():
    code, output, _ = preempted("print('ready'); was_asked.wait(30); preemption.leave(['worker 1: the disk is full'])")
    assert code == PREEMPTED
    assert "WITHOUT a save: worker 1: the disk is full" in output and "Saved" not in output


@pytest.mark.exhaustive
def test_a_program_that_does_not_end_after_the_save_is_ended():
    code, output, seconds = preempted(
        """
        print("ready")
        was_asked.wait(30)
        try:
            preemption.leave()
        finally:
            time.sleep(10 * 60)
        """
    )
    assert code == PREEMPTED and seconds > 9, output


def test_a_signal_to_a_forked_child_does_not_reach_its_parent():
    code, output, _ = preempted(
        """
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        started = fork.Event()
        child = fork.Process(target=lambda: (started.set(), time.sleep(60)))
        child.start()
        started.wait()
        os.kill(child.pid, signal.SIGUSR1)
        child.join()
        print("child", child.exitcode, "ready")
        time.sleep(0.2)
        sys.exit(0)
        """,
        signal.SIGCONT,
    )
    assert code == 0 and f"child {-signal.SIGUSR1}" in output and "asked" not in output


def test_a_forked_child_does_not_remove_the_handlers_of_its_parent():
    code, output, _ = preempted(
        """
        ours = preemption._installed
        child = os.fork()
        if child == 0:
            preemption.uninstall()
            for end in (ours._reader, ours._writer):
                try:
                    os.fstat(end)
                except OSError:
                    print("closed", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
        print("ready")
        was_asked.wait(30)
        preemption.leave()
        """
    )
    assert code == PREEMPTED and "asked" in output and output.count("closed") == 2, output


@pytest.mark.parametrize(("reports", "warns"), [(preemption.LoneReports(), False), (None, True)])
def test_training_outside_the_main_thread_warns_that_signals_are_not_handled(reports, warns, caplog):
    strategy = types.SimpleNamespace(reports=None)
    with caplog.at_level("WARNING", logger="absl"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(preemption.install, strategy, reports).result() is None
    assert ("Preemption is not handled" in caplog.text) == warns


def test_uninstall_restores_earlier_handlers_and_defaults():
    body = """
        preemption.uninstall()
        print("ready")
        time.sleep(30)
        """
    code, output, _ = preempted(body)
    assert code == 3 and "earlier" in output and "asked" not in output
    assert preempted(body, signal.SIGUSR1)[0] == -signal.SIGUSR1


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 3), (signal.SIGUSR1, -signal.SIGUSR1)])
def test_a_signal_that_comes_after_the_last_step_is_not_lost(signum, expected):
    code, output, _ = preempted(
        """
        print("ready")
        while not preemption._installed._is_asked: time.sleep(0.01)
        preemption.uninstall()
        print("went on", preemption._installed)
        """,
        signum,
    )
    assert code == expected and "went on" not in output


def test_a_signal_that_the_thread_has_not_read_at_the_end_is_not_lost():
    code, output, _ = preempted(
        """
        import types
        preemption.uninstall()
        late = lambda file, size: (os.read(file, size), time.sleep(100))[0]  # as on a busy machine
        preemption.os = types.SimpleNamespace(**{**vars(os), "read": late})
        preemption.install(Strategy())
        print("ready")
        while preemption._installed._noticed is None: time.sleep(0.01)
        preemption.uninstall()
        print("went on")
        """
    )
    assert code == 3 and "earlier" in output and "went on" not in output


def test_an_inner_training_leaves_the_signals_to_the_outer_one():
    code, output, _ = preempted(
        """
        for _ in range(2):
            preemption.uninstall(preemption.install(Strategy(), preemption.LoneReports()))
        print("ready")
        was_asked.wait(30)
        preemption.leave()
        """
    )
    assert code == PREEMPTED and "asked" in output


@pytest.mark.parametrize(("is_under_way", "expected"), [(True, PREEMPTED), (False, 3)])
def test_a_signal_after_an_interrupted_training_reaches_the_earlier_handler(is_under_way, expected):
    code, output, _ = preempted(
        f"""
        preemption.uninstall()
        if not {is_under_way}:
            preemption._MAIN_SECONDS = 60  # On a busy machine, the main thread may notice the signal late.
        preemption.install(Strategy(), is_under_way=lambda: {is_under_way})
        print("ready")
        was_asked.wait(30)
        preemption.leave()
        """
    )
    assert code == expected and ("asked" in output) == is_under_way


def test_a_handled_signal_is_not_raised_again():
    code, output, _ = preempted(
        """
        print("ready")
        while preemption._installed._signum is None: time.sleep(0.01)
        try:
            preemption.leave()
        except SystemExit as leaving:
            preemption.uninstall()
            raise
        """
    )
    assert code == PREEMPTED and output.count("earlier") == 1


# Real jobs.

TRAIN = """
import os, pathlib, sys, time
import keras, numpy as np
import tfdist
from tfdist.cluster import ClusterSpec

worker = ClusterSpec.from_env().worker_id
here = pathlib.Path(os.environ["HERE"])
strategy = tfdist.MultiWorkerMirroredStrategy()
x = np.ones((64, 8), "float32")

def build(units=1, optimizer="sgd"):
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])
        model.compile(optimizer, "mse")
    return model

class Step(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if strategy.reports.latest.number == 10:
            print("training", flush=True)

def fit(model, *callbacks, epochs=1000):
    model.fit(x, x[:, :1], batch_size=8, epochs=epochs, verbose=0, callbacks=[*callbacks, Step()])
"""
# Workers that exchange numbers without Keras start in half the time.
SUMS = """
import os, pathlib, sys, time
import tensorflow as tf, tfdist
from tfdist.cluster import ClusterSpec

worker = ClusterSpec.from_env().worker_id
here = pathlib.Path(os.environ["HERE"])
strategy = tfdist.MultiWorkerMirroredStrategy()

def total():
    return float(strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None))
"""


def test_a_resolver_replaces_tf_config_and_an_empty_one_trains_alone(job):
    job.start(
        """
        import os, socket
        from tfdist.cluster import ClusterSpec
        import tensorflow as tf, tfdist

        spec, resolver = ClusterSpec.from_env(), None
        if spec.worker_id == 1:
            one = tf.train.ClusterSpec({"worker": [spec.address]})
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(one, task_type="worker", task_id=0)
            try:
                tfdist.MultiWorkerMirroredStrategy(resolver)
                raise AssertionError("made with two chiefs")
            except tfdist.errors.TFConfigError as error:
                assert f"worker 1 of 2 at {spec.address} (of" in str(error), error
                assert f"worker 0 of 1 at {spec.address} (of" in str(error), error
        os.environ["TF_CONFIG"] = " "
        if resolver:
            with socket.create_server(("", int(spec.address.rpartition(":")[2]))):
                try:
                    tfdist.MultiWorkerMirroredStrategy(resolver)
                    raise AssertionError("made with a port that is taken")
                except tfdist.errors.TFConfigError as error:
                    assert "already taken" in str(error), error
        assert tfdist.MultiWorkerMirroredStrategy(resolver).num_replicas_in_sync == 1
        found = ClusterSpec.from_env()
        assert found == (ClusterSpec({"worker": [spec.address]}, "worker", 0) if resolver else None), found
        """,
        OMPI_COMM_WORLD_SIZE="4",
    )
    assert job.wait() == [0, 0], job.output(0) + job.output(1)
    assert "each of the 4 processes trains alone" in job.output(0)
    assert "trains alone" not in job.output(1)  # this worker's resolver names its peers


def test_a_strategy_that_is_made_too_late_is_refused_before_the_rendezvous(job):
    # The other worker never starts.
    job.start("import tensorflow as tf, tfdist\ntf.ones([])\ntfdist.MultiWorkerMirroredStrategy()", which=[1])
    assert job.wait() == [1]
    assert "This is worker 1 of 2" in job.output(1) and "right after the imports" in job.output(1)


def test_a_missing_worker_is_logged_during_the_wait(job):
    job.start(
        """
        import os, pathlib, time, types
        from tfdist.cluster import ClusterSpec
        from tfdist.faults import rendezvous
        late = pathlib.Path(os.environ["HERE"], "late")
        clock = lambda: time.monotonic() + 1000 * late.exists()
        rendezvous.time = types.SimpleNamespace(monotonic=clock, sleep=time.sleep)
        rendezvous.meet(ClusterSpec.from_env(), 999)
        """,
        workers=3,
        which=[0, 1],
    )
    for index in (0, 1):
        job.wait_for(index, "2 of 3 workers have joined")
    (job.directory / "late").touch()
    assert job.wait() == [1, 1]
    for index in (0, 1):
        *waiting, error = job.output(index).splitlines()
        assert any("2 of 3 workers have joined" in line and "for worker 2 at 127.0.0.1:" in line for line in waiting)
        assert error.startswith("tfdist.errors.WorkerLostError") and "worker 2 at 127.0.0.1:" in error


@pytest.mark.exhaustive
def test_a_strategy_waits_no_longer_than_start_timeout_seconds(job):
    job.start(TRAIN, workers=2, which=[1], TFDIST_START_TIMEOUT_SECONDS=str(START_SECONDS))
    assert job.wait() == [1]
    assert "WorkerLostError" in job.output(1) and "worker 0 at 127.0.0.1:" in job.output(1)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_killed_worker_ends_its_peers(job, killed):
    job.train(TRAIN + "assert strategy.extended._peers is not None\nfit(build())")
    job.processes[killed].kill()
    codes = job.wait()
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1, job.output(1 - killed)


ENCODED = TRAIN.replace("Strategy()", "Strategy(compression=tfdist.compression.Int8(min_elements=1))")


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_ends_peers_that_wait_for_its_encoded_gradients(killed, job):
    job.train(ENCODED + "assert strategy.extended._peers is not None\nfit(build())", workers=3)
    job.processes[killed].kill()
    codes = job.wait()
    others = [index for index in range(3) if index != killed]
    assert all(codes[index] == 1 for index in others), [job.output(index) for index in others]


@pytest.mark.exhaustive
def test_a_frozen_worker_ends_peers_that_wait_for_its_encoded_gradients(job):
    job.train(ENCODED + "fit(build())", TFDIST_HEARTBEAT_TIMEOUT_SECONDS="3")
    tfdist.testing.faults.freeze(job.processes[1].pid)
    assert job.processes[0].wait(DEADLINE_SECONDS / 3) == 1
    assert "UnavailableError" in job.output(0) and "task:1" in job.output(0), job.output(0)


@pytest.mark.exhaustive
def test_workers_that_cannot_connect_use_collectives_for_encoded_gradients(job):
    blocked = """
from tfdist.strategies.collectives import peer_connections
if worker:
    peer_connections.split_address = lambda address: ("192.0.2.1", 1)  # of nobody, as RFC 5737 has it
"""
    head, tail = ENCODED.split("strategy = ", 1)
    job.start(head + blocked + "strategy = " + tail + "assert strategy.extended._peers is None\nfit(build(), epochs=2)")
    assert job.wait() == [0, 0], job.output(0) + job.output(1)
    assert "cannot connect to worker 0 at 192.0.2.1" in job.output(1)
    assert "Open the hosts' other ports to each other" in job.output(0)


def tls_environment(directory):
    return dict(zip(TLS_VARIABLES, dataclasses.astuple(Authority(directory).worker()), strict=True))


def test_workers_with_certificates_train_over_tls(job):
    check = """
from tfdist.strategies.collectives.socket_streams import TlsStream
assert all(isinstance(each, TlsStream) for each in strategy.extended._peers._streams.values())
"""
    job.start(TRAIN + check + "fit(build(), epochs=1)", **tls_environment(job.directory))
    assert job.wait() == [0, 0], job.output(0) + job.output(1)


@pytest.mark.exhaustive
def test_with_tls_workers_that_cannot_connect_raise_instead_of_plain_text(job):
    head, tail = ENCODED.split("strategy = ", 1)
    blocked = """
from tfdist.strategies.collectives import peer_connections
split = peer_connections.split_address
peer_connections.split_address = lambda address: ("192.0.2.1", 1) if worker else split(address)
"""
    job.start(head + blocked + "strategy = " + tail, **tls_environment(job.directory))
    assert job.wait() == [1, 1], job.output(0) + job.output(1)
    assert "TLS needs the workers' own connections, but worker 1 at" in job.output(1), job.output(1)
    assert "TLS needs the workers' own connections, but worker 0 at" in job.output(0), job.output(0)


TIMEOUT = "communication_options=tf.distribute.experimental.CommunicationOptions(timeout_seconds=9.)"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "devices", "why"),
    [
        ("transport='tensorflow'", 1, "transport='tensorflow' does not use them"),
        (TIMEOUT, 1, "`communication_options` has a `timeout_seconds`"),
        ("", 2, "several devices each"),
    ],
)
def test_with_tls_exchanges_over_tensorflow_are_refused(job, options, devices, why):
    script = "import tensorflow as tf\n" + TRAIN.replace("Strategy()", f"Strategy({options})")
    job.start(script, **tls_environment(job.directory), **{DEVICES_PER_WORKER_VARIABLE: str(devices)})
    assert job.wait() == [1, 1], job.output(0) + job.output(1)
    for worker in range(2):
        assert "TLS needs the workers' own connections" in job.output(worker) and why in job.output(worker)


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("transport", "('auto', 'tensorflow')", "tensorflow"),
        ("compression", "[tfdist.compression.Auto([codec]) for codec in ('float16', 'int8')]", "Int8("),
    ],
)
def test_workers_with_different_options_raise(name, values, named, job):
    job.start(TRAIN.replace("Strategy()", f"Strategy({name}={values}[worker])") + "fit(build(), epochs=1)")
    assert job.wait() == [1, 1], job.output(0) + job.output(1)
    for worker in range(2):
        assert f"the same {name}" in job.output(worker) and named in job.output(worker), job.output(worker)


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match=r"`transport` must be one of 'auto', 'tensorflow', got 'tcp'"):
        tfdist.MultiWorkerMirroredStrategy(transport="tcp")


@pytest.mark.parametrize(
    "trains",
    [
        pytest.param(SUMS + 'while total() == 2: print("training", flush=True)', id="sums"),
        pytest.param(TRAIN + "fit(build())", id="fit", marks=pytest.mark.exhaustive),
    ],
)
def test_a_frozen_chief_is_named_and_ends_its_peer(trains, job):
    job.train(trains, TFDIST_HEARTBEAT_TIMEOUT_SECONDS="10")
    tfdist.testing.faults.freeze(job.processes[0].pid)
    assert job.processes[1].wait(DEADLINE_SECONDS / 3) == 1
    assert re.search(r"worker 0 at 127\.0\.0\.1:\d+ has not answered for .* is frozen", job.output(1)), job.output(1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_worker_frozen_in_an_agreement_is_named_soon(frozen, job):
    job.start(
        f"""
        import os, signal, time
        import tfdist
        from tfdist.backup.chief_decision import ChiefDecision
        strategy = tfdist.MultiWorkerMirroredStrategy()
        agreement = ChiefDecision(strategy, 600)
        agreement.settle("fit", None, lambda said: None)
        print("settled")
        if strategy.extended._id_in_cluster == {frozen}:
            time.sleep(1)  # until the other is done, too
            os.kill(os.getpid(), signal.SIGSTOP)
        agreement.settle("fit", None, lambda said: None)
        """,
        TFDIST_HEARTBEAT_TIMEOUT_SECONDS="3",
    )
    settled = job.wait_for(1 - frozen, "settled")
    assert job.wait_for(1 - frozen, "has not answered for") - settled < DEADLINE_SECONDS / 3
    assert f"worker {frozen} at 127.0.0.1" in job.output(1 - frozen)


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(SUMS + 'total()\nprint("summed")\nif worker == 1: time.sleep(600)\ntotal()', id="sums"),
        pytest.param(
            TRAIN + 'fit(build(), tfdist.testing.Fault("hang", worker=1, step=12))',
            id="fit",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_sigterm_ends_a_worker_that_waits_in_a_collective(waits, job):
    job.start(waits)
    job.wait_for(1, "tfdist.testing.Fault: hang" if waits.startswith(TRAIN) else "summed")
    time.sleep(0.5)
    job.processes[0].terminate()
    assert job.processes[0].wait(DEADLINE_SECONDS) == -signal.SIGTERM


def test_peers_get_an_exception_with_its_message_at_once(job):
    job.start(
        TRAIN
        + """
import threading
def produce():
    while not (here / "go").exists(): time.sleep(0.01)
if worker == 1:
    threading.Thread(target=produce).start()  # keeps the process from its end
fit(build(), tfdist.testing.Fault("raise", worker=1, step=12))
"""
    )
    job.wait_for(1, "tfdist.testing.Fault: raise")
    assert job.processes[0].wait(DEADLINE_SECONDS) == 1
    assert job.processes[1].poll() is None
    assert "worker 1 ended by RuntimeError: raised by tfdist.testing.Fault after step 12" in job.output(0)
    (job.directory / "go").touch()
    assert job.wait() == [1, 1]


@pytest.mark.parametrize(
    "epochs",
    [
        pytest.param(1, id="who waits for its callbacks"),
        pytest.param(1000, id="who trains on", marks=pytest.mark.exhaustive),
    ],
)
def test_a_chief_only_callback_that_stops_training_raises(job, epochs):
    body = f"""
class Stops(tfdist.callbacks.ChiefOnly, keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True

fit(build(), Stops(), epochs={epochs})
"""
    job.start(TRAIN + body)
    assert job.wait() == [1, 1], job.output(0) + job.output(1)
    assert "A fit must end after the same step on all workers, but the callback 'Stops'" in job.output(0)
    waits = "All workers wait while the chief works alone, here in the callback 'Stops'" in job.output(1)
    assert waits == (epochs == 1)


def test_all_workers_leave_after_the_same_step_if_one_is_preempted(job):
    job.start(
        TRAIN
        + """
from tfdist.faults import beside_steps, preemption

class Backup(keras.callbacks.Callback):
    stop = False
    def on_train_begin(self, logs=None):
        preemption.install(strategy)
        strategy.reports.listeners.append(self.on_report)
    def on_report(self, report):
        self.stop |= report.stop
    def on_train_batch_end(self, batch, logs=None):
        if self.stop:
            with beside_steps.section("save"):
                (here / f"saved-{worker}").write_text(str(strategy.reports.latest.number))
            preemption.leave()

fit(build(), Backup(), tfdist.testing.Fault("preempt", worker=1, step=15))
"""
    )
    assert job.wait() == [PREEMPTED, PREEMPTED], job.output(0) + job.output(1)
    assert "No save within" not in job.output(0) + job.output(1)
    steps = {(job.directory / f"saved-{index}").read_text() for index in range(2)}
    assert len(steps) == 1 and 15 <= int(steps.pop()) < 500  # of 8000


OF_STRATEGY = """
with strategy.scope():
    model = build()
    model.compile("sgd", "mse", jit_compile={})
"""
WITHOUT_STRATEGY = """
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
ON_TWO_DEVICES = """
import tensorflow as tf
model = build()
def make_train_function(force=False):
    run_step = lambda batch: model.train_step(batch)["loss"]
    run = lambda iterator: strategy.reduce("SUM", strategy.run(run_step, args=(next(iterator),)), axis=None)
    model.train_function = tf.function(lambda iterator: {"loss": run(iterator)})

model.make_train_function = make_train_function
"""


@pytest.mark.parametrize(
    ("made", "devices"),
    [
        pytest.param(WITHOUT_STRATEGY, 1, id="no strategy", marks=pytest.mark.exhaustive),
        pytest.param(OF_STRATEGY.format(True), 1, id="compiled"),
        pytest.param(OF_STRATEGY.format(False), 1, id="not compiled", marks=pytest.mark.exhaustive),
        pytest.param(ON_TWO_DEVICES, 2, id="own train function", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lone_worker_saves_and_leaves_after_any_step(job, made, devices):
    job.start(
        TRAIN
        + made
        + """
backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=10**6)
preempt = tfdist.testing.Fault("preempt", worker=0, step=15)
model.fit(x, x[:, :1], batch_size=8, epochs=1000, verbose=0, callbacks=[backup, preempt])
""",
        workers=1,
        **{DEVICES_PER_WORKER_VARIABLE: str(devices)},
    )
    assert job.wait() == [PREEMPTED], job.output(0)
    assert "No save within" not in job.output(0)
    assert len(list((job.directory / "backup").glob("step-*"))) == 1


@pytest.mark.exhaustive
def test_a_preemption_after_the_last_step_saves_and_the_next_start_is_done(job):
    script = (
        TRAIN
        + """
class Asked(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.ask()

    def on_train_end(self, logs=None):
        if "AGAIN" in os.environ:  # while a `fit` that is done is passed over
            self.ask()

    def ask(self):
        os.kill(os.getpid(), signal.SIGTERM)
        while not strategy.reports.asked_here:
            time.sleep(0.01)

with strategy.scope():
    model = build()
    model.compile("sgd", "mse")
backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=10**6)
done = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[Asked(), backup])
print("epochs", done.epoch, flush=True)
"""
    )
    job.start("import os, signal\n" + script, workers=1)
    assert job.wait() == [PREEMPTED], job.output(0)
    assert len(list((job.directory / "backup").glob("step-*"))) == 1
    job.start("import os, signal\n" + script, workers=1, AGAIN="1")
    assert job.wait() == [PREEMPTED, PREEMPTED], job.output(0)
    job.start("import os, signal\n" + script, workers=1)
    assert job.wait() == [PREEMPTED, PREEMPTED, 0], job.output(0)
    assert "epochs [0, 1]" in job.output(0)
    assert not (job.directory / "backup").exists()


# These two loops report no steps.
OWN_LOOP = """
def loop(x, y, epochs, callbacks, **options):
    callbacks = keras.callbacks.CallbackList(callbacks, model=model, epochs=epochs)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
    step = tf.function(lambda batch: strategy.run(lambda rows: model.train_step(rows), args=(batch,)))
    callbacks.on_train_begin()
    for epoch in range(epochs):
        callbacks.on_epoch_begin(epoch)
        for number, batch in enumerate(data):
            step(batch)
            callbacks.on_train_batch_end(number)
        callbacks.on_epoch_end(epoch)
    callbacks.on_train_end()

model.optimizer.build(model.trainable_variables)
model.fit = loop
"""
OWN_TRAIN_FUNCTION = """
def make_train_function(force=False):
    run_step = lambda batch: model.train_step(batch)
    model.train_function = tf.function(lambda iterator: strategy.run(run_step, args=(next(iterator),)))

model.make_train_function = make_train_function
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "own",
    [
        pytest.param("", id="plain fit"),
        pytest.param(OWN_TRAIN_FUNCTION, id="own train function", marks=pytest.mark.exhaustive),
        pytest.param(OWN_LOOP, id="own loop", marks=pytest.mark.exhaustive),
    ],
)
def test_workers_that_make_room_for_more_leave_after_a_commit(own, job):
    room = job.directory / "run" / "attempt-0" / "make-room"
    room.parent.mkdir(parents=True)
    room.touch()
    script = (
        TRAIN
        + f"""
import tensorflow as tf
model = build()
{own}
backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=20)
slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.02))
model.fit(x, x[:, :1], batch_size=8, epochs=25, verbose=0, callbacks=[backup, slow])
print("trained", flush=True)
"""
    )
    run = {"TFDIST_RUN_DIR": str(job.directory / "run")}
    job.start(script, **run, TFDIST_ATTEMPT="0")
    assert job.wait() == [PREEMPTED, PREEMPTED], job.output(0) + job.output(1)
    step, folder = (job.directory / "run" / "committed").read_text().splitlines()
    assert "trained" not in job.output(0) and 20 <= int(step) < 200 and folder == str(job.directory / "backup")
    job.start(script, **run, TFDIST_ATTEMPT="1")
    assert job.wait()[2:] == [0, 0] and "trained" in job.output(0), job.output(0) + job.output(1)


@pytest.mark.exhaustive
def test_all_workers_leave_with_a_preempted_one_in_a_custom_loop(job):
    job.start(
        "import os, signal\n"
        + TRAIN
        + f"""
import tensorflow as tf
model = build()
{OWN_LOOP}
def ask(batch, logs):
    time.sleep(0.02)
    if worker == 1 and model.optimizer.iterations == 30:
        os.kill(os.getpid(), signal.SIGTERM)

backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=20)
asked = keras.callbacks.LambdaCallback(on_train_batch_end=ask)
model.fit(x, x[:, :1], batch_size=8, epochs=25, verbose=0, callbacks=[backup, asked])
"""
    )
    assert job.wait() == [PREEMPTED, PREEMPTED], job.output(0) + job.output(1)
    assert all("Saved to " in job.output(worker) for worker in range(2))
    assert {path.name for path in (job.directory / "backup").glob("step-*")} == {"step-40", "step-60"}


@pytest.mark.exhaustive
def test_a_preemption_in_a_long_validation_keeps_the_epoch_before(job):
    script = (
        """
os.environ["TFDIST_PREEMPTION_TIMEOUT_SECONDS"] = "2"
"""
        + TRAIN
        + """
class Validation(keras.callbacks.Callback):
    def on_test_begin(self, logs=None):
        if "AGAIN" not in os.environ:
            time.sleep(1.1)
            if len(trained) == 16:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)

def train(*callbacks):
    keras.utils.set_random_seed(1)
    model = build(optimizer="adam")
    rng = np.random.default_rng(0)
    x, trained[:] = rng.normal(size=(64, 8)), []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(batch))
    stop = keras.callbacks.EarlyStopping(patience=2, min_delta=0.1, restore_best_weights=True)
    done = model.fit(
        x, x[:, :1], batch_size=8, epochs=4, verbose=0, validation_data=(x[:20], x[:20, :1]),
        callbacks=[Validation(), count, stop, *callbacks],
    )
    return [done.epoch, done.history, [weights.tolist() for weights in model.get_weights()]]

trained = []
resumed = train(tfdist.callbacks.BackupAndRestore(here / "backup"))
print("trained", len(trained), "equal", train() == resumed, "epochs", len(resumed[0]), flush=True)
"""
    )
    script = "import os, signal\n" + script
    job.start(script, workers=1)
    assert job.wait() == [PREEMPTED], job.output(0)
    job.start(script, workers=1, AGAIN="1")
    assert job.wait() == [PREEMPTED, 0], job.output(0)
    told = re.search(r"trained (\d+) equal True epochs (\d+)", job.output(0))
    assert told and int(told[1]) == 8 * (int(told[2]) - 2), job.output(0)


def test_workers_that_are_done_end_together(job):
    job.start(
        SUMS
        + """
total()
print("done", flush=True)
if worker == 1:
    while not (here / "go").exists():
        time.sleep(0.01)
    fit_alone = strategy.extended.board.hear("done", 0, 60)  # needs worker 0, who keeps the board
    print("heard", fit_alone)
"""
    )
    job.wait_for(0, "done")
    time.sleep(1.5)
    assert job.processes[0].poll() is None
    (job.directory / "go").touch()
    assert job.wait() == [0, 0], job.output(0) + job.output(1)
    assert "heard True" in job.output(1)


RAISES, KILLED = "raise OSError('the disk is full')", "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("failing", "how"),
    [
        (0, RAISES),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((0, KILLED), (1, RAISES), (1, KILLED))),
    ],
)
def test_a_worker_that_is_done_exits_with_1_if_a_peer_fails(failing, how, job):
    job.start(
        f"""
        import os, pathlib, signal, time
        import tfdist

        def main():
            strategy = tfdist.MultiWorkerMirroredStrategy()
            if strategy.extended._id_in_cluster == {failing}:
                strategy.extended.board.hear("done", {1 - failing}, {DEADLINE_SECONDS})
                {how}

        main()
        """
    )
    codes = job.wait()
    assert codes[1 - failing] == 1 and codes[failing] != 0, job.output(1 - failing)
    assert "is done, but another worker has failed" in job.output(1 - failing)
    # Only the chief reports an unused strategy, and only if its script ends without an error.
    assert ("scope() was never entered" in job.output(0)) == (failing == 1) and "never entered" not in job.output(1)


EVALUATES = "model = build()\nfit(model, epochs=1)\nif worker == 0: model.evaluate(x, x[:, :1], verbose=0)"
BUILDS = "if worker: sys.exit('no data')\nbuild()"
COMPARES = """
data = tfdist.data.BalancedSharding((x, x), global_batch_size=8, seed=0)
if worker == 0: strategy.distribute_datasets_from_function(data)
"""
TRAINS = """
leave = lambda batch, logs: sys.exit(3) if worker and strategy.reports.latest.number == 12 else None
fit(build(), keras.callbacks.LambdaCallback(on_train_batch_end=leave))
"""


@pytest.mark.parametrize(
    ("body", "what", "expected"),
    [
        pytest.param(EVALUATES, "`evaluate`", 1, id="evaluates", marks=pytest.mark.exhaustive),
        pytest.param(TRAINS, "each step of a `fit`", STALLED, id="trains", marks=pytest.mark.exhaustive),
        pytest.param(BUILDS, "the creation of variables", 1, id="builds"),
        pytest.param(COMPARES, "a comparison (sharding", 1, id="compares", marks=pytest.mark.exhaustive),
    ],
)
def test_a_call_on_one_worker_alone_raises_once_its_peers_have_ended(body, what, expected, job):
    job.start(TRAIN + body)
    assert job.wait()[0] == expected, job.output(0)
    assert re.search(
        f"All workers must take part in .*{re.escape(what)}.* but the program of worker 1 has ended", job.output(0)
    )


# By default, test_model_description.py compares unlike models, on workers that live on.
@pytest.mark.exhaustive
def test_different_models_are_named_on_all_workers(job):
    job.start(TRAIN + 'fit(build(1, "adam" if worker else "sgd"))')
    assert job.wait() == [1, 1]
    for index in range(2):
        assert "All workers must have the same model, but worker 0 has the optimizer SGD" in job.output(index)
