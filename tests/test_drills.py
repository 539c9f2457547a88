"""Drill faults stop, slow and kill processes, and break writes, links and files."""

import os
import pathlib
import subprocess
import sys
import textwrap
import time
import types

import pytest

from launched import DEADLINE_SECONDS, eventually
from tfdist.cluster import ClusterSpec
from tfdist.testing import Fault, faults


@pytest.fixture
def busy():
    """Yields a process that uses a core."""
    code = "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def state(process):
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def stopped_share(process):
    """Returns the part of the next second during which a process is stopped."""
    states = []
    for _ in range(100):
        time.sleep(0.01)
        states.append(state(process))
    return states.count("T") / len(states)


def test_a_frozen_process_can_continue(busy):
    faults.freeze(busy.pid)
    assert eventually(lambda: state(busy) == "T")
    faults.thaw(busy.pid)
    assert eventually(lambda: state(busy) == "R")


def test_a_slow_process_is_stopped_most_of_the_time_and_can_continue(busy):
    with faults.Slowdown(busy.pid, 1) as slowdown:
        assert stopped_share(busy) == 0
        slowdown.change(5)
        assert eventually(lambda: stopped_share(busy) > 0.5)
    assert eventually(lambda: state(busy) == "R")
    with pytest.raises(ValueError, match="at least 1"):
        faults.Slowdown(busy.pid, 0.5)


def test_a_slow_process_may_end_first():
    with subprocess.Popen(["sleep", "60"]) as process:
        with faults.Slowdown(process.pid, 3) as slowdown:
            process.kill()
            process.wait()
            time.sleep(0.3)
            slowdown.change(2)


def test_writes_fail_beyond_a_size(tmp_path):
    code = """
    import errno, pathlib, sys
    from tfdist.testing import faults
    faults.fill_disk(1000)
    pathlib.Path(sys.argv[1]).write_bytes(bytes(1000))
    try:
        pathlib.Path(sys.argv[1]).write_bytes(bytes(2000))
    except OSError as error:
        sys.exit(error.errno != errno.EFBIG)
    sys.exit(2)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    assert subprocess.run(command, timeout=DEADLINE_SECONDS).returncode == 0


@pytest.mark.privileged
def test_a_small_disk_is_soon_full(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    try:
        with faults.small_disk(tmp_path, 1 << 16):
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "file").write_bytes(bytes(1 << 20))
    except PermissionError as error:
        pytest.skip(str(error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.privileged
def test_a_link_is_cut_in_its_namespace():
    code = """
    import subprocess, sys
    from tfdist.testing import faults
    for command in ("add one type veth peer name two", "set dev one up"):
        if subprocess.run(["ip", "link", *command.split()]).returncode:
            sys.exit(77)
    is_up = lambda: "UP" in subprocess.run(["ip", "link", "show", "one"], capture_output=True, text=True).stdout
    before = is_up()
    faults.cut_network("one")
    sys.exit(not (before and not is_up()))
    """
    command = ["unshare", "--net", sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, timeout=DEADLINE_SECONDS, capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"needs root and network namespaces: {done.stderr}")
    assert done.returncode == 0, done.stderr


def test_a_missing_link_raises():
    with pytest.raises(PermissionError, match="nowhere0"):
        faults.cut_network("nowhere0")


def test_corruption_is_repeatable_and_real(tmp_path):
    content = bytes(range(200))
    done = {}
    for how in ("truncate", "flip", "remove"):
        results = []
        for seed in (1, 1, 2):
            (tmp_path / "file").write_bytes(content)
            told = faults.corrupt(tmp_path / "file", seed, how)
            assert str(tmp_path / "file") in told
            results.append((tmp_path / "file").read_bytes() if (tmp_path / "file").exists() else None)
        assert results[0] == results[1] != content
        done[how] = results[0]
    assert len(done["truncate"]) < 200 and content.startswith(done["truncate"]) and done["remove"] is None
    assert sum((a ^ b).bit_count() for a, b in zip(content, done["flip"], strict=True)) == 1
    kinds = set()
    for seed in range(20):
        (tmp_path / "file").write_bytes(content)
        kinds.add(faults.corrupt(tmp_path / "file", seed).split()[0])
    assert kinds == {"truncated", "flipped", "removed"}
    (tmp_path / "file").write_bytes(b"")
    for arguments, words in (((1,), "empty"), ((1, "burn"), "burn")):
        with pytest.raises(ValueError, match=words):
            faults.corrupt(tmp_path / "file", *arguments)


# Faults at a given step of training.


def trained(fault, batches, optimizer=None):
    """Returns the number of batches of an epoch after which a fault raises, or None if it does not raise."""
    fault.set_model(types.SimpleNamespace(optimizer=optimizer))
    fault.on_epoch_begin(0)
    for batch in batches:
        try:
            fault.on_train_batch_end(batch)
        except RuntimeError:
            return batch + 1
    return None


def test_a_fault_counts_steps_itself_and_continues_after_a_restore(monkeypatch):
    monkeypatch.setenv("TFDIST_ATTEMPT", "0")
    fault = Fault("raise", worker=0, step=7)
    assert trained(fault, range(1, 6, 2)) is None  # two steps per execution
    again = Fault("raise", worker=0, step=7)
    again.set_state(fault.get_state())
    assert trained(again, range(4)) == 1
    assert trained(again, range(9)) is None  # It raises once only.


def test_a_fault_for_each_attempt_happens_in_each(monkeypatch):
    for attempt, is_counted, expected in ((None, True, 2), (None, False, 2), (0, True, None), (0, False, None)):
        monkeypatch.delenv("TFDIST_ATTEMPT", raising=False)
        first = Fault("raise", worker=0, step=2, attempt=attempt)
        assert trained(first, range(3)) == 2
        if is_counted:
            monkeypatch.setenv("TFDIST_ATTEMPT", "1")
        second = Fault("raise", worker=0, step=4, attempt=attempt)
        second.set_state(first.get_state())
        assert trained(second, range(9)) == expected


def test_a_fault_of_a_missing_worker_raises(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TFDIST_ATTEMPT", raising=False)
    for worker in (1, -1):
        with pytest.raises(ValueError, match=f"from 0 to 0.*got {worker}"):
            Fault("kill", worker=worker, step=1)
    monkeypatch.setenv("TF_CONFIG", ClusterSpec.local(2, 0, [1, 2]).to_json())
    with pytest.raises(ValueError, match=r"from 0 to 1.*got 2"):
        Fault("kill", worker=2, step=1)
    monkeypatch.setenv("TFDIST_ATTEMPT", "1")  # A later attempt may have fewer workers.
    assert trained(Fault("raise", worker=2, step=1), range(3)) is None
    assert trained(Fault("raise", worker=2, step=1, attempt=None), range(3)) is None


def test_a_fault_corrupts_a_file_of_the_newest_backup(tmp_path, capfd):
    for name in ("step-9", "step-10", ".half-ab-step-11", "faulty-step-12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    trained(Fault("corrupt", worker=0, step=1, path=tmp_path), range(1))
    assert str(tmp_path / "step-10" / "manifest.json") in capfd.readouterr().err
    (tmp_path / "file").write_text("content")
    trained(Fault("corrupt", worker=0, step=1, path=str(tmp_path / "file")), range(1))
    assert f"{tmp_path / 'file'}" in capfd.readouterr().err
    with pytest.raises(ValueError, match="needs the `path`"):
        Fault("corrupt", worker=0, step=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="none yet"):
        trained(Fault("corrupt", worker=0, step=1, path=tmp_path / "empty"), range(1))
