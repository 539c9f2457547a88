"""Removal of backups when a job is done: workers leave notes, and `tfdist run` removes the folders named there.

If the end of `fit` removed the backups, an error in the code after it would cause everything to be trained again.
This module needs no TensorFlow.
"""

import contextlib
import os
import pathlib

from absl import logging

from tfdist.backup.commit_store import CommitStore
from tfdist.backup.storage import is_remote
from tfdist.errors import BackupError
from tfdist.run_files import RunFiles, is_supervised
from tfdist.symlink_safe_file import write_whole


def are_removed_later(directory: str) -> bool:
    """Whether `tfdist run` can remove the backups when the job is done: it runs this process; they are on a disk."""
    return is_supervised() and not is_remote(directory)


def leave(directory: str) -> None:
    """Leaves a note, so that `tfdist run` removes the backups in a folder when the job is done.

    Raises:
      OSError: If the note cannot be written.
    """
    files = RunFiles.of_worker()
    assert files is not None  # see `are_removed_later`
    write_whole(files.done_with(directory), os.path.abspath(directory))


def take_back(directory: str) -> None:
    """Removes the note that asks `tfdist run` to remove the backups in a folder, because they are in use again."""
    files = RunFiles.of_worker()
    if files is not None and are_removed_later(directory):
        with contextlib.suppress(OSError):
            files.done_with(directory).unlink(missing_ok=True)


def remove(run_dir: pathlib.Path) -> None:
    """Removes the backups that the workers' notes name, at the end of `tfdist run`. Logs failures to remove."""
    for note in RunFiles(run_dir).all_done_with:
        store = None
        try:
            directory = note.read_text(errors="surrogateescape")
            if os.path.isdir(directory):  # otherwise the script has removed it
                store = CommitStore(directory)
                store.claim(goes_on=True)  # Also works on a full disk, where removal makes room.
                store.delete()
            note.unlink()
        except (BackupError, OSError) as error:
            logging.warning("Backups stay in %s: %s", store.directory if store else note, error)
        finally:
            if store is not None:
                store.release()
