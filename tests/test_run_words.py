"""The messages at the end of a run and after a restore, and which folders of former runs stay."""

import argparse
import json
import os
import types

import pytest

from recorded_runs import BEGUN, write_run
from tfdist.backup.fit_progress import FitProgress
from tfdist.backup.resume_message import resume_message
from tfdist.exit_codes import PREEMPTED
from tfdist.folder_lock import held
from tfdist.launch.first_failure import FROM_PEER, Failure, first_failure, with_step
from tfdist.launch.run_dir import KEPT_RUNS, folder_of_run
from tfdist.launch.run_summary import details_of, outcome_line
from tfdist.launch.worker_group import WorkerExit
from tfdist.readable_numbers import counted, duration
from tfdist.run_files import RunFiles


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (7.24, "7.2 s"), (9.96, "10 s"), (99, "99 s"), (725, "12 min 5 s"), (11520, "3 h 12 min")],
)
def test_a_duration_is_shown_in_readable_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("outcome", "exit_code", "text"),
    [
        ("done", 0, "done in 72 s, 1 attempt"),
        ("failed", 1, "failed after 72 s, 1 attempt"),
        ("preempted", PREEMPTED, "gave up after 72 s, 1 attempt, the last ones without a commit"),
        (
            "stopped",
            PREEMPTED,
            "stopped after 72 s, 1 attempt; start the same command again to continue from the newest backup",
        ),
        ("stopped", 130, "stopped without saving after 72 s, 1 attempt"),
    ],
)
def test_the_last_line_shows_the_outcome(outcome, exit_code, text):
    assert outcome_line(outcome, exit_code, 72, 1) == text
    assert outcome_line(outcome, exit_code, 72, 3) == text.replace("1 attempt", "3 attempts")


def failed(kind, output="the end", **more):
    return Failure(0, 1, "host", 0.0, kind, 1, output=output, **more)


@pytest.mark.parametrize("worker", [0, 1])
def test_the_step_of_a_failure_is_that_of_the_events_after_it(tmp_path, worker):
    """Worker 1 was killed, so its own file is of its start."""
    write_run(tmp_path, has_telemetry=False)
    failure = Failure(0, worker, "host", BEGUN + 10.0, "signal", 137, signal="SIGKILL")
    assert with_step(failure, tmp_path, range(3)).step == 20
    assert with_step(failure, tmp_path, [1]).step is None  # The peers have supervisors of their own.
    later = Failure(0, worker, "host", BEGUN + 100.0, "signal", 137, signal="SIGKILL")
    assert with_step(later, tmp_path, range(3)).step is None


def test_a_worker_that_sends_no_heartbeats_is_named_as_the_suspect(tmp_path):
    message = (
        "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are unhealthy "
        "(stopped sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks have crashed."
    )
    files = RunFiles(tmp_path)
    files.attempt(0).mkdir(parents=True)
    report = {"pid": 7, "time": 1.0, "kind": "exception", "exception": "UnavailableError", "message": message}
    files.report(0, 0).write_text(json.dumps(report))
    failure = first_failure(tmp_path, 0, [WorkerExit(0, 1, 7, 2.0)], [], 3.0)
    assert failure.suspect == failure.culprit == 1 and failure.doubt == FROM_PEER
    told = failure.describe()
    assert "worker 1 sent no more heartbeats" in told and "look at its machine" in told


@pytest.mark.parametrize(
    ("epoch", "batch", "text"),
    [
        (1, 40, "continues after 40 batches of epoch 2."),
        (1, 1, "continues after 1 batch of epoch 2."),
        (1, 100, "continues after the last batch of epoch 2, with epoch 3."),
        (2, 0, "continues with epoch 3."),
        (4, 100, "continues after the last batch of epoch 5, which is the last."),
    ],
)
def test_a_restore_tells_where_training_continues(epoch, batch, text):
    then = FitProgress(0, 100 * epoch + batch, epoch, batch, batch, False, {}, 100, 1, 2)
    checkpoint = types.SimpleNamespace(progress=then, commit=types.SimpleNamespace(path="/b/step-9"))
    assert resume_message(checkpoint, 0, 5, 0, is_done_before=False) == f"Restored /b/step-9: {text}"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "batch", "1 batch"), (0, "step", "0 steps"), (1200, "batch", "1,200 batches"), (2, "address", "2 addresses")],
)
def test_a_counted_noun_has_its_number(count, noun, text):
    assert counted(count, noun) == text


def test_a_stalled_worker_is_not_said_to_be_its_own_cause():
    assert failed("stall", message="No progress", suspect=1).describe() == "worker 1 ended by stall: No progress"
    assert "stall, probably because of worker 0: No" in failed("stall", message="No progress", suspect=0).describe()


CRASH = "Fatal Python error: Segmentation fault\n\nThread 0x1"


@pytest.mark.parametrize(
    ("failure", "shown_elsewhere", "reported_here", "printed_here"),
    [
        (failed("exception", stack="Traceback\n"), "Traceback", "Traceback", ""),
        (failed("exit"), "the end", "", ""),
        (failed("signal", signal="SIGKILL"), "the end", "", ""),
        (failed("signal", f"before\n{CRASH}", signal="SIGSEGV"), f"before\n{CRASH}", CRASH, CRASH),
        (failed("stall", stack="of all threads"), "", "", ""),
        (failed("left"), "", "", ""),
    ],
)
def test_a_failure_is_shown_once(failure, shown_elsewhere, reported_here, printed_here):
    """Covers a worker with hidden output, and one with shown output, with and without a report."""
    assert details_of(failure, is_shown=False, is_reported=True) == shown_elsewhere
    assert details_of(failure, is_shown=False, is_reported=False) == shown_elsewhere
    assert details_of(failure, is_shown=True, is_reported=True) == reported_here
    assert details_of(failure, is_shown=True, is_reported=False) == printed_here


def test_the_newest_run_folders_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(name, age):
        (tmp_path / name).mkdir()
        (tmp_path / name / "worker-0.log").touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))

    for age in range(KEPT_RUNS + 5):
        make(f"tfdist-run-{age:08}", age)
    make("of-others", 1000)
    make("tfdist-run-of-mine", 1000)  # a user's folder, given by --log-dir
    (tmp_path / "tfdist-run-file").touch()
    os.utime(tmp_path / "tfdist-run-file", (0, 0))
    (tmp_path / "tfdist-run-link").symlink_to(tmp_path / "of-others")
    with held(tmp_path / f"tfdist-run-{KEPT_RUNS + 2:08}" / "tfdist-run.lock"):
        os.utime(tmp_path / f"tfdist-run-{KEPT_RUNS + 2:08}", (1e9 - 900, 1e9 - 900))  # still runs: the lock is held
        with folder_of_run(argparse.Namespace(log_dir=None), None) as run_dir:
            left = {path.name for path in tmp_path.iterdir()}
    assert run_dir.is_dir() and list(run_dir.iterdir()) == []
    assert left == {
        run_dir.name,
        *(f"tfdist-run-{age:08}" for age in range(KEPT_RUNS - 1)),
        f"tfdist-run-{KEPT_RUNS + 2:08}",
        *("of-others", "tfdist-run-of-mine", "tfdist-run-file", "tfdist-run-link"),
    }
    assert (tmp_path / "of-others" / "worker-0.log").exists()
