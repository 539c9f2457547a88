"""If tfdist writes to a name with a symbolic link, the file that the link names stays unchanged."""

import contextlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tfdist.backup.commit_store import LOCK, CommitStore
from tfdist.backup.storage import LocalFiles
from tfdist.folder_lock import held
from tfdist.launch.worker_output import WorkerOutput
from tfdist.symlink_safe_file import write_whole


def hold(path):
    with held(path):
        pass


def keep_a_backup(path):
    store = CommitStore(os.path.dirname(path))
    store.claim(wait_seconds=0)
    store.release()


def prepare_a_dataset(path):
    from tfdist.data.loading import load

    load("digits", "train", os.path.dirname(path))


def write_a_csv(path):
    """Restores the file to its text at the time of the backup, as a restart does."""
    import keras

    import tfdist

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    logger = tfdist.callbacks.CSVLogger(path.removesuffix(".partial"))
    model.fit(np.ones((1, 1)), np.ones(1), verbose=0, callbacks=[logger])
    logger.csv_file = open(logger.filename, "a")  # noqa: SIM115 (the logger closes it)
    logger.set_state({"text": "epoch,loss\n"})
    logger.csv_file.close()


# The kind of file: its name, and a function that writes the file. These functions refuse a link.
REFUSED = {
    "a file that is held": ("some.lock", hold),
    "the lock of a backup_dir": (LOCK, keep_a_backup),
    "a file of a backup": ("state.bin", lambda path: LocalFiles().write(path, [b"new"])),
    "the log of a worker": ("worker-0.log", lambda path: WorkerOutput(pathlib.Path(path), show="no")),
    "the lock of a dataset": (".digits.lock", prepare_a_dataset),
}
# These functions replace a link.
REPLACED = {
    "a report": ("failure-0.json", lambda path: write_whole(pathlib.Path(path), "new")),
    "a report by the name of its draft": (
        f".failure-0.json.{os.getpid()}",
        lambda path: write_whole(pathlib.Path(path), ""),
    ),
    "a CSV file by the name of its draft": ("log.csv.partial", write_a_csv),
}


@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "to nowhere"])
@pytest.mark.parametrize("name", [*REFUSED, *REPLACED])
def test_a_link_is_not_followed(name, exists, tmp_path):
    file, write = {**REFUSED, **REPLACED}[name]
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    if exists:
        victim.write_text("precious")
    (folder / file).symlink_to(victim)
    with contextlib.ExitStack() as stack:
        if name in REFUSED:
            stack.enter_context(pytest.raises(Exception, match="a symbolic link"))
        write(str(folder / file))
    assert victim.read_text() == "precious" if exists else not victim.exists()


def test_a_run_refuses_a_link_in_place_of_its_lock(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "tfdist-run.lock").symlink_to(tmp_path / "victim")
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-m", "tfdist", "run", "--workers", "1", "--log-dir", "logs", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=180)
    assert done.returncode == 2 and "a symbolic link" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "victim").read_text() == "precious"
