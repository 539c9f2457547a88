"""All workers agree on the commit from which a `fit` continues, and check that all can read it."""

import contextlib
import os
import secrets
import time
from typing import Any, NamedTuple

from absl import logging

from tfdist.backup import backup_cleanup
from tfdist.backup.between_fits import BackupOptions, BackupSession
from tfdist.backup.chief_decision import ChiefDecision
from tfdist.backup.commit_store import LOCK, Commit, CommitStore, probe_writing
from tfdist.backup.commit_writer import tell_of_untold, versions
from tfdist.backup.snapshot import Checkpoint, FitStates
from tfdist.backup.storage import is_remote
from tfdist.errors import BackupError
from tfdist.run_files import RunFiles, is_restarted

_COMPARED = ("save_freq", "keep", "delete_checkpoint", "save_before_preemption")  # all workers give the same
_PLACE_SECONDS = 3.0  # Shared storage may show a file late on other hosts.


class Resumption(NamedTuple):
    """How a `fit` begins, as all workers have agreed: whether it is skipped, and who removes its backups."""

    run: str  # identity of the run; see `Draft`
    is_done_before: bool  # Whether the `fit` was finished before and is skipped.
    is_removed_later: bool  # Whether `tfdist run` removes the backups when the job is done.


def agree(
    session: BackupSession, options: BackupOptions, agreement: ChiefDecision, site: str, states: FitStates
) -> tuple[Resumption, Checkpoint | None]:
    """Claims the backup directory, and reads the commit from which a `fit` continues, on all workers or on none.

    Updates the session of the directory. `site` is the call site of the `fit`.

    Raises:
      BackupError: If a worker cannot write to the directory or cannot continue from the commit.
    """
    agreement.begin({name: repr(getattr(options, name)) for name in _COMPARED})
    if agreement.is_chief:
        session.store = session.store or CommitStore(options.directory)
    store = session.store if agreement.is_chief else None
    sites = [*session.sites[: session.finished], site]
    chosen = agreement.settle("fit", None, lambda _: _choose(store, sites))
    commit = Commit(*chosen["commit"]) if chosen["commit"] else None
    session.begin_fit(chosen["sites"], chosen["newest"])
    tell_of_untold(options.directory, chosen["newest"])
    files = RunFiles.of_worker()
    if commit is not None and files is not None:
        with contextlib.suppress(OSError):
            files.restored.touch()
    checkpoint, fault = None, None
    try:
        if not agreement.is_chief:
            _check_place(options.directory, chosen["holder"], goes_on=is_restarted() and chosen["newest"] >= 0)
        elif commit is not None:
            _tell_of_versions(commit)
        if commit is not None:
            checkpoint = states.read(commit, agreement, session.finished)
    except (BackupError, OSError) as error:
        fault = f"{agreement.who}: {error}"
    try:
        faults = agreement.settle("fit", fault, lambda said: _decide(store, said))
        if faults:
            raise BackupError(faults[0].partition(": ")[2] if agreement.workers == 1 else "; ".join(faults))
    except BackupError:
        if store is not None:
            store.release()
        raise
    is_removed_later = options.delete_checkpoint and chosen["is_removed_later"]
    return Resumption(chosen["run"], chosen["is_done_before"], is_removed_later), checkpoint


def _tell_of_versions(commit: Commit) -> None:
    before, now = commit.manifest.get("versions", {}), versions()
    others = [f"{name} {before[name]} (here: {now[name]})" for name in now if before.get(name, now[name]) != now[name]]
    if others:
        logging.warning(
            "%s was made with %s: further training may give slightly different numbers.", commit.path, ", ".join(others)
        )


def _choose(store: CommitStore | None, sites: list[str]) -> dict[str, Any]:
    """Claims the backup directory and chooses a commit to restore, on the chief: the newest, or an earlier `fit`'s end.

    `sites` has the call sites of the finished `fit`s of this process and of the `fit` that begins.
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
            "This is fit %d of the program that made %s, by its call site; earlier fits are skipped.",
            *(number + 1, commit.path),
        )
    return [*sites[:first], *before[first:number], sites[first]]


def _is_elsewhere(site: str, former: str) -> bool:
    """Whether two call sites of `fit` are different places in the same code. Unknown in edited code, thus false."""
    for mine, other in zip(site.split("/"), former.split("/"), strict=False):
        if mine != other:
            return mine.partition(":")[0] == other.partition(":")[0]
    return False


def _decide(store: CommitStore | None, said: list[Any]) -> list[str]:
    """Returns the workers' errors in reading the commit, on the chief. Without errors, sets damaged commits aside."""
    assert store is not None
    faults = [one for one in said if one]
    if not faults:
        store.set_faulty_aside()
    return faults


def _check_place(directory: str, holder: str | None, *, goes_on: bool) -> None:
    """Checks, on a worker other than the chief, that it can write to the same backup directory as the chief.

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
            f"All workers must write to one backup_dir, but {directory} on this worker is not the chief's. Give a "
            "path on storage that all workers share."
        )
    probe_writing(directory, may_be_full=lambda: goes_on)


def _content(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
