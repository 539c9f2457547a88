"""A commit is whole or ignored: after damage to any byte, file or folder, the store finds the commit before it."""

import contextlib
import errno
import json
import logging as standard_logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
from absl import logging

from launched import SCRIPTS, eventually
from tfdist.backup import backup_cleanup
from tfdist.backup.commit_store import LOCK, MANIFEST, CommitStore, Draft, _digest
from tfdist.backup.storage import LocalFiles
from tfdist.errors import BackupError
from tfdist.run_files import RunFiles

RUN = "abc123"
DEADLINE_SECONDS = 30
EMPTY = "late-0.bin"
FILES = ("state.bin", "state.json", "part-1.json", EMPTY)


def content(step, name):
    size = 0 if name == EMPTY else 5000
    return np.random.default_rng([step, len(name)]).bytes(size)


def write(store, step, keep=2, **manifest):
    draft = Draft(store.directory, RUN, step)
    files = {name: draft.write(name, [content(step, name)]) for name in FILES}
    return store.commit(draft, {"files": files, "workers": 2, "versions": {"tfdist": "0.1.0"}, **manifest}, keep)


@contextlib.contextmanager
def owned(directory):
    store = CommitStore(str(directory))
    store.claim()
    yield store
    store.release()


@pytest.fixture
def two(tmp_path):
    """Returns a directory with commits 3 and 12, ordered by number and not by name."""
    with owned(tmp_path / "backup") as store:
        write(store, 3)
        write(store, 12)
    return tmp_path / "backup"


