"""`tfdist run` restarts a job until it is done; if it gives up, it names the first failure."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from launched import DEADLINE_SECONDS, eventually, is_alive, nothing_left
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import TFConfigError
from tfdist.events.event_file import ASKED, FORMAT, read_events, read_header
from tfdist.events.phase_names import CALLBACK, COMPUTE, EXCHANGE, SAVE, START, TRACING
from tfdist.launch import WorkerExit, supervisor
from tfdist.launch.late_workers import LateWorkers
from tfdist.launch.stopped_workers import StoppedWorkers
from tfdist.members_record import MembersRecord
from tfdist.report.goodput import AGAIN, LOST, REST, RESTART, UNRECORDED
from tfdist.report.goodput_table import account_of
from tfdist.report.recorded_run import read_run
from tfdist.report.report_command import lines_of
from tfdist.run_files import RunFiles

PREEMPTED = 75
TENSORFLOW_SECONDS = 400

# Code that workers of every attempt need. `meet` waits for all workers of the attempt, `await_end` and `await_report`
# for the end of one and for its failure report.
ATTEMPT = """
attempt, run_dir = int(os.environ["TFDIST_ATTEMPT"]), pathlib.Path(os.environ["TFDIST_RUN_DIR"])
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
def meet():
    leave(f"pid-{attempt}-{worker}", os.getpid())
    while len(list(here.glob(f"pid-{attempt}-*"))) < len(cluster): time.sleep(0.01)
def commit(step, folder="backup"):
    (run_dir / f"committing-{worker}").write_text(f"{step}\\n{folder}")
    (run_dir / f"committing-{worker}").rename(run_dir / "committed")
def on_sigterm(act):
    signal.signal(signal.SIGTERM, lambda *_: act())
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def await_end(peer):
    stat = pathlib.Path("/proc", (here / f"pid-{attempt}-{peer}").read_text(), "stat")
    try:
        while stat.read_text().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    except (FileNotFoundError, ProcessLookupError):
        pass
def await_report(peer):
    while not (run_dir / f"attempt-{attempt}" / f"failure-{peer}.json").exists(): time.sleep(0.01)
