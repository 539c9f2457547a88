"""Writes captured states of a `fit` in a background thread. The chief commits them when all workers have written."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from tfdist.backup.chief_decision import ChiefDecision
from tfdist.backup.commit_store import CommitStore, Draft
from tfdist.backup.part_files import pack, write_part
from tfdist.backup.snapshot import Snapshot
from tfdist.events.event_buffer import EVENTS
from tfdist.events.phase_names import SAVE
from tfdist.faults import beside_steps
from tfdist.package_version import version_of
from tfdist.run_files import ATTEMPT, RunFiles

_NICENESS = 10  # Gets a tenth of a busy core and all of an idle core.

_newest_commit_at: float | None = None  # By this process, in seconds since the epoch.


class CommitWriter:
    """Saves one snapshot of a `fit` at a time as a commit, in a background thread, while training goes on.

    A save that fails because the disk is full or the storage raises an error is logged. Earlier commits stay, and the
    next save tries again. The next call raises any other failure.

    Args:
      directory: Folder of all commits.
      run: Identity of the run; see `Draft`.
      agreement: The workers' `ChiefDecision`, which completes each commit.
      store: The commits in the directory, on the chief; `None` on other workers.
      keep: Number of commits to keep.
      is_asked: Returns whether this worker was asked to save and leave; called in the background thread.

    Attributes:
      refusals: The errors of the storage in the last save.
      are_asked: Whether, before the last commit, a worker was asked to leave or its `tfdist run` wanted to restart with
        more workers. After `wait`, all workers have the same value.
    """

    def __init__(
        self,
        directory: str,
        run: str,
        agreement: ChiefDecision,
        store: CommitStore | None,
        keep: int,
        is_asked: Callable[[], bool],
    ):
        self._directory = directory
        self._run = run
        self._agreement = agreement
        self._store = store
        self._keep = keep
        self._is_asked = is_asked
        self._buffers: dict[str, np.ndarray] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.refusals: list[str] = []
        self.are_asked = False

    def save(self, snapshot: Snapshot) -> None:
        """Waits for the previous save, then starts to write a snapshot of the `fit`.

        Raises:
          BackupError: If the previous save failed for another reason than the storage.
        """
        self.wait()
        # At exit, a single worker finishes its save. Several workers do not, since a peer may have ended.
        alone = self._agreement.workers == 1
        self._thread = threading.Thread(target=self._work, args=[snapshot], name="tfdist-backup", daemon=not alone)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last snapshot of the `fit` is committed; raises like `save`."""
        if self._thread is not None:
            with beside_steps.section(SAVE):
                self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises the error of an earlier save, if it failed for another reason than the storage."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(OSError):  # Linux accepts thread ids too. Training goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        draft = Draft(self._directory, self._run, snapshot.step)
        since = time.monotonic_ns()
        try:
            said = {**self._write(draft, snapshot), "asked": self._is_asked() or _is_room_wanted()}
            settled = self._agreement.settle("save", said, lambda words: self._commit(draft, snapshot, words))
            self.refusals = settled["refusals"]
            EVENTS.note(SAVE, since=since, commit=snapshot.step, is_whole=not self.refusals)
            if self.refusals:
                logging.error(
                    "The backup of step %d could not be written. Training continues, earlier backups stay, and the "
                    "next save tries again. %s",
                    snapshot.step,
                    "; ".join(self.refusals),
                )
            else:
                _note_commit()
                _tell_supervisor(self._directory, snapshot.step)
                self.are_asked = settled["asked"]
        except BaseException as error:
            self._error = error

    def _write(self, draft: Draft, snapshot: Snapshot) -> dict[str, Any]:
        own = self._agreement.own
        try:
            # Copied first, before training overwrites a variable that shares its memory with a snapshot's tensor.
            shared = pack(snapshot.shared if self._agreement.is_chief else {}, self._buffers)
            snapshot.shared.clear()
            index, pieces = pack(snapshot.own, self._buffers)
            snapshot.own.clear()
            late = pack(snapshot.late(), self._buffers)
            files = {
                **write_part(draft, f"part-{own}", (index, pieces), snapshot.own_plain),
                **write_part(draft, f"late-{own}", late, None),
            }
            if self._agreement.is_chief:
                files.update(write_part(draft, "state", shared, snapshot.plain))
            return {"files": files}
        except Exception as error:
            if not isinstance(error, OSError):
                self._error = error
            return {"refusal": f"{self._agreement.who}: {error or type(error).__name__}"}

    def _commit(self, draft: Draft, snapshot: Snapshot, words: list[Any]) -> dict[str, Any]:
        """Completes the commit, on the chief. Returns storage errors and whether a worker was asked to leave."""
        assert self._store is not None
        refusals = [said["refusal"] for said in words if "refusal" in said]
        asked = any(said["asked"] for said in words)
        if not refusals:
            files = {name: described for said in words for name, described in said["files"].items()}
            workers = self._agreement.workers
            manifest = {**snapshot.described, "workers": workers, "versions": versions(), "files": files}
            try:
                self._store.commit(draft, manifest, self._keep)
                return {"refusals": [], "asked": asked}
            except OSError as error:
                refusals = [f"{self._agreement.who}: {error}"]
        self._store.discard(draft)
        return {"refusals": refusals, "asked": asked}


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect the bits of a training, to compare them at a restart."""
    return {package: version_of(package) for package in ("tfdist", "keras", "tensorflow")}


def newest_commit_at() -> float | None:
    """Returns when this process or an earlier one of its run made the newest commit, in seconds since the epoch.

    Returns:
      The time, or `None` if no commit is known.
    """
    files = RunFiles.of_worker()
    return _newest_commit_at or (files.committed_at if files else None)


def _note_commit() -> None:
    global _newest_commit_at
    _newest_commit_at = time.time()


def _is_room_wanted() -> bool:
    """Whether the `tfdist run` of this host wants to restart with more workers, so that this job must leave."""
    files = RunFiles.of_worker()
    return files is not None and os.path.exists(files.room(os.environ.get(ATTEMPT, "")))


def tell_of_untold(directory: str, step: int) -> None:
    """Proves progress to `tfdist run` by a commit if the process that made it was killed before it could."""
    files = RunFiles.of_worker()
    told = files.committed if files else None
    if told is not None and told[1] == directory and told[0] < step:  # Otherwise it may be of an earlier run.
        _tell_supervisor(directory, step)


def _tell_supervisor(directory: str, step: int) -> None:
    """Tells the `tfdist run` of this host that a commit was made, which proves progress."""
    files = RunFiles.of_worker()
    if files is not None:
        try:
            files.tell_of_commit(step, directory)
        except OSError as error:
            logging.warning("The supervisor is not informed of the backup of step %d: %s", step, error)
