"""`tfdist run` starts workers that know each other, and leaves no worker behind in any case."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import types

import pytest

from launched import ARRIVE, DEADLINE_SECONDS, Run, eventually, first_of_free_ports, is_alive, nothing_left
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.launch import WorkerGroup, cli, worker_output
from tfdist.launch.arguments import CommandParser
from tfdist.launch.worker_count_limit import WorkerLimits, refusal

TENSORFLOW_SECONDS = 400
_WITHOUT_TABLE = {"TERM": "dumb"}  # Otherwise `tfdist run` draws the table of workers after a second.


@pytest.fixture
def run(tmp_path):
    with nothing_left(tmp_path) as run:
        yield run


def test_each_worker_gets_its_own_index_in_one_cluster(run):
    script = run.script('(here / f"config-{worker}").write_text(os.environ["TF_CONFIG"])' + "\n" + ARRIVE)
    code, out, err = run.finish("--workers", 3, script)
    assert code == 0, err
    specs = [ClusterSpec.from_json((run.directory / f"config-{index}").read_text()) for index in range(3)]
    assert [spec.worker_id for spec in specs] == [0, 1, 2]
    assert all(spec.num_workers == 3 and spec.jobs == specs[0].jobs for spec in specs)
    assert out == "" and "3 workers" in err
    (logs,) = run.log_dirs()  # The logs stay, and the last line names their folder.
    found = sorted(path.name for path in logs.rglob("*.*"))
    assert found == ["run.json", "worker-0.log", "worker-1.log", "worker-2.log"]
    assert str(logs) in err.splitlines()[-1]


def test_the_port_of_a_worker_cannot_be_taken_before_it_opens_it(run):
    body = """
        import socket
        port = int(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][worker].rpartition(":")[2])
        for reuse_port in (False, True):
            try:
                socket.create_server(("", port), reuse_port=reuse_port).close()
                print("opened", reuse_port)
            except OSError as error:
                print("refused", reuse_port)
    """
    code, out, err = run.finish("--workers", "2", run.script(body))
    assert code == 0 and out == "refused False\nopened True\n", err


def test_as_the_first_process_of_a_container_it_reaps_the_orphans_and_keeps_the_codes_of_its_workers(run):
    new_processes = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*new_processes, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a namespace of processes")
    body = """
        for _ in range(10):
            subprocess.run(["sh", "-c", "setsid sleep 0.1 &"])
        def stat_of(path):
            try:
                return path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # It has ended meanwhile.
                return "", ""
        def of_launcher():
            parts = [stat_of(path) for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
            return [state for state, parent, *_ in parts if parent == "1"]
        time.sleep(1.5)
        deadline = time.monotonic() + 100  # The other worker may still be starting its own, or have ended.
        while (states := of_launcher()) and (len(states) > 3 or "Z" in states) and time.monotonic() < deadline:
            time.sleep(0.1)
        print("zombies", states.count("Z"), "more than workers and guard", len(states) > 3)
        sys.exit(7 * worker)
    """
    cli = [sys.executable, "-m", "tfdist.launch.cli", "run", "--max-restarts=0", "--workers", "2", run.script(body)]
    done = subprocess.run(
        [*new_processes, *cli],
        env={**os.environ, "TMPDIR": str(run.directory / "tmp")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 7 and done.stdout == "zombies 0 more than workers and guard False\n", done.stderr


def test_an_outer_tf_config_is_replaced_and_logged(run):
    outer = ClusterSpec.local(1, 0, [1]).to_json()
    script = run.script('print(os.environ["TF_CONFIG"])')
    code, out, err = run.finish("--workers", 1, script, env={"TF_CONFIG": outer})
    assert code == 0 and json.loads(out) != json.loads(outer)
    assert "TF_CONFIG is set" in err


def test_workers_of_a_run_share_a_secret_that_is_in_no_log_and_no_report(run):
    """Each run has one secret for all its attempts; a secret from the user stays unchanged."""
    body = """
        attempt = os.environ["TFDIST_ATTEMPT"]
        (here / f"{sys.argv[1]}-{attempt}-{worker}").write_text(repr([os.environ.get("TFDIST_SECRET"), sys.argv[1]]))
        if attempt == "0":
            while len(list(here.glob(f"{sys.argv[1]}-0-?"))) < 2: time.sleep(0.01)
            raise RuntimeError(os.environ["TFDIST_RUN_DIR"])
        """
    script, given = run.script(body), {"TFDIST_SECRET": "a secret of some length"}
    secrets = {}
    for name, env in (("first", {}), ("second", {}), ("given", given), ("file", {"TFDIST_SECRET_FILE": "/a/file"})):
        environ = {"TFDIST_SECRET": "", **env}
        code, out, err = run.finish("--workers", 2, script, name, env=environ, restarts=1)
        assert code == 0, err
        secrets[name] = {eval(path.read_text())[0] for path in run.directory.glob(f"{name}-*")}
        written = [path.read_text() for path in (run.directory / "tmp").rglob("*") if path.is_file()]
        assert len(secrets[name]) == 1 and any("RuntimeError" in text for text in written)
        assert name == "file" or not any(secret in text for secret in secrets[name] for text in [out, err, *written])
    assert secrets["given"] == {"a secret of some length"} and secrets["file"] == {""}
    assert len(secrets["first"] | secrets["second"]) == 2 and all(len(each) == 64 for each in secrets["first"])


SLURM = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "321"}


@pytest.mark.parametrize(
    ("arguments", "environ", "rank"),
    [
        (["--slurm"], {**SLURM, "TF_CONFIG": "{}"}, "SLURM_PROCID"),
        (["--mpi", "127.0.0.1:2"], {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
    ],
    ids=["slurm", "mpi"],
)
def test_processes_of_a_scheduler_are_workers_of_one_cluster(run, arguments, environ, rank):
    script = run.script('(here / f"config-{worker}").write_text(os.environ["TF_CONFIG"] + os.environ["TFDIST_SLOT"])')
    port = first_of_free_ports(2)
    for index in range(2):
        own = {**environ, rank: str(index)}
        code, _, err = run.finish(*arguments, "--base-port", port, script, env=own)
        assert code == 0 and f"worker {index} of 2 at" in err and "alone" not in err, err
    texts = [(run.directory / f"config-{index}").read_text() for index in range(2)]
    specs = [ClusterSpec.from_json(text[:-1]) for text in texts]
    assert [text[-1] for text in texts] == ["0", "1"]
    assert [spec.worker_id for spec in specs] == [0, 1] and specs[0].jobs == specs[1].jobs
    assert [int(spec.address.rpartition(":")[2]) for spec in specs] == [port, port + 1]


def test_a_scheduler_that_starts_many_whole_jobs_gets_a_warning(run):
    environ = {"SLURM_STEP_NUM_TASKS": "2", "TF_CONFIG": ClusterSpec.local(1, 0, [1]).to_json()}
    code, _, err = run.finish("--workers", 2, run.script(""), env=environ)
    assert code == 0 and "each of the 2 jobs trains alone" in err and "--slurm" in err


def test_the_script_gets_its_arguments_and_devices(run):
    script = run.script('print(sys.argv[1:], os.environ.get("TFDIST_DEVICES_PER_WORKER"))')
    many = ["--workers", "9", "-m", "--", "x y", "--help"]
    for before, own in (([script], many), (["--", script], many), ([script], ["--", "--lr", "--"]), ([script], ["--"])):
        code, out, err = run.finish("-n", 1, "--devices-per-worker", 4, *before, *own)
        assert (code, out) == (0, f"{own} 4\n"), err


def test_the_script_runs_as_under_python(run):
    body = """
        import multiprocessing
        def square(x): return x * x
        def fail(): raise KeyError("told")
        if __name__ == "__main__" and worker == 0:
            print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals(), flush=True)
            with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(square, [3]), flush=True)
            fail()
    """
    path = run.script(body)
    code, out, err = run.finish("--workers", 2, "--log-dir", run.directory / "logs", path)
    first = f"__main__ {path} ['{path}'] {run.directory} True"
    assert code == 1 and out.splitlines()[0] == first and out.splitlines()[-1] == "[9]", out + err
    trace = (run.directory / "logs" / "attempt-0" / "worker-0.log").read_text().partition("Traceback")[2]
    assert trace.count("  File ") == 2 and "KeyError: 'told'" in trace, trace


@pytest.mark.parametrize(
    "is_module", [pytest.param(False, id="script"), pytest.param(True, id="module", marks=pytest.mark.exhaustive)]
)
def test_plain_keras_does_not_train_in_several_workers(run, is_module):
    body = """
        import keras, numpy as np
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.evaluate(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
        leave(f"ready-{worker}", os.getpid())
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
        leave(f"trained-{worker}", os.getpid())
    """
    script = run.script(body)
    with run.start("--workers", 2, *(["-m", pathlib.Path(script).stem] if is_module else [script])) as process:
        _, err = process.communicate(timeout=TENSORFLOW_SECONDS)
    assert process.returncode == 1 and "ScopeError" in err and "tfdist.MultiWorkerMirroredStrategy()" in err, err
    assert list(run.directory.glob("ready-*")) and not list(run.directory.glob("trained-*"))


def test_a_module_runs_by_name(run):
    (run.directory / "package").mkdir()
    (run.directory / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code, out, err = run.finish("--workers", 1, "-m", "package.train", "--epochs", "2")
    assert (code, out) == (0, "__main__ ['--epochs', '2']\n"), err


def test_the_chief_prints_and_its_peers_only_log(run):
    # Each line is one write, since pieces of two streams may arrive in any order.
    script = run.script(r'sys.stdout.write(f"I am {worker}\n"); sys.stderr.write(f"complaint {worker}\n")')
    logs = run.directory / "new" / "logs"
    code, out, err = run.finish("--workers", 3, "--log-dir", logs, script)
    assert code == 0 and out == "I am 0\n" and "complaint 0" in err and str(logs) in err
    assert {path.name: sorted(path.read_text().splitlines()) for path in (logs / "attempt-0").iterdir()} == {
        f"worker-{index}.log": [f"I am {index}", f"complaint {index}"] for index in range(3)
    }


def test_the_bytes_of_the_chief_arrive_unchanged(run):
    script = run.script(r"""os.write(1, b"50 %\rdone \xff\n" * 30000)""")
    logs = run.directory / "logs"
    with (run.directory / "out").open("wb") as out:
        assert run.start("--workers", 1, "--log-dir", logs, script, stdout=out).wait(DEADLINE_SECONDS) == 0
    expected = b"50 %\rdone \xff\n" * 30000
    assert (run.directory / "out").read_bytes() == (logs / "attempt-0" / "worker-0.log").read_bytes() == expected


def test_tee_prints_every_line_with_the_name_of_its_worker(run):
    script = run.script('for i in range(200): print("line", i)\nprint("no end", end="")')
    code, out, _ = run.finish("--workers", 2, "--tee", "--log-dir", run.directory / "logs", script)
    assert code == 0
    for index in range(2):
        lines = [*(f"line {i}" for i in range(200)), "no end"]
        mine = [line for line in out.splitlines() if line.startswith(f"[worker {index}] ")]
        assert mine == [f"[worker {index}] {line}" for line in lines]
        assert (run.directory / "logs" / "attempt-0" / f"worker-{index}.log").read_text() == "\n".join(lines)


def test_an_unfinished_line_is_logged_and_a_progress_bar_is_shown(run):
    script = run.script(
        r"""
        sys.stdout.write("10 %\r20 %")
        for _ in range(30000): (here / "go").exists() or time.sleep(0.01)
        """
    )
    with run.start("--workers", 1, "--tee", "--log-dir", run.directory / "logs", script) as process:
        log = run.directory / "logs" / "attempt-0" / "worker-0.log"
        assert eventually(lambda: log.exists() and log.read_bytes() == b"10 %\r20 %")
        (run.directory / "go").touch()
        assert process.communicate(timeout=DEADLINE_SECONDS)[0] == "[worker 0] 20 %\n"  # the last state of the bar


def test_a_full_disk_for_logs_does_not_fail_a_worker(run):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    script = run.script('for i in range(2000): print("x" * 99)')
    code, out, err = run.finish("--workers", 2, "--log-dir", run.directory / "logs", script, preexec_fn=limit)
    assert code == 0 and len(out) == 200_000, err
    assert (run.directory / "logs" / "attempt-0" / "worker-1.log").stat().st_size == 1 << 16


@pytest.mark.parametrize("tee", [(), ("--tee",)], ids=["plain", "tee"])
def test_workers_survive_a_closed_output_pipe(run, tee):
    script = run.script('for i in range(20000): print("line", i)\nleave(f"done-{worker}", 0)')
    with run.start("--workers", 2, *tee, script) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_SECONDS) == 0, process.stderr.read()
    assert len(list(run.directory.glob("done-*"))) == 2


def test_the_chief_keeps_the_terminal(run):
    script = run.script("print(sys.stdout.isatty())")
    ours, theirs = pty.openpty()
    with run.start("--workers", 2, script, stdout=theirs, env=_WITHOUT_TABLE) as process:
        assert process.wait(DEADLINE_SECONDS) == 0
        assert os.read(ours, 100) == b"True\r\n"
    os.close(ours)
    os.close(theirs)


def test_the_terminal_of_the_chief_follows_the_size_of_the_real_one(run):
    script = run.script(
        """
        until = time.monotonic() + 100
        size = lambda: tuple(os.get_terminal_size())
        print(size(), flush=True)
        while worker == 0 and size() != (100, 50) and time.monotonic() < until: time.sleep(0.01)
        print(size())
        """
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with run.start("--workers", 1, script, stdout=theirs, env=_WITHOUT_TABLE) as process:
        shown = os.read(ours, 100)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, 100, 0, 0))
        assert process.wait(DEADLINE_SECONDS) == 0
        shown += os.read(ours, 100)
    assert shown == b"(80, 24)\r\n(100, 50)\r\n"
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_lines_of_libraries_are_in_the_log_alone(run, is_terminal):
    """The terminal shows an unfinished progress bar, and the script's own lines unchanged."""
    library = "E0000 00:00:1795638386.023032    7025 cuda_platform.cc:52] failed\n\t [[{{node Next}}]]\n"
    script = run.script(
        f"""
        put = lambda text: (sys.stderr.write(text), sys.stderr.flush())
        put({library!r})
        put("\\r 50 % ")
        while worker == 0 and not (here / "go").exists(): time.sleep(0.01)
        put({library!r} + "\\r100 % \\n" + "my own line\\n")
        """
    )
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    logs = run.directory / "logs"
    with run.start("--workers", 2, "--log-dir", logs, script, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while not (b"50 % " in shown and b"tfdist: 2 workers" in shown):
            shown += os.read(ours, 1000)
        (run.directory / "go").touch()
        assert process.wait(DEADLINE_SECONDS) == 0
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 1000):
                shown += piece
    os.close(ours)
    # On a busy machine, the worker may print before this line, which the launcher writes once all workers have started.
    (first,) = re.findall(rb"tfdist: 2 workers.*?\n", shown := shown.replace(b"\r\n", b"\n"))
    own, _, last = shown.replace(first, b"").partition(b"\ntfdist: ")
    assert own == b"\r 50 % \r100 % \nmy own line"
    assert last.startswith(b"done in ")
    expected = f"{library}\r 50 % {library}\r100 % \nmy own line\n".encode()
    for index in range(2):
        assert (logs / "attempt-0" / f"worker-{index}.log").read_bytes() == expected


FAILURES = {
    "exit code": ("sys.exit(3)", 3, "worker 1 ended with exit code 3"),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker 1 was killed by SIGKILL"),
    "exception": ("raise ValueError('on purpose')", 1, "ValueError: on purpose"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_first_failure_is_logged_and_ends_its_peers(run, name):
    fault, expected, words = FAILURES[name]
    script = run.script(
        ARRIVE
        + f"""
if worker == 1:
    while len(list(here.glob("pid-*"))) < 3: time.sleep(0.01)
    for i in range(100): print("line", i)
    {fault}
time.sleep(60)
"""
    )
    code, _, err = run.finish("--workers", 3, script)
    assert code == expected and words in err
    assert ("Traceback" if name == "exception" else "line 99") in err and "line 60\n" not in err
    assert run.gone()
    (log_dir,) = run.log_dirs()  # kept, and named in the output
    assert str(log_dir) in err and "line 0\n" in (log_dir / "attempt-0" / "worker-1.log").read_text()


def test_a_failing_chief_is_logged_too(run):
    code, _, err = run.finish("--workers", 2, run.script("sys.exit(4 if worker == 0 else time.sleep(60))"))
    assert code == 4 and "worker 0 ended with exit code 4" in err.splitlines()[-1]


def test_a_killed_worker_is_the_first_failure_although_its_peers_fail_too(run):
    script = run.script(
        ARRIVE
        + """
while len(list(here.glob("pid-*"))) < 3: time.sleep(0.01)
if worker == 2:
    os.kill(os.getpid(), signal.SIGKILL)
# Peers notice a little later.
while pathlib.Path(f"/proc/{(here / 'pid-2').read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
sys.exit(1)
"""
    )
    code, _, err = run.finish("--workers", 3, script)
    assert code == 137 and "worker 2 was killed by SIGKILL" in err


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(run):
    script = run.script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + ARRIVE
        + """
if worker == 1:
    while len(list(here.glob("pid-*"))) < 2: time.sleep(0.01)
    sys.exit(5)
time.sleep(1000)
"""
    )
    start = time.monotonic()
    code, _, _ = run.finish("--workers", 2, "--grace-seconds", 1, script)
    assert code == 5 and run.gone() and time.monotonic() - start > 1


def test_a_worker_may_use_its_grace_period(run):
    script = run.script(
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), leave('saved', 0), sys.exit(0)))\n"
        + ARRIVE
        + """
if worker == 1:
    while len(list(here.glob("pid-*"))) < 2: time.sleep(0.01)
    sys.exit(5)
time.sleep(600)
"""
    )
    # A busy machine could use up the 2 s that workers have after a failure.
    program = "from tfdist.launch import cli, supervisor; supervisor._FAILURE_GRACE_SECONDS = 100.0; exit(cli.main())"
    command = [sys.executable, "-c", program, "run", "--max-restarts=0", "--grace-seconds=100", "--workers=2", script]
    environ = {**os.environ, "TMPDIR": str(run.directory / "tmp")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 5 and (run.directory / "saved").exists(), done.stderr


def test_child_processes_of_a_worker_end_with_it(run):
    script = run.script(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        leave(f"pid-child-{worker}", child.pid)
        """
    )
    code, _, err = run.finish("--workers", 2, script)
    assert code == 0, err
    assert len(run.pids()) == 2 and run.gone()


def test_child_processes_of_a_worker_live_while_it_saves(run):
    script = run.script(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        def save(*_):
            time.sleep(0.5)
            os._exit(75 if child.poll() is None else 1)
        signal.signal(signal.SIGTERM, save)
        leave(f"pid-child-{worker}", child.pid)
        time.sleep(60)
        """
    )
    with run.start("--workers", 2, script) as process:
        run.wait_for_pids(2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75 and run.gone()


# Name: the signal to `tfdist run`, the signal to its workers, their exit code, its own exit code.
ASKED = {
    "not saved, SIGINT": (signal.SIGINT, signal.SIGINT, 3, 130),
    "done, SIGTERM": (signal.SIGTERM, signal.SIGTERM, 0, 0),
    "not saved, SIGHUP": (signal.SIGHUP, signal.SIGTERM, 3, 129),
    "saved, SIGHUP": (signal.SIGHUP, signal.SIGTERM, 75, 75),
    "saved, SIGUSR1": (signal.SIGUSR1, signal.SIGTERM, 75, 75),
    "not saved, SIGUSR2": (signal.SIGUSR2, signal.SIGTERM, 3, 140),
}


@pytest.mark.parametrize(
    "name",
    [
        *("not saved, SIGINT", "done, SIGTERM", "saved, SIGHUP"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("not saved, SIGHUP", "saved, SIGUSR1", "not saved, SIGUSR2")
        ),
    ],
)
def test_a_signal_is_forwarded_to_the_workers_and_sets_the_exit_code(run, name):
    signum, asks, exit_code, expected = ASKED[name]
    script = run.script(
        f"signal.signal({asks:d}, lambda *_: (leave(f'heard-{{worker}}', 0), sys.exit({exit_code})))\n"
        + ARRIVE
        + "time.sleep(60)"
    )
    with run.start("--workers", 2, script) as process:
        run.wait_for_pids(2)
        process.send_signal(signum)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == expected and run.gone()
    assert len(list(run.directory.glob("heard-*"))) == 2


DEAF = "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n" + ARRIVE + "time.sleep(60)"


def test_a_worker_that_ignores_a_forwarded_signal_is_killed(run):
    with run.start("--workers", 2, "--grace-seconds", 0.5, run.script(DEAF)) as process:
        run.wait_for_pids(2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 143 and run.gone()


def test_signals_within_a_second_are_one_request(monkeypatch):
    now = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(cli, "time", types.SimpleNamespace(monotonic=lambda: now.now))
    with cli._caught_signals() as caught:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
            now.now += 0.4
        assert caught == [signal.SIGINT]
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGINT, signal.SIGTERM]


def test_a_second_separate_ctrl_c_kills_at_once(run):
    with run.start("--workers", 2, "--grace-seconds", 600, run.script(DEAF)) as process:
        run.wait_for_pids(2)
        process.send_signal(signal.SIGINT)
        while "SIGINT: ending the workers" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(1.2)  # A request within a second of the first counts as the same.
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130 and run.gone()


@pytest.mark.parametrize("tee", [(), ("--tee",)], ids=["plain", "tee"])
def test_workers_end_with_a_killed_launcher(run, tee):
    with run.start("--workers", 2, *tee, run.script(DEAF)) as process:
        run.wait_for_pids(2)
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
    assert run.gone()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_output_is_dropped_if_the_streams_are_closed(run, closed):
    """The guard must not read the output either, or it would kill the process groups of the printed numbers."""
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    script = run.script(
        f"""
        child = subprocess.Popen(["sleep", "1000"])
        print({bystander.pid}, file=sys.stderr)
        print({bystander.pid})
        leave(f"pid-child-{{worker}}", child.pid)
        time.sleep(1000)
        """
    )
    command = shlex.join([sys.executable, "-m", "tfdist.launch.cli", "run", "--workers", "2", script])
    env = {**os.environ, "TMPDIR": str(run.directory)}
    try:
        with subprocess.Popen(f"exec {command} {closed}", shell=True, env=env, stderr=subprocess.DEVNULL) as process:
            try:
                run.wait_for_pids(2)
            finally:
                process.kill()
        assert run.gone() and bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_log_dir_serves_one_run_at_a_time(run):
    command = ["--workers", 1, "--log-dir", run.directory / "logs", run.script(ARRIVE + "time.sleep(600)")]
    with run.start(*command) as first:
        run.wait_for_pids(1)
        code, _, err = run.finish(*command)
        assert code == 2 and f"process {first.pid} on " in err and "another --log-dir" in err
        log = run.directory / "logs" / "attempt-0" / "worker-0.log"
        assert log.exists() and is_alive(run.pids()["pid-0"])
        first.kill()
    assert run.gone()
    code, _, err = run.finish(*command[:-1], run.script('print("next")'))
    assert code == 0 and log.read_text() == "next\n", err
    assert {path.name for path in (run.directory / "logs").iterdir()} == {"attempt-0", "earlier", "run.json"}


def test_hosts_may_share_a_log_dir(run):
    ports = free_ports(2)
    script = run.script(ARRIVE + 'while len(list(here.glob("pid-*"))) < 2: time.sleep(0.01)')
    configs = [ClusterSpec.local(2, index, ports).to_json() for index in range(2)]
    both = [run.start("--log-dir", run.directory / "logs", script, env={"TF_CONFIG": config}) for config in configs]
    outputs = [process.communicate(timeout=DEADLINE_SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs


@pytest.mark.parametrize("code", [0, 3])
def test_ended_workers_of_a_run_are_noticed_although_sigchld_is_ignored(run, code):
    def ignore():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    script = run.script(f"sys.exit({code} if worker else subprocess.run(['false']).returncode - 1)")
    found, _, err = run.finish("--workers", 2, script, preexec_fn=ignore)
    assert found == code and "Traceback" not in err, err


def test_without_a_temporary_directory_a_log_dir_is_required(run):
    program = "import sys, tempfile; tempfile.tempdir = '/proc/here'; from tfdist.launch.cli import main; main()"
    command = [sys.executable, "-c", program, "run", "--workers", "1", run.script("")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 2 and "the temporary directory is not writable" in done.stderr
    assert done.stderr.endswith("give --log-dir\n") and "Traceback" not in done.stderr


# Arguments, and words that the error must contain.
WRONG = {
    "no script": (["--workers", 2], "script.py"),
    "no workers": (["script.py"], "--workers"),
    "zero workers": (["--workers", 0, "script.py"], "at least 1, got 0"),
    "half a worker": (["--workers", 1.5, "script.py"], "1.5"),
    "zero devices": (["--workers", 1, "--devices-per-worker", 0, "script.py"], "at least 1, got 0"),
    "negative grace": (["--workers", 1, "--grace-seconds", -1, "script.py"], "at least 0, got -1"),
    "grace without end": (["--workers", 1, "--grace-seconds", "nan", "script.py"], "got nan"),
    "more workers than any machine has": (["--workers", "9" * 20, "script.py"], "a number of 20 digits"),
    "more workers than this machine can start": (["--workers", 10**6, "script.py"], " workers, got 1000000"),
    "fewer than none": (["--workers", 2, "--min-workers", 0, "script.py"], "at least 1, got 0"),
    "more than all": (["--workers", 2, "--min-workers", 3, "script.py"], "--min-workers needs a number from 1 to"),
    "restarts": (["--workers", 2, "--max-restarts", -1, "script.py"], "at least 0, got -1"),
    "missing script": (["--workers", 2, "nowhere.py"], "no script 'nowhere.py'"),
    "missing module": (["--workers", 2, "-m", "nowhere.train"], "no module 'nowhere.train'"),
    "log dir is a file": (["--workers", 2, "--log-dir", "script.py", "script.py"], "--log-dir script.py"),
    "log dir not writable": (["--workers", 2, "--log-dir", "/proc/here", "script.py"], "--log-dir /proc/here"),
    "two ways": (["--workers", 2, "--slurm", "script.py"], "not allowed with"),
    "port of nobody": (["--workers", 2, "--base-port", 5000, "script.py"], "--slurm or --mpi"),
    "unknown option": (["--worker", 2, "script.py"], "unrecognized arguments: --worker; did you mean --workers"),
    "unknown option alone": (["--worker=2"], "did you mean --workers instead of --worker?"),
    "far from any option": (["-n", 2, "--xyz", "script.py"], "unrecognized arguments: --xyz\n"),
    "workers in words": (["--workers", "two", "script.py"], "needs a whole number of at least 1, got two"),
    "seconds in words": (["-n", 1, "--grace-seconds", "soon", "script.py"], "seconds of at least 0, got soon"),
    "after the script": (["script.py", "--workers", 2], "before the script: tfdist run --workers 2 script.py"),
    "short, after it": (["script.py", "--lr", 1, "-n", 2, "--x"], "tfdist run -n 2 script.py"),
    "in one, after it": (["script.py", "--workers=2", "x"], "tfdist run --workers=2 script.py"),
    "flag, after it": (["script.py", "--slurm", "--x"], "tfdist run --slurm script.py"),
}


def test_an_option_after_the_script_is_named(run):
    script = run.script("print(sys.argv)")
    code, _, err = run.finish("--workers", 1, script, "--lr", 1, "--tee", "--log-dir=logs", "--help")
    assert code == 0 and "--tee comes after the script, so it is an argument of the script" in err, err
    code, _, err = run.finish("--workers", 1, script, "--help", "-n", 2)
    assert code == 0 and "comes after" not in err, err


def test_hints_know_all_options():
    parser = CommandParser(prog="tfdist run")
    cli._add_run_arguments(parser)
    assert set(parser.options()) == {option for action in parser._actions for option in action.option_strings}


# Runs commands, given as JSON, in forks of one process, since importing takes longer than a refusal.
COMMANDS = """
import json, os, sys
from tfdist.launch import cli

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}-{number}", os.O_CREAT | os.O_WRONLY), stream)
        sys.exit(cli.main(arguments))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Returns the exit code, the output and the error of each wrong command; none has left a process or a folder."""
    run = Run(tmp_path_factory.mktemp("refusals"))
    run.script(ARRIVE)
    commands = [["run", "--max-restarts=0", *map(str, arguments)] for arguments, _ in WRONG.values()]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=run.directory,
        env={**os.environ, "TMPDIR": str(run.directory / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    codes = [int(line) for line in done.stdout.split()]
    assert len(codes) == len(WRONG) and run.pids() == {} and run.log_dirs() == []
    texts = [[(run.directory / f"{name}-{i}").read_text() for name in ("out", "err")] for i in range(len(codes))]
    return {name: (code, *text) for name, code, text in zip(WRONG, codes, texts, strict=True)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_refused_before_workers_start(refusals, name):
    code, out, err = refusals[name]
    assert code == 2 and WRONG[name][1] in err and out == "" and "Traceback" not in err


def test_a_tf_config_without_a_cluster_is_refused(run):
    alone = '{"task": {"type": "worker", "index": 0}}'
    code, _, err = run.finish(run.script(ARRIVE), env={"TF_CONFIG": alone})
    assert code == 1 and "TF_CONFIG names no cluster" in err and run.pids() == {}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"cluster": ' + "9" * 9000 + "}"], ids=["brackets", "digits"])
def test_an_unreadable_tf_config_is_refused_with_a_short_error(run, text):
    code, _, err = run.finish(run.script(ARRIVE), env={"TF_CONFIG": text})
    assert code == 1 and "TF_CONFIG must be JSON" in err and len(err) < 1000 and "Traceback" not in err
    assert run.pids() == {}


@pytest.mark.parametrize(
    ("limits", "most", "why"),
    [
        (WorkerLimits(1024, 1 << 20, 1 << 40), 160, "ulimit -n"),
        (WorkerLimits(1 << 20, 100, 1 << 40), 50, "ulimit -u"),
        (WorkerLimits(1 << 20, 1 << 20, 64 << 20), 4, "64 MiB of memory"),
        (WorkerLimits(1 << 40, 1 << 40, 1 << 60), 50_000, "TCP port"),
        (WorkerLimits(10, 1 << 20, 1 << 40), 0, "ulimit -n"),
    ],
)
def test_the_number_of_workers_is_limited_by_the_machine(limits, most, why):
    assert most == 0 or refusal(most, limits) is None
    assert why in refusal(most + 1, limits) and f"at most {most} workers" in refusal(most + 1, limits)


@pytest.mark.parametrize("name", ["run", "bench", "data-service", "report"])
def test_the_command_is_also_a_module_and_shows_examples(name):
    command = [sys.executable, "-m", "tfdist", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: tfdist {name}"), done.stderr
    assert f"\n  tfdist {name} " in done.stdout.partition("examples:")[2]


def test_a_group_that_cannot_start_leaves_nothing_running(tmp_path):
    specs = [ClusterSpec.local(2, index, free_ports(2)) for index in range(2)]
    group = WorkerGroup([str(tmp_path / "no-such-program")], specs, log_dir=tmp_path)
    with pytest.raises(ClusterError, match="could not be started"):
        group.start()
    assert group.running == () and group.not_started == 0


class Unstartable(threading.Thread):
    """A thread beyond the limit of the system."""

    def start(self):
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("threads", "worker"), [(0, 0), (1, 0), (2, 1)])
def test_a_group_whose_output_cannot_be_copied_leaves_nothing_running(threads, worker, tmp_path, monkeypatch):
    ports = free_ports(2)
    specs = [ClusterSpec.local(2, index, ports) for index in range(2)]
    group = WorkerGroup(["sleep", "100"], specs, log_dir=tmp_path)
    kinds = iter([threading.Thread] * threads + [Unstartable])
    monkeypatch.setattr(worker_output.threading, "Thread", lambda **arguments: next(kinds)(**arguments))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ClusterError, match=rf"output of worker {worker} could not be copied: can't start new thread"):
        group.start()
    assert group.running == () and group.not_started == worker and len(group.exits) == 2
    assert len(os.listdir("/proc/self/fd")) == before and not any(is_alive(each.pid) for each in group.exits)


@pytest.mark.parametrize("cause", ["no program", "no thread"])
def test_a_worker_that_cannot_be_started_again_keeps_no_descriptors(cause, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 100\n" if cause == "no thread" else "#!/bin/sh\n")
    program.chmod(0o755)
    group = WorkerGroup([str(program)], [ClusterSpec.local(1, 0, free_ports(1))], log_dir=tmp_path)
    group.start()
    for pid in group.pids.values():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: (group.poll(), group.exits)[1])
    group.forget(0)
    before = len(os.listdir("/proc/self/fd"))
    if cause == "no program":
        program.unlink()
    else:
        monkeypatch.setattr(worker_output.threading, "Thread", Unstartable)
    with pytest.raises(ClusterError, match=r"could not be started|could not be copied: can't start new thread"):
        group.start_again(0)
    assert len(os.listdir("/proc/self/fd")) == before and group.running == ()
    group.kill()