"""


@pytest.fixture
def run(tmp_path):
    with nothing_left(tmp_path) as run:
        run.logs = tmp_path / "logs"
        yield run


def script(run, body):
    return run.script(ATTEMPT + textwrap.dedent(body))


def finish(run, workers, body, *options, restarts=3):
    """Returns the exit code and standard error of a run."""
    options = ["--workers", workers, "--log-dir", run.logs, *options]
    code, _, err = run.finish(*options, script(run, body), restarts=restarts)
    return code, err


def attempts(run):
    """Returns the number of workers in each attempt."""
    folders = sorted(run.logs.glob("attempt-*"), key=lambda path: int(path.name.partition("-")[2]))
    return [len(list(folder.glob("worker-*.log"))) for folder in folders]


def failure(run):
    return json.loads((run.logs / "failure.json").read_text())


# Restarts.


def test_a_failed_group_is_started_again_on_fresh_ports(run):
    code, err = finish(
        run,
        2,
        """
        print("attempt", attempt, "worker", worker)
        (here / f"cluster-{attempt}-{worker}").write_text(str(cluster))
        meet()
        if attempt == 0: time.sleep(60) if worker == 0 else die()
        """,
    )
    assert code == 0 and attempts(run) == [2, 2]
    clusters = [{(run.directory / f"cluster-{k}-{i}").read_text() for i in range(2)} for k in range(2)]
    assert [len(each) for each in clusters] == [1, 1] and clusters[0] != clusters[1]
    for k, i in itertools.product(range(2), range(2)):
        assert (run.logs / f"attempt-{k}" / f"worker-{i}.log").read_text() == f"attempt {k} worker {i}\n"
    assert "attempt 0: 2 workers" in err and "failed: worker 1 was killed by SIGKILL" in err
    assert [each["outcome"] for each in failure(run)["attempts"]] == ["failed", "done"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_without_a_commit_there_are_no_more_restarts_than_allowed(run, restarts):
    code, err = finish(run, 2, "meet()\nsys.exit(3) if worker == 1 else time.sleep(60)", restarts=restarts)
    assert code == 3 and attempts(run) == [2] * (restarts + 1)
    assert "tfdist: failed after" in err and str(run.logs) in err
    assert failure(run)["outcome"] == "failed" and failure(run)["run_exit_code"] == 3


def test_a_job_that_commits_is_restarted_without_limit(run):
    body = "commit(attempt * 10)\nif attempt < 4: die()"
    code, err = finish(run, 1, body, restarts=1)
    assert code == 0 and attempts(run) == [1] * 5
    assert [each["committed"] for each in failure(run)["attempts"]] == [k * 10 for k in range(5)]
    assert " in " not in "".join(line for line in err.splitlines() if "starting again" in line)  # no pauses


def test_commits_count_as_progress_even_if_peers_tell_the_step_of_a_kill(run):
    body = f"""
        header = dict(format={FORMAT!r}, worker=worker, ns=1, time=time.time() + 60, why="asked", step=attempt * 10)
        (run_dir / f"attempt-{{attempt}}" / f"events-{{worker}}.jsonl").write_text(json.dumps(header) + "\\n")
        commit(attempt * 10)
        meet()
        if attempt < 4: time.sleep(60) if worker == 0 else die()
    """
    code, err = finish(run, 2, body, restarts=1)
    assert code == 0 and attempts(run) == [2] * 5, err
    assert [each["failure"]["step"] for each in failure(run)["attempts"][1:4]] == [10, 20, 30]


def test_an_old_commit_does_not_count_as_progress(run):
    code, _ = finish(run, 1, "commit(10)\nsys.exit(4)", restarts=1)
    assert code == 4 and attempts(run) == [1] * 2


def test_a_repeated_failure_at_the_same_place_ends_the_job_after_any_time(run):
    code, _ = finish(run, 1, "sys.exit(4)", "--restart-window-seconds", 0, restarts=2)
    assert code == 4 and attempts(run) == [1] * 3


FILE = "FileNotFoundError(2, 'No such file or directory', 'a.npy')"
NAN = "RuntimeError('NaN or Inf loss encountered at batch 3. Loss value: nan.')"


@pytest.mark.parametrize(
    ("fails", "tries", "words"),
    [
        (f"import tfdist; raise {FILE}", 1, "does not fix a configuration error"),
        (f"raise {FILE}", 1, "does not fix a configuration error"),  # before tfdist could report it
        ("import nothing_of_that_name", 1, "does not fix a program error"),
        pytest.param("exec('x = = 1')", 1, "does not fix a program error", marks=pytest.mark.exhaustive),
        ("import tfdist; raise KeyError('x') from ValueError()", 1, "does not fix a program error"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--odd'])", 1, "configuration error"),
        (f"import tfdist; raise {NAN}", 1, "no backup to continue from"),
        (f"import tfdist; commit(3); raise {NAN}", 2, "read the same data again and failed again"),
        ("import tfdist; raise RuntimeError('of a kind that nobody knows')", 2, ""),
        pytest.param("import tfdist; raise OSError(5, 'Input/output error')", 3, "", marks=pytest.mark.exhaustive),
        ("import tfdist; raise ValueError('of no use') from OSError(5, 'Input/output error')", 3, ""),
        ("die()", 3, ""),
        pytest.param("sys.exit(7)", 3, "", marks=pytest.mark.exhaustive),
    ],
)
def test_a_failure_is_retried_only_if_a_restart_may_help(run, fails, tries, words):
    workers = 2 if "nobody" in fails or fails == "die()" else 1  # One fails sooner; with two, each may be the first.
    _, err = finish(run, workers, f"meet()\n{fails}", restarts=2)
    assert attempts(run) == [workers] * tries, err
    last = err.strip().splitlines()[-1]
    described = failure(run)["reason"] or {"die()": "was killed by SIGKILL"}.get(fails, "exit code")
    assert "failed after" in last and described in last and words in last, err
    assert sum(described in line for line in err.splitlines() if line.startswith("tfdist: ")) <= 2 * tries - 1, err


def test_data_errors_are_compared_by_step_and_earlier_commits_do_not_count(run):
    body = f"""
        import tfdist
        from tfdist.failure_report import note_step
        commit(attempt)
        time.sleep(0.5)
        note_step([3, 8, 8][attempt])
        raise {NAN}
    """
    code, err = finish(run, 1, body)
    assert code == 1 and attempts(run) == [1] * 3, err
    assert failure(run)["step"] == 8 and failure(run)["category"] == "data"


def test_the_reason_has_the_cause_and_the_line_of_the_script(run):
    body = """
        import tfdist
        lines = ["in user code:", "", '    File "a.py", line 3, in f', "", "    it is here"]
        def inner(): raise ConnectionError("\\n".join(lines))
        inner()
    """
    _, err = finish(run, 1, body, restarts=0)
    assert failure(run)["reason"] == "it is here" and failure(run)["line"] == "a.py:3 in f"
    assert "raised ConnectionError: it is here (a.py:3 in f)" in err.splitlines()[-1]


def test_a_script_that_python_cannot_compile_starts_no_worker(run):
    code, err = finish(run, 2, "x = = 1")
    assert code == 2 and "syntax error at line" in err and attempts(run) == []


@pytest.mark.parametrize(
    ("commits", "times"),
    [
        ("", 1),
        pytest.param("if attempt == 1: commit(1)", 1, marks=pytest.mark.exhaustive),
        ("commit(1)", 0),
        pytest.param("(run_dir / 'restored').touch()", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_first_restart_without_a_backup_warns_that_training_starts_over(run, commits, times):
    code, err = finish(run, 1, f"{commits}\nif attempt < 2: die()")
    assert code == 0 and attempts(run) == [1] * 3, err
    assert err.count("training starts over at epoch 1") == err.count("BackupAndRestore") == times


CACHES = """
    import tfdist
    class AlreadyExistsError(Exception): pass
    def fill(name):
        lock = here / f"{name}_0.lockfile"
        try: lock.open("x").write("Created at: 1")
        except FileExistsError:
            raise AlreadyExistsError(f"concurrent - cache lockfile already exists ('{lock}'). If you are") from None
