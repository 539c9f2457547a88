"""Which commit a `fit` takes up, where all workers must see it, and what is said of it."""

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
from tfdist.failure_report import is_restarted

_PLACE_SECONDS = 3.0  # Storage that many hosts share may show a file a little late.


def choose(store: CommitStore | None, sites: list[str]) -> dict[str, Any]:
    """On the chief: owns the directory and picks the commit: the newest, or the end of a `fit` before that one's.

    Args:
      store: Where commits are.
      sites: From where the `fit`s of this process were called, and the one that begins.
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
        commit = None  # Of a `fit` before this one.
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
    """The sites of all `fit`s up to now, with those that a script skips in this start, say since their model is there.

    Skipped are those before the only one that was called from here when the commit was made; and those up to its end,
    if all were called from elsewhere.
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
    """Whether two sites are in the same code, at two places of it. Where code was edited nobody can tell."""
    for mine, other in zip(site.split("/"), former.split("/"), strict=False):
        if mine != other:
            return mine.partition(":")[0] == other.partition(":")[0]
    return False


def decide(store: CommitStore | None, said: list[Any]) -> list[str]:
    """On the chief: what hinders a worker; else makes room for new commits."""
    assert store is not None
    faults = [one for one in said if one]
    if not faults:
        store.set_faulty_aside()
    return faults


def check_place(directory: str, holder: str | None, *, goes_on: bool) -> None:
    """On a worker that is not the chief: whether it can write, and to the same place.

    Args:
      directory: Where backups are.
      holder: What the chief reads in the lock there.
      goes_on: Whether a full disk is but a warning; see `CommitStore.claim`.

    Raises:
      BackupError: If not.
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
    """What a `fit` that takes up a commit does, as a sentence.

    Args:
      loaded: The commit.
      last: The number of epochs of this `fit`.
      first: The epoch that it was told to begin with.
      is_done_before: Whether it was done before, and is passed over.
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
    """Whether a commit was made after the last epoch of a `fit` that is not done."""
    return (loaded.plain["epoch"], loaded.plain["batch"]) > (last, 0)


def _content(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
