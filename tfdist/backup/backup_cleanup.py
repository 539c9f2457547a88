"""Backups that may go once the job is done: workers of `tfdist run` name their folders, and the run removes them.

Were they removed at the end of `fit`, an error in what comes after it would have everything trained again. Needs no
TensorFlow.
"""

import contextlib
import hashlib
import os
import pathlib

from absl import logging

from tfdist.backup.commit_store import CommitStore
from tfdist.backup.storage import is_remote
from tfdist.errors import BackupError
from tfdist.failure_report import RUN_DIR, is_supervised, write_whole

NOTES = "done-with-*"
"""The files of a run's folder that name one each."""


def are_removed_later(directory: str) -> bool:
    """Whether this process belongs to a run that can remove backups: other storage than a disk needs TensorFlow."""
    return is_supervised() and not is_remote(directory)


def leave(directory: str) -> None:
    """Has the backups in a folder removed when the job is done.

    Raises:
      OSError: If the run cannot be told.
    """
    write_whole(_note(directory), os.path.abspath(directory))


def take_back(directory: str) -> None:
    """Has them stay: they are in use."""
    if are_removed_later(directory):
        with contextlib.suppress(OSError):
            _note(directory).unlink(missing_ok=True)


def remove(run_dir: pathlib.Path) -> None:
    """Removes what the workers of a run have left, which is done. What cannot be removed is logged."""
    for note in run_dir.glob(NOTES):
        store = None
        try:
            directory = note.read_text()
            if os.path.isdir(directory):  # else the script has removed it
                store = CommitStore(directory)
                store.claim(goes_on=True)  # On a full disk, it makes room.
                store.delete()
            note.unlink()
        except (BackupError, OSError) as error:
            logging.warning("Backups stay in %s: %s", store.directory if store else note, error)
        finally:
            if store is not None:
                store.release()


def _note(directory: str) -> pathlib.Path:
    name = hashlib.sha256(os.path.realpath(directory).encode()).hexdigest()[:16]
    return pathlib.Path(os.environ[RUN_DIR], NOTES.replace("*", name))