"""


def test_cache_locks_of_killed_workers_are_removed(run):
    code, err = finish(
        run,
        2,
        CACHES + "    if attempt: time.sleep(0.3)\n    fill(f'cache-{worker}')\n    meet()\n    if not attempt: die()",
    )
    assert code == 0 and attempts(run) == [2] * 3, err
    assert "a killed worker had left the lock file" in err


def test_workers_that_fill_one_data_cache_get_an_error_at_once(run):
    code, err = finish(run, 2, CACHES + "    fill('cache')\n    meet()\n    time.sleep(60)")
    assert code == 1 and attempts(run) == [2], err
    assert "two iterators fill one data cache" in err.splitlines()[-1] and "TFDIST_SLOT" in err.splitlines()[-1]
    assert "cache_0.lockfile" in err.splitlines()[-1]


def test_repeated_training_of_committed_steps_is_no_progress_and_tried_only_twice(run):
    body = """
        commit(5)
        commit(10 - attempt)  # The supervisor may see this commit only.
        sys.exit(4)  # after a fit that removes its backups, on other storage than a disk
    """
    code, _ = finish(run, 1, body, restarts=3)
    assert code == 4 and attempts(run) == [1] * 2


def test_a_stage_with_its_own_backup_folder_counts_as_progress(run):
    body = """
        commit(*[(1000, "first"), (50, "second"), (100, "second")][attempt])
        time.sleep(0.5)
        if attempt < 2: sys.exit(4)
    """
    code, err = finish(run, 1, body, restarts=3)
    assert code == 0 and attempts(run) == [1] * 3, err
    assert [each["again"] for each in failure(run)["attempts"]] == [False] * 3


@pytest.mark.parametrize("code", [0, 3])
def test_finished_backups_are_removed_at_the_end_of_the_job(code, run):
    body = f"""
        from tfdist.backup import backup_cleanup
        from tfdist.backup.commit_store import CommitStore, Draft
        store = CommitStore(str(here / "backup"))
        store.claim()
        draft = Draft(store.directory, "abc", 1)
        store.commit(draft, {{"files": {{"state.bin": draft.write("state.bin", [b"state"])}}, "workers": 1}}, keep=2)
        backup_cleanup.leave(store.directory)
        backup_cleanup.leave(str(here / "removed by the script" / "backup"))
        sys.exit({code})
    """
    assert finish(run, 1, body, restarts=0)[0] == code
    assert (run.directory / "backup" / "step-1").exists() == (run.directory / "backup").exists() == bool(code)
    assert not (run.directory / "removed by the script").exists()
    assert code or not list(run.logs.glob("done-with-*"))


def test_files_of_the_previous_run_are_moved_aside(run):
    def files():
        return sorted(str(path.relative_to(run.logs)) for path in run.logs.rglob("*") if path.is_file())

    assert finish(run, 3, "commit(5)\nsys.exit(1)", restarts=0)[0] == 1
    logs = [f"attempt-0/worker-{worker}.log" for worker in range(3)]
    assert files() == sorted(["committed", "failure.json", "run.json", *logs])
    # As in a job that goes on without lost workers; otherwise the next run would take itself for one.
    RunFiles(run.logs).tell_of_members(0, MembersRecord([0], {}, {}, {}, 60.0))
    logs.append("attempt-0/earlier-failure-1.json")
    (run.logs / logs[-1]).write_text("{}")
    (run.logs / "attempt-0" / "mine.txt").write_text("kept")
    assert finish(run, 1, "print((run_dir / 'committed').exists())")[0] == 0
    own = ["attempt-0/mine.txt", "attempt-0/worker-0.log", "run.json"]
    assert files() == sorted([*own, *(f"earlier/{name}" for name in ("failure.json", "run.json", *logs))])
    assert (run.logs / "attempt-0" / "worker-0.log").read_text() == "False\n"
    assert json.loads((run.logs / "earlier" / "failure.json").read_text())["run_exit_code"] == 1
    assert finish(run, 1, "print(here)")[0] == 0
    assert files() == sorted([*own, "earlier/attempt-0/worker-0.log", "earlier/run.json"])
    assert (run.logs / "earlier" / "attempt-0" / "worker-0.log").read_text() == "False\n"


def test_a_stopped_worker_does_not_delay_the_restart(run):
    body = "meet()\nif attempt == 0: os.kill(os.getpid(), signal.SIGSTOP) if worker == 0 else die()"
    code, _ = finish(run, 2, body, "--grace-seconds", 600)
    assert code == 0 and attempts(run) == [2, 2]
    assert failure(run)["attempts"][0]["seconds"] < 300


def test_a_deleted_run_folder_does_not_end_the_job(run):
    code, _ = finish(run, 1, "import shutil\nif attempt == 0: shutil.rmtree(run_dir); die()")
    assert code == 0


# The first failure.

NAMED = """
import atexit
class UnavailableError(Exception): pass
"""

# Code of each worker; the first worker to fail, its exit code, and words that describe the failure. A worker whose
# report comes first exits only after the report of the cause, as the supervisor waits only a moment for the cause.
FIRST = {
    "killed, and its peers raise": (
        ["await_end(2); raise UnavailableError()", "await_end(2); raise UnavailableError()", "die()"],
        (2, 137, "was killed by SIGKILL"),
    ),
    "killed, and its peers abort": (
        ["await_end(1); os.abort()", "die()", "await_end(1); os.abort()"],
        (1, 137, "was killed by SIGKILL"),
    ),
    "raises, and takes long to end": (
        [
            "await_report(1); raise UnavailableError('peer is gone')",
            "atexit.register(time.sleep, 1); raise ValueError('the cause')",
        ],
        (1, 1, "raised ValueError: the cause"),
    ),
    "all raise": (
        [
            "atexit.register(await_report, 1); raise UnavailableError()",
            "await_report(0); await_report(2); raise KeyError('later')",
            "atexit.register(await_report, 1); raise UnavailableError()",
        ],
        (1, 1, "raised KeyError: 'later'"),
    ),
    "raises, and another repeats it": (
        [
            "await_report(1); raise ValueError('the cause')",
            "atexit.register(await_report, 0); raise ValueError('The chief reports: the cause')",
        ],
        (0, 1, "raised ValueError: the cause"),
    ),
    "exits without a word": (["await_end(1); raise UnavailableError()", "sys.exit(9)"], (1, 9, "exit code 9")),
    "raises where there is no tfdist": (
        ["del sys.modules['tfdist']; sys.excepthook = sys.__excepthook__; 1 / 0"],
        (0, 1, ""),
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_failure_is_found_among_its_consequences(run, name):
    faults, (worker, exit_code, words) = FIRST[name]
    cases = "\n".join(f"elif worker == {i}: {fault}" for i, fault in enumerate(faults))
    code, err = finish(run, len(faults), f"import tfdist\n{NAMED}\nmeet()\nif False: pass\n{cases}", restarts=0)
    first = failure(run)
    assert code == exit_code == first["exit_code"] and first["worker"] == worker
    assert f"worker {worker} " in err and words in err


def test_an_exception_is_reported_completely(run):
    code, err = finish(
        run,
        2,
        """
        import tfdist
        before, told = sys.excepthook, []
        sys.excepthook = lambda *error: (print("my own hook", error[0].__name__), before(*error))
        def inner(): raise OSError(28, "no room")
        if worker == 1: inner()
        time.sleep(60)
        """,
        restarts=0,
    )
    first = failure(run)
    assert (first["worker"], first["attempt"], first["kind"], first["exception"]) == (1, 0, "exception", "OSError")
    assert first["message"] == "[Errno 28] no room" and first["host"] == socket.gethostname()
    assert "in inner" in first["stack"] and "script.py" in first["stack"]
    assert first["signal"] is None and abs(time.time() - first["time"]) < DEADLINE_SECONDS
    assert first["log"] == str(run.logs / "attempt-0" / "worker-1.log")
    assert "my own hook OSError" in first["output"] and first["stack"] in err
    assert code == 1 and first["attempts"][0]["failure"]["stack"] == first["stack"]


def test_failures_of_child_processes_and_threads_are_not_reported_for_the_worker(run):
    code, _ = finish(
        run,
        1,
        """
        import tfdist, threading
        code = "import tfdist; raise ValueError('of a child')"
        assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
        sys.exit(6)
        """,
        restarts=0,
    )
    assert code == 6 and (failure(run)["kind"], failure(run)["exception"]) == ("exit", None)


def test_a_worker_that_reports_a_failure_but_still_runs_has_failed(run):
    body = """
        import tfdist, threading
        meet()
        if worker == 1:
            threading.Thread(target=time.sleep, args=(100,)).start()
            raise ValueError("on purpose")
        time.sleep(100)
    """
    code, err = finish(run, 2, body, "--grace-seconds", 1, restarts=0)
    assert code == 1 and "worker 1 raised ValueError: on purpose" in err and "but still runs" in err
    assert failure(run)["worker"] == 1 and failure(run)["attempts"][0]["seconds"] < 60


@pytest.mark.parametrize(("kind", "tries"), [("RuntimeError", 1), ("TypeError", 0)])
def test_a_member_that_reports_a_failure_but_still_runs_is_killed(kind, tries, run):
    body = f"""
        import tfdist, threading
        from tfdist.members_record import MembersRecord
        from tfdist.run_files import RunFiles
        is_first = not (here / "first").exists()
        if worker == 0:
            RunFiles(run_dir).tell_of_members(0, MembersRecord([0, 1], {{1: 1}}, {{1: 1}}, {{}}, 60.0))
            meet()
            while not (here / "second").exists(): time.sleep(0.01)
        elif not is_first:
            (here / "second").touch()
        else:
            (here / "first").touch()
            meet()
            threading.Thread(target=time.sleep, args=(100,)).start()
            raise {kind}("on purpose")
    """
    code, err = finish(run, 2, body, "--grace-seconds", 1)
    assert code == 1 - tries and attempts(run) == [2], err
    assert "worker 1 reported a failure, but still runs; killing it" in err
    assert ("starting worker 1 again" in err) == bool(tries)  # A mistake of the program ends the job.


def test_workers_that_still_run_after_others_ended_are_named():
    stragglers, exits = LateWorkers(), [WorkerExit(1, 0, 5, 100.0)]
    assert stragglers.tell([], [0, 1, 2], 200.0) is None
    told = [now for now in range(100, 260) if stragglers.tell(exits, [0, 2], now)]
    assert told == [110, 170, 230] and stragglers.tell(exits, [], 300.0) is None
    words = stragglers.tell(exits, [0, 2], 300.0)
    assert words == "worker 1 ended with exit code 0; still running: worker 0, worker 2"


def test_only_workers_stopped_for_long_without_their_supervisor_are_detected():
    asleep = {1}
    stopped = StoppedWorkers(lambda pid: pid in asleep)
    pids = {0: 1, 1: 2}
    assert [now for now in range(20) if stopped.see(pids, now)] == [15, 16, 17, 18, 19]
    asleep.clear()
    assert stopped.see(pids, 20) == []
    asleep.add(2)
    assert not any(stopped.see(pids, now) for now in range(21, 30))
    assert stopped.see(pids, 10_000) == [], "its supervisor was stopped"
    assert stopped.see(pids, 10_010) == [] and [stopped.see(pids, 10_010 + i) for i in (1, 2, 3)][-1] == [1]


def test_stopped_processes_are_detected_by_their_kernel_state():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            states = []
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(process.pid, signum)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WCONTINUED)
                stopped = StoppedWorkers()
                states.append(any(stopped.see({7: process.pid}, now) == [7] for now in range(20)))
            assert states == [True, False]
        finally:
            process.kill()


@pytest.mark.exhaustive
def test_a_worker_that_is_stopped_while_it_starts_is_killed_and_started_again(run):
    body = """
        if os.environ["TFDIST_ATTEMPT"] == "0" and worker == 1: os.kill(os.getpid(), signal.SIGSTOP)
    """
    code, err = finish(run, 2, body)
    assert code == 0 and "worker 1 has been stopped (SIGSTOP)" in err and "worker 1 was killed by SIGKILL" in err


@pytest.mark.parametrize(
    "text",
    [
        *("{", '{"pid": 1, "time": 0}', '{"pid": PID, "time": "now"}'),
        *(pytest.param(text, marks=pytest.mark.exhaustive) for text in ("", "[]")),
    ],
)
def test_an_invalid_report_is_ignored(run, text):
    body = f"""
        text = {text!r}.replace("PID", str(os.getpid()))
        (run_dir / f"attempt-{{attempt}}" / "failure-0.json").write_text(text)
        sys.exit(5)
    """
    assert finish(run, 1, body, restarts=0)[0] == 5
    assert failure(run)["kind"] == "exit"


def test_a_stall_names_its_suspect(run):
    body = """
        from tfdist.failure_report import write_report
        meet()
        if worker == 0:
            write_report("stall", message="no step for 20 s", stack="...", suspect=1, step=7, section="exchange")
            os._exit(76)
        time.sleep(60)
    """
    code, err = finish(run, 2, body, restarts=0)
    first = failure(run)
    assert code == 76 and (first["kind"], first["suspect"], first["step"]) == ("stall", 1, 7)
    assert "worker 0 ended by stall, probably because of worker 1: no step for 20 s" in err


def test_a_worker_that_reports_does_not_load_tensorflow(run):
    code, _ = finish(run, 1, "import tfdist, tfdist.failure_report\nsys.exit('tensorflow' in sys.modules)")
    assert code == 0


# Preemption.


def test_a_group_that_saves_and_leaves_is_restarted_without_counting(run):
    body = """
        meet()
        if attempt < 2:
            if worker == 0:  # the last to leave
                time.sleep(0.5)
                commit(attempt)
            sys.exit(75)
    """
    code, err = finish(run, 2, body, restarts=0)
    assert code == 0 and attempts(run) == [2, 2, 2] and err.count("preempted") == 2
    assert not (run.logs / "failure.json").exists()
    told = json.loads((run.logs / "run.json").read_text())
    assert (told["outcome"], told["run_exit_code"]) == ("done", 0)
    assert [each["outcome"] for each in told["attempts"]] == ["preempted", "preempted", "done"]


def test_a_group_that_is_preempted_repeatedly_without_a_commit_ends_the_job(run):
    code, err = finish(run, 1, "sys.exit(75)", restarts=1)
    assert code == PREEMPTED and attempts(run) == [1, 1] and "without a commit" in err


# The behaviour of worker 1 of two while worker 0 saves; and the exit code.
SAVES = "on_sigterm(lambda: (commit(7), os._exit(75))); meet(); time.sleep(60)"
ENDS = {
    "saves too": (SAVES, PREEMPTED),
    "had finished": ("meet(); sys.exit()", PREEMPTED),
    "fails to save": ("on_sigterm(lambda: os._exit(1)); meet(); time.sleep(60)", 143),
    "is deaf": ("on_sigterm(lambda: None); meet(); time.sleep(60)", 143),
    "knows nothing of it": ("meet(); time.sleep(60)", 143),
}


@pytest.mark.parametrize(
    "name",
    [
        *("saves too", "had finished", "is deaf"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fails to save", "knows nothing of it")),
    ],
)
def test_a_stop_signal_waits_for_the_save_and_reports_it(run, name):
    act, expected = ENDS[name]
    body = f"if worker == 1: {act}\nelse: {SAVES}"
    # A worker that does not end by itself is killed after the grace period.
    options = ["--workers", 2, "--grace-seconds", 30 if expected == PREEMPTED else 1, "--log-dir", run.logs]
    with run.start(*options, script(run, body), restarts=3) as process:
        pids = run.wait_for_pids(2)
        if name == "had finished":
            assert eventually(lambda: not is_alive(pids["pid-0-1"]))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == expected and run.gone() and attempts(run) == [2]


def test_a_signal_to_every_process_saves_without_a_restart(run):
    """Slurm signals the guard too; the guard survives, and ends processes that workers started."""
    body = """
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(signum, lambda *_: (commit(7), time.sleep(0.5), os._exit(75)))
        meet()
        leave(f"pid-ready-{worker}", os.getpid())
        time.sleep(60)
    """
    with run.start("--workers", 2, "--log-dir", run.logs, script(run, body), restarts=3) as process:
        assert eventually(lambda: len(list(run.directory.glob("pid-ready-*"))) == 2)
        own = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(own) == 3
        (guard,) = {*map(int, own)} - {*run.pids().values()}
        # Otherwise the supervisor could see workers that have left before it gets the signal, and start them again.
        for pid, *signals in (
            (process.pid, signal.SIGSTOP),
            *((pid, signal.SIGUSR1) for pid in (guard, *{*run.pids().values()})),
            (process.pid, signal.SIGUSR1, signal.SIGCONT),
        ):
            for signum in signals:
                os.kill(pid, signum)
        time.sleep(0.2)
        assert is_alive(guard)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == PREEMPTED and attempts(run) == [2]


def test_a_stop_signal_in_a_restart_pause_ends_the_job(run):
    with run.start("--workers", 1, "--log-dir", run.logs, script(run, "sys.exit(1)"), restarts=20) as process:
        while "starting again in 2 s" not in (line := process.stderr.readline()):
            assert line, "it ended"
        sent = time.time()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    assert failure(run)["attempts"][-1]["time"] <= sent, "an attempt began after the signal"


# Fewer workers, and more.


def test_a_job_continues_with_fewer_workers_and_later_with_all(run):
    body = """
        (here / f"slot-{attempt}-{worker}").write_text(os.environ["TFDIST_SLOT"])
        meet()
        if attempt < 2: die() if worker == 1 else time.sleep(60)
        if attempt == 2:
            while not (run_dir / "attempt-2" / "make-room").exists(): time.sleep(0.01)
            if worker == 0: commit(1)
            sys.exit(75)
    """
    code, err = finish(run, 4, body, "--min-workers", 3, "--regrow-seconds", 0.5, restarts=2)
    assert code == 0 and attempts(run) == [4, 4, 3, 4], err
    slots = [[(run.directory / f"slot-{k}-{i}").read_text() for i in range(n)] for k, n in enumerate([4, 4, 3, 4])]
    assert slots[2] == ["0", "2", "3"] and all(slots[k] == ["0", "1", "2", "3"] for k in (0, 1, 3))
    assert "worker 1 does not come back; continuing with 3 workers, TFDIST_SLOT 0, 2, 3" in err
    assert [each["outcome"] for each in failure(run)["attempts"]] == ["failed", "failed", "resized", "done"]
    assert not list(run.logs.rglob("make-room"))


def test_a_job_with_fewer_workers_that_saves_no_more_finishes(run):
    """If a `fit` has removed its backups from storage other than a disk, a restart would lose all progress."""
    body = """
        meet()
        if attempt < 2: die() if worker == 1 else time.sleep(60)
        if worker == 0: commit(1)
        while attempt == 2 and not (run_dir / "attempt-2" / "make-room").exists(): time.sleep(0.01)
        leave(f"done-{attempt}-{worker}", 0)
    """
    code, err = finish(run, 3, body, "--min-workers", 2, "--regrow-seconds", 0.5, restarts=2)
    assert code == 0 and attempts(run) == [3, 3, 2], err
    assert len(list(run.directory.glob("done-2-*"))) == 2 and "after their next commit" in err


def test_a_job_does_not_shrink_below_min_workers(run):
    body = "meet()\ndie() if worker == 0 else time.sleep(60)"
    assert finish(run, 3, body, "--min-workers", 2, restarts=2)[0] == 137
    assert attempts(run)[:3] == [3, 3, 2] and min(attempts(run)) == 2


def test_a_job_does_not_shrink_without_min_workers(run):
    assert finish(run, 2, "meet()\ndie() if worker == 1 else time.sleep(60)", restarts=2)[0] == 137
    assert attempts(run) == [2, 2, 2]


# Several hosts.


@contextlib.contextmanager
def on_hosts(run, body, restarts):
    """Starts one `tfdist run` for each of two hosts, both of which are this machine."""
    ports = free_ports(2)
    specs = [ClusterSpec.local(2, index, ports) for index in range(2)]
    command = ["--log-dir", run.logs, script(run, body)]
    with contextlib.ExitStack() as stack:
        starts = [run.start(*command, env={"TF_CONFIG": spec.to_json()}, restarts=restarts) for spec in specs]
        yield ports, [stack.enter_context(start) for start in starts]


def finished(processes, seconds=DEADLINE_SECONDS):
    """Returns the exit codes and the joined standard error of processes."""
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(errors)


SERVES = """
import socket
host, _, port = cluster[worker].rpartition(":")
server = socket.create_server((host, int(port)))
"""


def test_each_host_starts_its_own_worker_again_at_the_address_of_tf_config(run):
    body = (
        SERVES
        + """
