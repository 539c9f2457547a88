"""Commits (complete checkpoints) in a folder: writes a commit completely or not at all, finds the newest complete one.

    <directory>/
      lock                        held by the process that writes commits
      step-1200/                  a commit
        manifest.json               sizes and SHA-256 of all files, and SHA-256 of itself
        state.*, part-<worker>.*    files of the workers
      step-1300/
      .half-<run>-step-1400/      a draft, still incomplete, or the rest of a commit that is being removed
      faulty-step-1250/           a damaged commit that was set aside

A commit gets its folder name by one rename, after all its files were flushed. Where a rename is not atomic (object
stores), files are written in place. The manifest is written last and completes the commit.

A commit loses its folder name by one rename before its files are removed. In object stores its manifest is removed
first. If the process is killed meanwhile, the next one that claims the directory removes the rest.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from absl import logging

from tfdist import folder_lock
from tfdist.backup.storage import files_of, is_remote
from tfdist.errors import BackupError

FORMAT = 9
MANIFEST = "manifest.json"
LOCK = "lock"

_OF_KERAS = "latest.weights.h5"
_LOCK_SECONDS = 10.0  # time for a killed earlier run to end
_MANIFEST_BYTES = 1 << 28
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MANY = (20, 200, 2000)
_COMMIT = re.compile(r"step-([0-9]{1,18})")
_FILE = re.compile(r"(state|part-[0-9]+|late-[0-9]+)\.(bin|json)")
_HALF = re.compile(r"\.half-[0-9a-f]+-step-[0-9]+")


@dataclasses.dataclass(frozen=True)
class Commit:
    """A complete checkpoint in a backup directory.

    Attributes:
      step: Number of the commit.
      path: Folder of the commit.
      manifest: Description that was written with the commit, including its `files`.
    """

    step: int
    path: str
    manifest: Mapping[str, Any]

    def read(self, name: str) -> bytearray:
        """Returns the content of a file of the commit, compared with the SHA-256 in the manifest.

        Raises:
          BackupError: If the file cannot be read or has changed.
        """
        try:
            content = files_of(self.path).read(os.path.join(self.path, name))
        except OSError as error:
            raise BackupError(f"{name} of backup {self.path} can no longer be read: {error}.") from error
        if hashlib.sha256(content).hexdigest() != self.manifest["files"][name]["sha256"]:
            raise BackupError(
                f"{name} of backup {self.path} differs from what was written. If the storage works, start again: an "
                "older backup will be restored."
            )
        return content


@dataclasses.dataclass(frozen=True)
class Draft:
    """A commit that is still incomplete, to which all workers write their files.

    Attributes:
      directory: Folder of all commits.
      run: Identity of the run: hexadecimal digits that no other run has.
      step: Number of the commit.
    """

    directory: str
    run: str
    step: int

    @property
    def path(self) -> str:
        """The folder to which the workers write the files of the draft."""
        name = f"step-{self.step}"
        return os.path.join(self.directory, name if is_remote(self.directory) else f".half-{self.run}-{name}")

    def write(self, name: str, pieces: Any) -> dict[str, Any]:
        """Writes and flushes one file of the draft, and returns its size and SHA-256 for the manifest.

        Raises:
          OSError: If the file cannot be written.
        """
        files = files_of(self.path)
        files.make_folder(self.path)
        return files.write(os.path.join(self.path, name), pieces)


class CommitStore:
    """The commits in a backup directory, for the chief's process, which alone completes, chooses and removes them.

    Args:
      directory: A folder, or a path with "://" that `tf.io.gfile` supports.
    """

    def __init__(self, directory: str):
        self.directory = directory
        self._files = files_of(directory)
        self._holding: contextlib.ExitStack | None = None
        self._faulty: list[str] = []
        self._ended: dict[int, int | None] = {}  # By commit: the number of the `fit` that it ends.

    def claim(
        self,
        wait_seconds: float = _LOCK_SECONDS,
        other_host_seconds: float = folder_lock.OTHER_HOST_SECONDS,
        *,
        goes_on: bool = False,
    ) -> None:
        """Locks the backup directory for this process, removes drafts of dead runs, and checks that it can write.

        Storage other than a disk has no lock. Two jobs must not use the same path there.

        Args:
          wait_seconds: How long to wait for another process to release the directory.
          other_host_seconds: How long to wait for a process on another host, if this is longer.
          goes_on: Whether an earlier attempt of this run has claimed the directory. Then a full disk only causes a
            warning if there is a complete commit.

        Raises:
          BackupError: If the directory cannot be written, is locked, or has foreign folders named like commits.
        """
        try:
            self._files.make_folder(self.directory)
            self._refuse_others()
            if not is_remote(self.directory):
                if not os.path.exists(os.path.join(self.directory, LOCK)):
                    self.release()  # The script has emptied the folder between two `fit`s.
                    self._ended.clear()
                self._holding = self._holding or self._hold(wait_seconds, other_host_seconds)
            self._clear()
            probe_writing(self.directory, may_be_full=lambda: goes_on and self.newest_whole() is not None)
        except OSError as error:
            raise BackupError(_cannot_write(self.directory, error)) from error

    def _hold(self, wait_seconds: float, other_host_seconds: float) -> contextlib.ExitStack:
        """Locks the backup directory until the returned stack is closed, so that no other job uses it."""
        holding, lock = contextlib.ExitStack(), os.path.join(self.directory, LOCK)
        try:
            holding.enter_context(folder_lock.held(lock, wait_seconds, other_host_seconds, make_room=self._clear))
        except BlockingIOError as error:
            raise BackupError(
                f"One backup_dir serves one job at a time, but {error.strerror} is using {self.directory}. Wait for it "
                f"or end it, or give this job its own backup_dir.{folder_lock.way_out(error)}"
            ) from None
        return holding

    def _clear(self) -> None:
        for name in self._files.names(self.directory):
            if self._is_half_made(name):
                self._files.remove(os.path.join(self.directory, name))

    def _refuse_others(self) -> None:
        held = {f"step-{step}": others for step in sorted(self._steps()) if (others := self._files_of_others(step))}
        if held:
            name, others = next(iter(held.items()))
            raise BackupError(
                f"backup_dir must be a folder for the backups of one job, but {self.directory} has {', '.join(held)}, "
                f"and {name} holds {others[0]}, which no backup has. Move files away that are not from tfdist, or give "
                "another backup_dir. Nothing was changed."
            )

    def _files_of_others(self, step: int) -> list[str]:
        """Returns foreign files in a folder that is named like a commit; none if it is a commit, also a damaged one."""
        if self._is_own(step):
            return []
        try:
            names = self._files.names(os.path.join(self.directory, f"step-{step}"))
        except OSError:
            return []  # no folder
        if MANIFEST in names or any(_FILE.fullmatch(name) for name in names):
            return []
        return sorted(name for name in names if name and not name.startswith("."))

    def release(self) -> None:
        """Unlocks the backup directory for other processes."""
        if self._holding is not None:
            self._holding.close()
            self._holding = None

    def newest_whole(self) -> Commit | None:
        """Returns the newest undamaged commit to continue from, or `None`. Logs the damage of newer commits.

        Costs reading every byte of the commits that are checked.

        Raises:
          BackupError: If the newest undamaged commit has a format of another version of tfdist, or if the storage
            cannot be listed.
        """
        self._faulty = []
        return self._first_whole(self._seen_steps(), self._faulty)

    def tell_of_keras(self) -> None:
        """Warns if Keras' own callback has left a backup in the directory, which tfdist cannot restore."""
        with contextlib.suppress(OSError):
            if _OF_KERAS in self._files.names(self.directory):
                logging.warning(
                    "%s has a backup of Keras' own BackupAndRestore, which tfdist cannot restore: training starts "
                    "over. Load the weights of %s into the model first, or give another backup_dir.",
                    *(self.directory, _OF_KERAS),
                )

    def end_of_fit(self, fit: int) -> Commit | None:
        """Returns the newest undamaged commit at the end of `fit` number `fit`, to skip that `fit`, or `None`.

        Costs and errors as in `newest_whole`.
        """
        return self._first_whole([step for step in self._seen_steps() if self._ended_fit(step) == fit], [])

    def set_faulty_aside(self) -> None:
        """Renames the damaged commits that `newest_whole` skipped, so that they are not the newest. Deletes nothing.

        Raises:
          BackupError: If a commit cannot be renamed.
        """
        for path in self._faulty:
            try:
                taken = set(self._files.names(self.directory))
                name = f"faulty-{os.path.basename(path)}"
                others = [name, *(f"{name}-{i}" for i in range(1, len(taken) + 1))]
                free = next(other for other in others if other not in taken)
                self._files.move(path, os.path.join(self.directory, free))
            except OSError as error:
                raise BackupError(
                    f"The damaged backup {path} would count as the newest, but cannot be renamed ({error}). Move it "
                    "away, or give this user the permission."
                ) from error
        self._faulty = []

    def commit(self, draft: Draft, manifest: Mapping[str, Any], keep: int) -> Commit:
        """Turns a draft into a commit, and removes commits that are older than the newest `keep` and end no `fit`.

        Args:
          draft: The draft, with all files written.
          manifest: Description of the commit, as JSON. `files` has the results of `Draft.write` by name, `workers` the
            number of workers that wrote, `fit` a `fit`'s number in its program, `is_done` whether the commit ends it.
          keep: Number of commits to keep, including this one.

        Raises:
          OSError: If a file has another size than was written, or a write fails. Draft and earlier commits then stay.
        """
        for name, described in manifest["files"].items():
            size = self._files.size(os.path.join(draft.path, name))
            if size != described["bytes"]:
                raise OSError(f"{name} has {size} bytes, but {described['bytes']} were written")
        content = {**manifest, "format": FORMAT, "step": draft.step}
        draft.write(MANIFEST, [json.dumps({"manifest": content, "sha256": _digest(content)}).encode()])
        path = os.path.join(self.directory, f"step-{draft.step}")
        if draft.path != path:
            self._files.flush_folder(draft.path)
            self._files.move(draft.path, path)
        self._ended[draft.step] = _fit_that_is_ended(content)
        if self._ended[draft.step] is not None:
            self._tell_of_many(content)
        self._prune(keep)
        return Commit(draft.step, path, content)

    def discard(self, draft: Draft) -> None:
        """Removes the files of a draft that cannot become a commit. Ignores errors of the storage."""
        with contextlib.suppress(OSError):
            self._files.remove(draft.path)

    def delete(self) -> None:
        """Removes all commits, oldest first, unlocks the directory, and removes the directory if it is empty.

        Raises:
          OSError: If a commit cannot be removed.
        """
        for step in sorted(self._own_steps()):
            self._remove(step)
        self.release()
        with contextlib.suppress(OSError):  # A mount, a link, or a directory in a foreign folder stays, empty.
            self._files.remove_if_empty(self.directory)

    def _steps(self) -> list[int]:
        try:
            names = self._files.names(self.directory)
        except FileNotFoundError:
            return []
        found = [_COMMIT.fullmatch(name) for name in names]
        return [int(match[1]) for match in found if match and match[0] == f"step-{int(match[1])}"]

    def _own_steps(self) -> list[int]:
        return [step for step in self._steps() if self._is_own(step)]

    def _is_own(self, step: int) -> bool:
        """Whether a folder is a commit of tfdist: its manifest is valid, or this object has made it."""
        self._ended_fit(step)
        return step in self._ended

    def _is_half_made(self, name: str) -> bool:
        if self._files.renames_at_once or not _COMMIT.fullmatch(name):
            return bool(_HALF.fullmatch(name))
        return MANIFEST not in self._files.names(os.path.join(self.directory, name))

    def _first_whole(self, steps: Iterable[int], faulty: list[str]) -> Commit | None:
        """Returns the first undamaged commit. Logs the damaged ones before it, and adds their folders to `faulty`."""
        for step in steps:
            path = os.path.join(self.directory, f"step-{step}")
            fault = _fault_of(path, step)
            if isinstance(fault, Commit):
                return fault
            logging.warning("Backup %s is skipped: %s.", path, fault)
            faulty.append(path)
        return None

    def _seen_steps(self) -> list[int]:
        try:
            return sorted(self._steps(), reverse=True)
        except OSError as error:
            raise BackupError(f"The backups in {self.directory} cannot be listed ({error}). Start again.") from error

    def _remove(self, step: int) -> None:
        """Removes a commit. From the first change on it is half-made, so that the next claim removes what is left."""
        path = os.path.join(self.directory, f"step-{step}")
        if self._files.renames_at_once:
            rest = os.path.join(self.directory, f".half-{secrets.token_hex(8)}-step-{step}")
            os.rename(path, rest)  # without a flush, which a full disk may refuse
        else:
            rest = path
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(os.path.join(path, MANIFEST))
        self._ended.pop(step, None)
        self._files.remove(rest)

    def _prune(self, keep: int) -> None:
        try:
            steps = sorted(self._own_steps(), reverse=True)
            ends = {fit: step for step in reversed(steps) if (fit := self._ended_fit(step)) is not None}
            old = [step for step in steps[keep:] if step not in ends.values()]
        except OSError as error:
            logging.warning("Old backups stay in %s: %s.", self.directory, error)
            return
        for step in old:
            try:
                self._remove(step)
            except OSError as error:
                logging.warning("An old backup stays in %s: %s.", self.directory, error)

    def _tell_of_many(self, newest: Mapping[str, Any]) -> None:
        """Warns if the ends of many `fit`s, which are all kept, may fill the disk."""
        ended = [fit for fit in self._ended.values() if fit is not None]
        count = len(set(ended))
        if count in _MANY and ended.count(newest["fit"]) == 1:
            size = sum(described["bytes"] for described in newest["files"].values())
            logging.warning(
                "%s keeps a backup of the end of each fit, so that a restart can skip each with its own state: %d so "
                "far, the last of %.1f MB. If the disk is too small, train in fewer fits of more epochs.",
                *(self.directory, count, size / 1e6),
            )

    def _ended_fit(self, step: int) -> int | None:
        if step not in self._ended:
            path = os.path.join(self.directory, f"step-{step}", MANIFEST)
            try:
                manifest = _checked_manifest(self._files, path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None  # damaged, or currently unreachable
            self._ended[step] = _fit_that_is_ended(manifest)
        return self._ended[step]


def _fit_that_is_ended(manifest: Mapping[str, Any]) -> int | None:
    return manifest.get("fit") if manifest.get("is_done") else None


def probe_writing(directory: str, *, may_be_full: Callable[[], bool]) -> None:
    """Checks that a directory is writable by a small file, because permission bits always pass for root.

    If the disk is full, `may_be_full` tells whether a warning suffices.

    Raises:
      OSError: If the file cannot be written.
    """
    # Named by a random token, because workers on several hosts may have equal process ids.
    path = os.path.join(directory, f".half-{secrets.token_hex(8)}-step-0")
    files = files_of(directory)
    try:
        files.write(path, [b"tfdist"])
    except OSError as error:
        with contextlib.suppress(OSError):
            files.remove(path)
        if error.errno not in _FULL or not may_be_full():
            raise
        logging.warning(
            "No backup can be written to %s (%s): training continues from the newest one there, and returns to it "
            "after a failure, until there is room.",
            *(directory, error),
        )
    else:
        files.remove(path)


def _cannot_write(directory: str, error: OSError) -> str:
    full = error.errno in _FULL
    return (
        f"{directory} must be writable for backups, but {'the disk is full' if full else 'is not'} ({error}). "
        f"{'Make room' if full else 'Let this user write there'}, or give another backup_dir."
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fault_of(path: str, step: int) -> Commit | str:
    """Returns the commit in a folder if it is undamaged, otherwise a description of the damage."""
    files = files_of(path)
    try:
        manifest = _checked_manifest(files, os.path.join(path, MANIFEST))
        if manifest["step"] != step:
            return f"its manifest is of step {manifest['step']}"
        if manifest["format"] != FORMAT:
            update = "Update tfdist" if manifest["format"] > FORMAT else "Use that version"
            raise BackupError(
                f"{path} was written by tfdist {manifest.get('versions', {}).get('tfdist')} in format "
                f"{manifest['format']}; this version reads format {FORMAT}. {update}, or give another backup_dir."
            )
        for name, described in manifest["files"].items():
            file = os.path.join(path, name)
            size = files.size(file)
            if size != described["bytes"]:
                return f"{name} has {size} bytes instead of {described['bytes']}"
            if files.digest(file) != described["sha256"]:
                return f"{name} has other bytes than were written"
    except OSError as error:
        return f"it cannot be read ({error})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest is damaged ({error!r})"
    return Commit(step, path, manifest)


def _checked_manifest(files: Any, path: str) -> dict[str, Any]:
    if files.size(path) > _MANIFEST_BYTES:
        raise ValueError("too large")
    envelope = json.loads(files.read(path))
    content = envelope["manifest"]
    if _digest(content) != envelope["sha256"]:
        raise ValueError("its checksum is wrong")
    for key, least, default in (("format", 1, None), ("step", 0, None), ("workers", 1, None), ("fit", 0, 0)):
        value = content.get(key, default)
        if type(value) is not int or value < least:
            raise ValueError(f"its {key} is {_in_short(value)}")
    sites = content.get("sites", [])
    if not isinstance(sites, list) or not all(isinstance(site, str) for site in sites):
        raise ValueError(f"its sites are {_in_short(sites)}")
    if not isinstance(content.get("versions", {}), dict):
        raise ValueError(f"its versions are {_in_short(content['versions'])}")
    for name, described in content["files"].items():
        if os.path.basename(name) != name:
            raise ValueError(f"{_in_short(name)} is not the name of a file in it")
        if type(described["bytes"]) is not int or not isinstance(described["sha256"], str):
            raise ValueError(f"its {name} is described by {_in_short(described)}")
    return content


def _in_short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