@pytest.fixture
def warnings():
    heard = []
    handler = standard_logging.Handler(standard_logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.get_absl_logger().addHandler(handler)
    yield heard
    logging.get_absl_logger().removeHandler(handler)


def found(directory):
    """Returns the step of the newest whole commit after comparing all its files, or None if there is none."""
    commit = CommitStore(str(directory)).newest_whole()
    if commit is None:
        return None
    assert {name: bytes(commit.read(name)) for name in FILES} == {name: content(commit.step, name) for name in FILES}
    return commit.step


def tree(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def lengths(size):
    return sorted({0, 1, size // 2, size - 1, size + 1} - {size, -1})


def offsets(size):
    return sorted({0, 1, size // 3, size // 2, size - 2, size - 1}) if size else []


def harms(path):
    """Yields ways to damage a file: a description and a function."""
    whole = path.read_bytes()
    for length in lengths(len(whole)):
        yield f"{length} bytes long", lambda length=length: path.write_bytes((whole + b"x")[:length])
    for offset in offsets(len(whole)):
        for bit in (0, 5, 7):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << bit
            yield f"bit {bit} of byte {offset} flipped", lambda flipped=flipped: path.write_bytes(flipped)
    yield "missing", path.unlink
    yield "a folder", lambda: (path.unlink(), path.mkdir())
    yield "a pipe", lambda: (path.unlink(), os.mkfifo(path))
    yield "a link to nowhere", lambda: (path.unlink(), path.symlink_to("nowhere"))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_file_makes_the_earlier_commit_count(name, two, tmp_path, warnings):
    harmless = []
    for number, (what, _) in enumerate(list(harms(two / "step-12" / name))):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(two, copy)
        dict(harms(copy / "step-12" / name))[what]()
        warnings.clear()
        if found(copy) == 12:
            harmless.append(what)  # `found` has compared all files
        else:
            assert found(copy) == 3, what
            assert any("step-12" in warning and "skipped" in warning for warning in warnings), what
    assert harmless == [], "every byte counts"


@pytest.mark.parametrize("name", [*FILES[:-1], MANIFEST])
def test_damaged_commits_alone_count_as_no_commit(name, two):
    for step in (3, 12):
        path = two / f"step-{step}" / name
        path.write_bytes(path.read_bytes()[:-1])
    assert found(two) is None


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\x00" * 100,
        b"null",
        b"[]",
        b"{}",
        b'"manifest"',
        b"[" * 100000,
        b'{"manifest": null, "sha256": null}',
        b'{"manifest": {}, "sha256": 3}',
        "{ü".encode("latin-1"),
        b"1" * 10000,
    ],
    ids=lambda text: text[:12].decode("latin-1"),
)
def test_any_garbage_for_a_manifest_is_skipped(manifest, two):
    (two / "step-12" / MANIFEST).write_bytes(manifest)
    assert found(two) == 3


def test_a_manifest_with_wrong_types_is_skipped(two):
    """Another program may have written such a manifest."""
    original = json.loads((two / "step-12" / MANIFEST).read_bytes())["manifest"]
    wrong = [
        *({**original, key: value} for key in original for value in (None, "x", [], {"a": 1}, -1) if key != "versions"),
        *({**original, key: value} for key in ("fit", "sites") for value in ("x", [1], {"a": 1}, -1)),
        *({**original, "versions": value} for value in ("x", [1], 5)),
        *({k: v for k, v in original.items() if k != key} for key in ("files", "format", "step", "workers")),
        *({**original, "files": {**original["files"], "state.json": value}} for value in (None, 5, {}, {"bytes": "x"})),
        {**original, "files": {**original["files"], "state.json": {**original["files"]["state.json"], "sha256": 5}}},
        *({**original, "files": {name: original["files"][EMPTY]}} for name in (f"../step-3/{EMPTY}", "/dev/null")),
    ]
    for one in wrong:
        (two / "step-12" / MANIFEST).write_text(json.dumps({"manifest": one, "sha256": _digest(one)}))
        assert found(two) == 3, one


def test_incomplete_and_foreign_folders_do_not_count(two):
    draft = Draft(str(two), "dead", 20)
    draft.write("state.json", [b"{}"])
    (two / "step-30").mkdir()
    (two / "step-x").mkdir()
    (two / "step-0031").mkdir()
    (two / "step-40").write_text("a file")
    (two / "notes.txt").write_text("mine")
    assert found(two) == 12
    assert os.path.exists(draft.path), "only the owner clears"
    with owned(two) as store:
        assert not os.path.exists(draft.path)
        assert store.newest_whole().step == 12
        write(store, 50)
    assert (two / "notes.txt").read_text() == "mine"
    assert (two / "step-x").is_dir() and (two / "step-0031").is_dir()
    assert found(two) == 50


def test_the_newest_commits_are_kept(tmp_path):
    with owned(tmp_path) as store:
        for step in (1, 2, 9, 10, 11):
            write(store, step, keep=3)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-10", "step-11", "step-9"]


def test_the_newest_end_of_each_fit_is_kept_too(tmp_path):
    with owned(tmp_path) as store:
        for step, fit, is_done in [(1, 0, False), (2, 0, True), (3, 0, True), (4, 1, True), (5, 2, False)]:
            write(store, step, fit=fit, is_done=is_done)
    with owned(tmp_path) as store:  # as in another process
        for step in (6, 7):
            write(store, step, fit=2, is_done=False)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-3", "step-4", "step-6", "step-7"]
        assert [commit and commit.step for commit in map(store.end_of_fit, range(3))] == [3, 4, None]
        (tmp_path / "step-3" / "state.json").write_bytes(b"damaged")
        assert store.end_of_fit(0) is None


@pytest.mark.parametrize("keep", [1, 2])
def test_many_ends_of_fits_get_a_warning(keep, tmp_path, warnings):
    with owned(tmp_path) as store:
        for fit in range(20):  # `delete` removes these
            write(store, fit, keep, fit=fit, is_done=True)
            store.delete()
            store.claim()
        for fit in range(20, 40):
            assert warnings == [], fit
            for step in (3 * fit, 3 * fit + 1):
                write(store, step, keep, fit=fit, is_done=True)
    (told,) = warnings
    assert f"{tmp_path} keeps a backup of the end of each fit" in told and "20 so far" in told


def test_a_damaged_commit_is_moved_aside_not_deleted(two):
    (two / "step-12" / "state.json").write_bytes(b"damaged")
    with owned(two) as store:
        assert store.newest_whole().step == 3
        store.set_faulty_aside()
        write(store, 9)
        assert found(two) == 9
        write(store, 12)
    assert found(two) == 12
    assert (two / "faulty-step-12" / "state.json").read_bytes() == b"damaged"


@pytest.mark.parametrize("manifest", [None, b"", b"{}"])
def test_a_commit_without_a_manifest_is_damaged_and_not_foreign(manifest, two):
    (two / "step-12" / MANIFEST).unlink()
    if manifest is not None:
        (two / "step-12" / MANIFEST).write_bytes(manifest)
    with owned(two) as store:
        assert store.newest_whole().step == 3
        store.set_faulty_aside()
    assert sorted(path.name for path in two.glob("*step*")) == ["faulty-step-12", "step-3"]


@pytest.mark.parametrize("remote", [False, True])
def test_foreign_folders_are_refused_by_name_and_nothing_is_changed(remote, tmp_path):
    import tensorflow as tf

    directory = f"ram://{uuid.uuid4().hex}" if remote else str(tmp_path)
    others = [f"{directory}/step-{step}/model.h5" for step in (7, 9)]
    for path in others:
        tf.io.gfile.makedirs(os.path.dirname(path))
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(b"mine")
    with pytest.raises(BackupError, match=r"step-7, step-9.*model\.h5.*another backup_dir"):
        CommitStore(directory).claim()
    assert all(tf.io.gfile.exists(path) for path in others)


def test_foreign_folders_made_meanwhile_do_not_count_and_stay(tmp_path):
    with owned(tmp_path) as store:
        write(store, 1)
        for other in ("step-20", "step-30"):
            (tmp_path / other).mkdir()
            (tmp_path / other / "model.h5").write_text("mine")
        for step in (2, 3):
            write(store, step)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-20", "step-3", "step-30"]
        store.delete()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-20", "step-30"]


@pytest.mark.parametrize(("operation", "call"), [("move", "set_faulty_aside"), ("names", "newest_whole")])
def test_failing_storage_is_named_and_not_treated_as_empty(operation, call, two, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    (two / "step-12" / "state.json").write_bytes(b"damaged")
    with owned(two) as store:
        assert store.newest_whole().step == 3
        monkeypatch.setattr(store._files, operation, refuse)
        with pytest.raises(BackupError, match=f"{two}.*Input/output error"):
            getattr(store, call)()


@pytest.mark.parametrize(("number", "way_out"), [(99, "Update tfdist"), (5, "Use that version")])
def test_another_format_is_an_error_and_nothing_is_changed(number, way_out, two):
    path = two / "step-12" / MANIFEST
    manifest = {**json.loads(path.read_bytes())["manifest"], "format": number, "versions": {"tfdist": "9.9"}}
    path.write_text(json.dumps({"manifest": manifest, "sha256": _digest(manifest)}))
    before = tree(two)
    with pytest.raises(BackupError, match=rf"tfdist 9\.9 in format {number}.*{way_out}"):
        CommitStore(str(two)).newest_whole()
    assert tree(two) == before


@pytest.mark.parametrize("place", ["/proc/tfdist-backup", "{file}/backup"])
def test_a_place_that_cannot_be_written_is_named_at_once(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackupError, match=r"must be writable.*or give another backup_dir"):
        CommitStore(place.format(file=tmp_path / "file")).claim()


def test_a_failed_write_keeps_earlier_commits_and_the_next_one_works(two):
    """A limit on file sizes acts like a full disk, and needs no root."""
    with owned(two) as store:
        draft = Draft(str(two), RUN, 20)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            with pytest.raises(OSError) as raised:
                draft.write("state.bin", [bytes(1 << 20)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert raised.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert found(two) == 12
        store.discard(draft)
        assert not os.path.exists(draft.path)
        write(store, 20)
    assert found(two) == 20


class FullDisk:
    """Refuses writes while the remains of a killed save exist, or always."""

    def __init__(self, monkeypatch, directory, *, for_ever=False):
        self.is_full = lambda: for_ever or any(name.startswith(".half-cd-") for name in os.listdir(directory))
        for module, name in ((LocalFiles, "write"), (os, "fsync")):
            monkeypatch.setattr(module, name, self.guard(getattr(module, name)))

    def guard(self, call):
        def guarded(*args):
            if self.is_full():
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args)

        return guarded


def test_files_of_a_killed_save_are_removed_to_make_room(two, monkeypatch):
    Draft(str(two), "cd", 20).write("state.bin", [b"half"])
    FullDisk(monkeypatch, two)
    with owned(two) as store:
        assert (two / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        write(store, 30)
    assert found(two) == 30


def test_on_a_full_disk_a_run_goes_on_that_has_a_whole_commit_and_none_begins(two, tmp_path, monkeypatch, warnings):
    RunFiles(tmp_path).done_with(str(two)).write_text(str(two))
    FullDisk(monkeypatch, two, for_ever=True)
    (tmp_path / "empty").mkdir()
    for directory, goes_on in ((two, False), (tmp_path / "empty", True)):
        store = CommitStore(str(directory))
        with pytest.raises(BackupError, match=r"the disk is full.*Make room"):
            store.claim(goes_on=goes_on)
        store.release()
    store = CommitStore(str(two))
    store.claim(goes_on=True)
    store.release()
    assert "training continues from the newest" in warnings[-1] and found(two) == 12
    assert not [name for name in os.listdir(two) if name.startswith(".")]
    backup_cleanup.remove(tmp_path)  # removes the backups of a finished run
    assert not two.exists()


def test_an_incomplete_draft_is_no_commit(two):
    with owned(two) as store:
        draft = Draft(str(two), RUN, 20)
        files = {"part-1.json": draft.write("part-1.json", [b"abc"])}
        os.truncate(os.path.join(draft.path, "part-1.json"), 1)
        with pytest.raises(OSError, match=r"part-1\.json"):
            store.commit(draft, {"files": files, "workers": 1}, keep=2)
    assert found(two) == 12


def holding(directory):
    """Returns a process that holds the lock of a directory, and that has a child process, until both are killed."""
    command = [sys.executable, SCRIPTS / "hold_backup.py", directory, "600"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_two_jobs_do_not_share_a_directory_and_a_killed_one_frees_it_at_once(tmp_path):
    holder = holding(tmp_path)
    try:
        with pytest.raises(BackupError, match=f"process {holder.pid} on .* is using"):
            CommitStore(str(tmp_path)).claim(wait_seconds=0.3)
        holder.kill()
        holder.wait()
        store = CommitStore(str(tmp_path))
        store.claim(wait_seconds=0, other_host_seconds=0)
        store.release()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=DEADLINE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["another", "own"])
def test_a_holder_on_another_host_is_waited_for_longer(who, tmp_path, warnings):
    # In the second case, a container has the same host name, and process numbers may be equal too.
    elsewhere = "process 7 on elsewhere" if who == "another" else f"process {os.getpid()} on {socket.gethostname()}"
    holder = holding(tmp_path)
    try:
        (tmp_path / LOCK).write_text(elsewhere)
        with pytest.raises(BackupError, match=f"{elsewhere} is using .* has failed.* remove {tmp_path / LOCK}"):
            CommitStore(str(tmp_path)).claim(wait_seconds=0.1, other_host_seconds=0.3)
        assert "waiting up to 0 s" in warnings[0]
        end = threading.Thread(target=lambda: eventually(lambda: len(warnings) == 2) and holder.kill())
        end.start()
        CommitStore(str(tmp_path)).claim(wait_seconds=0.1)
        end.join()
        assert len(warnings) == 2 and "waiting up to 120 s" in warnings[1]
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=DEADLINE_SECONDS)


def test_a_process_may_claim_its_directory_again(tmp_path):
    with owned(tmp_path) as store:
        store.claim()
        write(store, 1)


def test_a_process_can_claim_a_directory_that_it_has_cleared(tmp_path):
    """Workers read the lock to check that they write to the chief's directory."""
    with owned(tmp_path / "backup") as store:
        write(store, 3)
        held = (tmp_path / "backup" / LOCK).read_text()
        shutil.rmtree(tmp_path / "backup")
        store.claim(wait_seconds=0)
        assert (tmp_path / "backup" / LOCK).read_text() == held
        write(store, 2)
        assert found(tmp_path / "backup") == 2
    assert not (tmp_path / "backup" / LOCK).exists()


def test_delete_removes_own_files_and_keeps_all_others(two):
    with owned(two) as store:
        (two / "notes.txt").write_text("mine")
        store.delete()
        assert [path.name for path in two.iterdir()] == ["notes.txt"]
    with owned(two) as store:
        write(store, 1)
        (two / "notes.txt").unlink()
        store.delete()
    assert not two.exists()


def test_a_folder_that_cannot_be_removed_stays_empty(two, tmp_path):
    link = tmp_path / "link"  # behaves like a mount, which would need root
    link.symlink_to(two)
    with owned(link) as store:
        store.delete()
    assert link.is_symlink() and list(two.iterdir()) == []


class KilledError(BaseException):
    """Ends the removal of a commit as a signal ends its process."""


@pytest.mark.parametrize("remote", [False, True])
def test_the_rest_of_a_commit_is_removed_if_a_process_was_killed_while_it_removed_it(remote, tmp_path, monkeypatch):
    directory = f"ram://{uuid.uuid4().hex}" if remote else str(tmp_path)
    with owned(directory) as store:
        write(store, 1)
        remove = store._files.remove

        def remove_one_file(path):
            if path.endswith(MANIFEST):
                return remove(path)
            remove(os.path.join(path, "state.bin" if remote else MANIFEST))
            raise KilledError

        monkeypatch.setattr(store._files, "remove", remove_one_file)
        with pytest.raises(KilledError):
            write(store, 2, keep=1)
    with owned(directory) as store:
        assert sorted({*store._files.names(directory)} - {LOCK}) == ["step-2"]
    assert found(directory) == 2


def test_backups_in_a_folder_whose_name_is_not_utf_8_are_reported_and_removed(tmp_path, monkeypatch):
    directory = os.fsdecode(bytes(tmp_path / "run-") + b"\xff")
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path / "logs"))
    files = RunFiles(tmp_path / "logs")
    with owned(directory) as store:
        write(store, 3)
    files.tell_of_commit(3, directory)
    assert files.committed == (3, directory)
    backup_cleanup.leave(directory)
    backup_cleanup.remove(files.run_dir)
    assert not os.path.exists(directory) and files.all_done_with == []


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_loses_no_commit(tmp_path):
    rng = np.random.default_rng(0)
    said = 0
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, SCRIPTS / "write_commits.py", tmp_path], stdout=subprocess.PIPE)
        try:
            writer.stdout.readline()  # The process is now writing.
            time.sleep(rng.uniform(0, 0.05))
        finally:
            writer.kill()
            output, _ = writer.communicate(timeout=DEADLINE_SECONDS)
        said = max([said, *(int(line) for line in output.splitlines()[:-1])])
        commit = CommitStore(str(tmp_path)).newest_whole()
        assert commit.step >= said
        for i in range(4):
            assert set(np.frombuffer(commit.read(f"{i}"), np.int64)) == {commit.step + i}


class TestOtherStorage:
    """Uses TensorFlow's in-memory file system in place of an object store."""

    @pytest.fixture
    def remote(self):
        return f"ram://{uuid.uuid4().hex}"

    def test_the_manifest_makes_the_commit(self, remote):
        import tensorflow as tf

        with owned(remote) as store:
            write(store, 3)
            write(store, 12)
            Draft(remote, RUN, 20).write("state.json", [b"{}"])
        assert found(remote) == 12
        with owned(remote):
            assert not tf.io.gfile.exists(f"{remote}/step-20"), "half-made"
        with tf.io.gfile.GFile(f"{remote}/step-12/state.json", "wb") as file:
            file.write(b"short")
        assert found(remote) == 3
        with owned(remote) as store:
            assert store.newest_whole().step == 3
            store.set_faulty_aside()
            write(store, 12)
            assert found(remote) == 12
            store.delete()
        assert found(remote) is None


def test_an_unowned_directory_has_no_lock_file(two):
    (two / LOCK).unlink(missing_ok=True)
    assert found(two) == 12, "reading needs no rights to write"
    assert not (two / LOCK).exists()
