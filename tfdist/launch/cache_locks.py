"""Lock files of `tf.data.Dataset.cache(path)`: a worker that is killed while it fills a cache leaves one behind.

TensorFlow writes `<path>_<n>.lockfile` when an iterator begins to fill a cache, and refuses another iterator until the
file is gone. The file does not name its owner.
"""

import contextlib
import os
import pathlib
import re
import stat
from collections.abc import Iterator

__all__ = ["describe", "is_left_behind", "lock_named_in", "locks_in", "remove"]

_SUFFIX = ".lockfile"
_LOCK = re.compile(r"cache lockfile already exists \('(?P<path>[^']+\.lockfile)'\)")
# Other hosts cannot write to these, so a lock there is of this machine.
_LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
_WAY_OUT = (
    'Give each worker a path of its own: `data.cache(path + "-" + os.environ.get("TFDIST_SLOT", "0"))`, and let one '
    "iterator at a time read it"
)


def is_left_behind(lock: pathlib.Path, run_start: float, attempt_start: float) -> bool:
    """Whether a worker of an earlier attempt of this run made a lock, and is gone.

    The file must be of this user, of that time, on a disk of this machine, and written by TensorFlow. No process may
    have a file of the cache open: an iterator that fills a cache has one open all the time.

    Args:
      lock: The lock file.
      run_start: When the run began, in seconds since the epoch.
      attempt_start: When the newest attempt began, in seconds since the epoch; its workers may hold locks.
    """
    try:
        found = lock.lstat()
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_uid == os.geteuid()
            and run_start <= found.st_mtime < attempt_start
            and lock.read_text().startswith("Created at: ")
            and _file_system_of(lock) in _LOCAL_FILE_SYSTEMS
            and not any(name.startswith(os.path.realpath(lock).removesuffix(_SUFFIX)) for name in _open_files())
        )
    except (OSError, UnicodeError):
        return False


def remove(lock: pathlib.Path) -> bool:
    """Removes a lock; whether it is gone."""
    with contextlib.suppress(OSError):
        lock.unlink(missing_ok=True)
    return not lock.exists()


def locks_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files in a folder that are named like a lock."""
    try:
        return sorted(folder.glob(f"*{_SUFFIX}"))
    except OSError:
        return []


def describe(lock: pathlib.Path, attempt_start: float) -> str:
    """The words for a lock that is not removed: its holder, as far as that is known, and the remedy."""
    try:
        made = lock.lstat().st_mtime
    except OSError:
        return f"the lock {lock} of a data cache was in the way, and is gone now. {_WAY_OUT}."
    if made >= attempt_start:
        return f"two iterators fill one data cache: {lock} was made in this attempt. {_WAY_OUT}."
    return (
        f"the lock {lock} of a data cache is in the way. A process that was killed has left it, or one that still runs "
        f"holds it. If none fills that cache, remove it: `rm '{lock}'`. {_WAY_OUT}."
    )


def lock_named_in(message: str) -> pathlib.Path | None:
    """The lock file that an exception of TensorFlow names; None if it names none on this machine's file systems."""
    found = _LOCK.search(message)
    return pathlib.Path(found["path"]) if found and "://" not in found["path"] else None


def _open_files() -> Iterator[str]:
    """The paths of all files that the processes of this user have open."""
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield os.readlink(link)


def _file_system_of(path: pathlib.Path) -> str:
    """The type of the file system that holds a path, as /proc/self/mountinfo names it; empty if that is not known."""
    place, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            point = mount.split()[4]
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, rest.split()[0]
    return kind
