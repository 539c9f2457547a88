"""Chooses the commit from which a `fit` continues, checks that all workers see it, and describes it in a message."""

import os
import secrets
import time
from typing import Any

from absl import logging

from tfdist.backup import backup_cleanup
from tfdist.backup.checkpoint_state import CheckpointState
from tfdist.backup.commit_store import LOCK, Commit, CommitStore, probe_writing
from tfdist.backup.storage import is_remote
from tfdist.errors import BackupError
from tfdist.run_files import is_restarted

_PLACE_SECONDS = 3.0  # Shared storage may show a file late on other hosts.


def choose(store: CommitStore | None, sites: list[str]) -> dict[str, Any]:
    """Claims the directory and chooses a commit, on the chief: the newest, or the end of an earlier `fit`.

    Args:
      store: The commits.
      sites: The call sites of the finished `fit`s of this process and of the `fit` that begins.
    """
    assert store is not None
    store.claim(goes_on=is_restarted())
    backup_cleanup.take_back(store.directory)
    commit = store.newest_whole()
    if commit is None and len(sites) == 1:
        store.tell_of_keras()
    newest = -1 if commit is None else commit.step
    if commit is not None:
        sites = _with_skipped(sites, commit)
    finished = len(sites) - 1
    if commit is not None and commit.manifest.get("fit", 0) < finished:
        commit = None  # The commit is of an earlier `fit` than this one.
    is_done_before = commit is not None and commit.manifest.get("fit", 0) > finished
    if is_done_before:
        commit = store.end_of_fit(finished) or commit
    return {
        "run": secrets.token_hex(8),
        "holder": _content(os.path.join(store.directory, LOCK)),
        "newest": newest,
        "commit": commit and [commit.step, commit.path, dict(commit.manifest)],
        "is_done_before": is_done_before,
        "is_removed_later": backup_cleanup.are_removed_later(store.directory),
        "sites": sites,
    }


def _with_skipped(sites: list[str], commit: Commit) -> list[str]:
    """Inserts the call sites of `fit`s that the script itself skips in this start, perhaps because their model exists.

    The skipped `fit`s precede the only `fit` of the commit that has the present call site. If the commit ends its `fit`
    and all its `fit`s were called from other places in the same code, all of them are skipped.
    """
    first, before = len(sites) - 1, commit.manifest.get("sites", [])
    same = [number for number in range(first, len(before)) if before[number] == sites[first]]
    number = same[0] if len(same) == 1 else first
    if commit.manifest.get("is_done") and all(_is_elsewhere(sites[first], each) for each in before[first:]):
        number = max(first, len(before))
    if number > first:
        logging.warning(
            "This is fit %d of the program that made %s, by where it is called; those before are skipped.",
            *(number + 1, commit.path),
        )
    return [*sites[:first], *before[first:number], sites[first]]


def _is_elsewhere(site: str, former: str) -> bool:
    """Whether two call sites are different places in the same code. In edited code this is unknown, thus false."""
    for mine, other in zip(site.split("/"), former.split("/"), strict=False):
        if mine != other:
            return mine.partition(":")[0] == other.partition(":")[0]
    return False


def decide(store: CommitStore | None, said: list[Any]) -> list[str]:
    """Returns the faults of the workers, on the chief. Without faults, sets damaged commits aside."""
    assert store is not None
    faults = [one for one in said if one]
    if not faults:
        store.set_faulty_aside()
    return faults


def check_place(directory: str, holder: str | None, *, goes_on: bool) -> None:
    """Checks, on a worker other than the chief, that it can write to the same directory as the chief.

    Args:
      directory: Folder of the backups.
      holder: Content of the lock file, as the chief reads it.
      goes_on: Whether a full disk only causes a warning; see `CommitStore.claim`.

    Raises:
      BackupError: If the directory is not the chief's. An `OSError` is raised if the directory cannot be written.
    """
    if is_remote(directory):
        return
    deadline = time.monotonic() + _PLACE_SECONDS
    while not (same := _content(os.path.join(directory, LOCK)) == holder) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not same:
        raise BackupError(
            f"All workers write to one backup_dir, but {directory} here is not what the chief has there. Give a "
            "path on storage that all workers share."
        )
    probe_writing(directory, may_be_full=lambda: goes_on)


def told(loaded: CheckpointState, last: float, first: int, *, is_done_before: bool) -> str:
    """Returns the log message about how a `fit` continues from a commit.

    Args:
      loaded: The commit.
      last: Number of epochs of this `fit`.
      first: The argument `initial_epoch` of `fit`.
      is_done_before: Whether the `fit` was finished before and is skipped.
    """
    plain, path, number = loaded.plain, loaded.commit.path, loaded.finished
    epoch, batch, fit = plain["epoch"], plain["batch"], plain["fit"]
    if is_done_before and fit > number:
        return (
            f"Restored {path}, of fit {fit + 1} of this program, and fit {number + 1} passed over: no backup of its "
            f"end was kept, so what comes before fit {fit + 1} sees the weights as they were later. "
            "delete_checkpoint=False keeps them."
        )
    if is_done_before:
        return f"Restored {path}, the end of fit {number + 1} of this program, which was done before."
    if is_beyond(loaded, last):
        return (
            f"Restored {path}, which was made after {batch} batches of epoch {epoch + 1}, but this fit ends with epoch "
            f"{last}: it trains nothing, and the backups stay."
        )
    if plain["stop"] and not batch:
        return (
            f"Restored {path}: a callback stopped this fit at the end of epoch {epoch}, so it is done. Without that "
            "folder it trains on, from the backup before or anew."
        )
    if not batch and epoch >= last:
        return f"Restored {path}, the end of this fit: what comes after it is next. Without that folder it trains anew."
    instead = f", not with initial_epoch={first}, which it was told" if first > epoch else ""
    return f"Restored {path}: goes on after {batch} batches of epoch {epoch + 1}{instead}."


def is_beyond(loaded: CheckpointState, last: float) -> bool:
    """Whether the commit of an unfinished `fit` was made after the present last epoch of the `fit`."""
    return (loaded.plain["epoch"], loaded.plain["batch"]) > (last, 0)


def _content(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