meet()
if attempt == 0:
    if worker == 1: die()
    while pathlib.Path(f"/proc/{(here / 'pid-0-1').read_text()}").exists(): time.sleep(0.01)
    raise ConnectionError("peer is gone")
(here / f"done-{worker}").write_text(port)
"""
    )
    with on_hosts(run, body, restarts=1) as (ports, processes):
        codes, errors = finished(processes)
    assert codes == [0, 0], errors
    assert [(run.directory / f"done-{worker}").read_text() for worker in range(2)] == [str(port) for port in ports]
    for worker, words in enumerate(["peer is gone", "was killed by SIGKILL"]):
        folder = run.logs / f"worker-{worker}"
        assert json.loads((folder / "failure.json").read_text())["worker"] == worker
        assert (folder / "attempt-1" / f"worker-{worker}.log").exists()
        assert f"worker {worker}" in errors and words in errors


def test_a_port_in_use_is_waited_for(monkeypatch):
    (port,) = free_ports(1)
    spec, now = ClusterSpec.local(1, 0, [port]), itertools.count()
    with socket.create_server(("127.0.0.1", port)) as other:
        clock = types.SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None)
        monkeypatch.setattr(supervisor, "time", clock)
        with pytest.raises(TFConfigError, match=f"port {port}, but that port is already taken"):
            supervisor._wait_for_port(spec, 3.0)
        clock.sleep = lambda seconds: other.close()
        supervisor._wait_for_port(spec, 3.0)


def test_an_address_that_cannot_be_bound_is_not_retried(run):
    cluster = {"cluster": {"worker": ["no-such-host.invalid:2222", "no-such-host.invalid:2223"]}}
    config = json.dumps({**cluster, "task": {"type": "worker", "index": 0}})
    code, _, err = run.finish(script(run, ""), env={"TF_CONFIG": config}, restarts=3)
    assert code == 1 and "does not resolve" in err and "starting again" not in err


@pytest.mark.parametrize("text", ["", "{}", "nonsense"])
def test_without_a_number_of_workers_there_must_be_a_cluster(run, text):
    code, _, err = run.finish(script(run, ""), env={"TF_CONFIG": text})
    assert code in (1, 2) and "TF_CONFIG" in err and "Traceback" not in err


# Death of the supervisor.


def test_workers_and_their_children_end_with_a_killed_supervisor(run):
    body = """
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(signum, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        leave(f"pid-child-{worker}", child.pid)
        meet()
        if attempt == 0: die() if worker == 1 else time.sleep(60)
        leave(f"pid-ready-{worker}", os.getpid())
        time.sleep(60)
    """
    with run.start("--workers", 2, script(run, body), restarts=1) as process:
        assert eventually(lambda: len(list(run.directory.glob("pid-ready-*"))) == 2)
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
        assert run.gone()


def test_the_guard_forgets_an_ended_worker(run):
    """The process number of a dead worker may be reused."""
    sleepers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    gone, here = (sleeper.pid for sleeper in sleepers)
    code = f"""
        import os
        from tfdist.launch.process_guard import ProcessGuard
        guard = ProcessGuard()
        guard.watch([{gone}, {here}])
        guard.watch([{here}])
        os.kill(os.getpid(), 9)
    """
    try:
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=DEADLINE_SECONDS)
        assert sleepers[1].wait(DEADLINE_SECONDS) == -signal.SIGKILL
        assert sleepers[0].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


# With TensorFlow.

TRAINS = """
os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")
import tensorflow as tf, tfdist
strategy = tfdist.MultiWorkerMirroredStrategy()
leave(f"pid-{attempt}-{worker}", os.getpid())
def total(): return float(strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None))
"""


@pytest.mark.exhaustive
def test_a_killed_worker_is_the_first_failure_and_the_job_continues(run):
    body = (
        TRAINS
        + """
for step in range(20):
    assert total() == 2
    if attempt == 0 and worker == 1 and step == 5: die()
    if attempt == 0: time.sleep(0.1)
"""
    )
    with run.start("--workers", 2, "--log-dir", run.logs, script(run, body), restarts=1) as process:
        codes, errors = finished([process], TENSORFLOW_SECONDS)
    assert codes == [0], errors
    assert (failure(run)["worker"], failure(run)["signal"]) == (1, "SIGKILL")


@pytest.mark.exhaustive
def test_two_hosts_restart_together(run):
    body = (
        TRAINS + "for step in range(20):\n    assert total() == 2\n    if (attempt, worker, step) == (0, 0, 5): die()"
    )
    with on_hosts(run, body, restarts=2) as (_, processes):
        codes, errors = finished(processes, TENSORFLOW_SECONDS)
    assert codes == [0, 0], errors


@pytest.mark.exhaustive
def test_workers_in_a_collective_end_with_a_killed_supervisor(run):
    body = TRAINS + "total()\nleave(f'pid-in-{worker}', os.getpid())\nif worker == 1: time.sleep(60)\ntotal()"
    with run.start("--workers", 2, script(run, body)) as process:
        assert eventually(lambda: len(list(run.directory.glob("pid-in-*"))) == 2, TENSORFLOW_SECONDS)
        time.sleep(0.5)
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
        assert run.gone()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_ctrl_c_in_a_fit_with_backups_saves_and_tells_how_to_resume(workers, run):
    body = """
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")
        import keras, numpy as np, tfdist
        strategy = tfdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        def note(batch, logs):
            leave(f"pid-in-{worker}", os.getpid())
            time.sleep(0.05)
        slow = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        backup = tfdist.callbacks.BackupAndRestore(here / "backup")
        model.fit(np.ones((640, 8)), np.ones((640, 1)), batch_size=8, epochs=99, verbose=0, callbacks=[slow, backup])
    """
    with run.start("--workers", workers, "--log-dir", run.logs, script(run, body), restarts=1) as process:
        assert eventually(lambda: len(list(run.directory.glob("pid-in-*"))) == workers, TENSORFLOW_SECONDS)
        path = run.logs / "attempt-0" / f"events-{workers - 1}.jsonl"
        os.kill(run.pids()[f"pid-in-{workers - 1}"], signal.SIGUSR2)
        assert eventually(lambda: read_header(path).get("why") == ASKED), read_header(path)
        asked = read_events(path)
        assert asked.header["call"] == "fit" and asked.header["step"] > 0 and "MainThread" in asked.stacks
        process.send_signal(signal.SIGINT)
        codes, errors = finished([process], TENSORFLOW_SECONDS)
    assert codes == [PREEMPTED] and attempts(run) == [workers], errors
    assert len(list((run.directory / "backup").glob("step-*"))) == 1
    assert "To continue, start the same command again." in errors and "Traceback" not in errors, errors


# By default, test_backup_and_restore.py skips finished fits, and the example below restarts a training.
@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_after_fit_repeats_no_training(workers, run):
    body = """
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")
        import keras, numpy as np, tfdist
        strategy = tfdist.MultiWorkerMirroredStrategy()
        leave(f"pid-{attempt}-{worker}", os.getpid())
        def note(batch, logs):
            with open(here / f"steps-{worker}", "a") as file: file.write(f"{attempt} ")
        count = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=3)
        for units in (1, 2):
            with strategy.scope():
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])
                model.compile("sgd", "mse")
            done = model.fit(np.ones((40, 8)), np.ones((40, 1)), batch_size=8, verbose=0, callbacks=[count, backup])
            assert done.epoch == [0]
        if attempt == 0 and worker == len(cluster) - 1: raise OSError("the disk is full")
    """
    with run.start("--workers", workers, "--log-dir", run.logs, script(run, body), restarts=1) as process:
        codes, errors = finished([process], TENSORFLOW_SECONDS)
    assert codes == [0] and attempts(run) == [workers] * 2, errors
    assert [(run.directory / f"steps-{worker}").read_text() for worker in range(workers)] == ["0 " * 10] * workers
    told = (run.logs / "attempt-1" / "worker-0.log").read_text()
    assert "the end of fit 1 of this program" in told and "the end of this fit, so it trains nothing" in told
    assert not (run.directory / "backup").exists()


def test_the_example_ends_with_the_weights_of_an_uninterrupted_run(run, data_dir):
    example = pathlib.Path(__file__).parent.parent / "examples" / "survive_kill.py"
    secret = "a secret of this test alone"
    env = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "TFDIST_SECRET": secret}
    # Saves begin after steps 10 and 20, in the background. The second one waits for the end of the first one.
    flags = ("--data_dir", data_dir, "--epochs", 1, "--kill_step", 22)
    ended = threading.Event()
    with run.start("--workers", 2, "--log-dir", run.logs, example, *flags, env=env, restarts=1) as process:
        asking = threading.Thread(target=ask_often, args=(run, ended))
        asking.start()
        try:
            output, errors = process.communicate(timeout=TENSORFLOW_SECONDS)
        finally:
            ended.set()
            asking.join()
    assert process.returncode == 0, errors
    assert "restarts: 1; weights equal an unbroken run's, bit for bit: True" in output
    assert failure(run)["signal"] == "SIGKILL"
    survivor = read_events(run.logs / "attempt-0" / "events-0.jsonl")
    assert survivor.header["call"] == "fit" and survivor.header["phase"] and "MainThread" in survivor.stacks
    restarted = read_events(run.logs / "attempt-1" / "events-0.jsonl")
    restored = next(event.details["commit"] for event in restarted.events if event.kind == "restore")
    steps = [event.step for event in restarted.events if event.kind == "step"]
    assert restarted.header["why"] == ASKED and 0 < restored == steps[0] - 1 and restarted.header["step"] >= steps[-1]
    recorded = read_run(run.logs)
    told = "\n".join(lines_of(recorded, stacks=True))
    assert "first failure: worker 1 was killed by SIGKILL [" in told, told
    assert "worker 1 last took part in exchange " in told and "\n  worker 0: " in told, told
    files = [path.read_text() for path in run.logs.rglob("*.json*")]
    assert len(files) >= 5 and not any(secret in text or "TF_CPP_MIN_LOG_LEVEL" in text for text in [told, *files])
    lost = f"attempt 0 lost {22 - restored} steps: it had finished step 22, training continues from backup"
    assert restored in (10, 20) and f"{lost} step-{restored}" in told, told
    assert_time_is_accounted(recorded)


def assert_time_is_accounted(recorded):
    """All phases of the example are found, and they sum to the time that the supervisor measured."""
    account, ends = account_of(recorded), [each["time"] + each["seconds"] for each in recorded.summaries[0]["attempts"]]
    assert account.seconds == pytest.approx(ends[-1] - recorded.summaries[0]["attempts"][0]["time"])
    assert abs(account.parts.get(REST, 0.0)) < 0.02 * account.seconds and UNRECORDED not in account.parts
    assert {COMPUTE, EXCHANGE, CALLBACK, SAVE, START, TRACING, LOST, RESTART, AGAIN} <= account.parts.keys()
    assert min(account.parts[part] for part in (START, TRACING, AGAIN)) > 0 and 0 < account.goodput < 0.9


def ask_often(run, ended):
    """Sends SIGUSR2 to each worker that has begun, every second: training has the same results."""
    while not ended.wait(1):
        for path in run.logs.glob("attempt-*/events-*.jsonl"):
            header = read_header(path)
            with contextlib.suppress(OSError):
                if header.get("hears") and "survive_kill" in pathlib.Path(f"/proc/{header['pid']}/cmdline").read_text():
                    os.kill(header["pid"], signal.SIGUSR2)
