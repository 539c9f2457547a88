"""Lock files of `tf.data.Dataset.cache(path)`, which a worker leaves behind if it is killed while it fills a cache.

TensorFlow writes `<path>_<n>.lockfile` when an iterator starts to fill a cache. It refuses any other iterator until the
file is removed. The file does not name its owner.
"""

import contextlib
import os
import pathlib
import re
import stat
from collections.abc import Iterator

_SUFFIX = ".lockfile"
_LOCK = re.compile(r"cache lockfile already exists \('(?P<path>[^']+\.lockfile)'\)")
# Other hosts cannot write to these file systems, so a process of this machine made any lock there.
_LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
_WAY_OUT = (
    'Give each worker its own path: `data.cache(path + "-" + os.environ.get("TFDIST_SLOT", "0"))`, and read it with '
    "one iterator at a time"
)


def is_left_behind(lock: pathlib.Path, run_start: float, attempt_start: float) -> bool:
    """Returns whether a cache's lock file was made by a worker of an earlier attempt of this run that has ended.

    The file must belong to this user, date from that time, be on a local disk, and be written by TensorFlow. No process
    may have a file of the cache open, because an iterator that fills a cache always has a file of the cache open.

    Args:
      lock: Path of the lock file.
      run_start: Start of the run, in seconds since the epoch.
      attempt_start: Start of the newest attempt, in seconds since the epoch. Its workers may hold locks.
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
    """Removes the lock file of a data cache. Returns whether it no longer exists."""
    with contextlib.suppress(OSError):
        lock.unlink(missing_ok=True)
    return not lock.exists()


def locks_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files in a folder that are named like a lock file of `Dataset.cache`."""
    try:
        return sorted(folder.glob(f"*{_SUFFIX}"))
    except OSError:
        return []


def describe(lock: pathlib.Path, attempt_start: float) -> str:
    """Describes a cache's lock file that is not removed, with its holder, if known, and the remedy, for a message."""
    try:
        made = lock.lstat().st_mtime
    except OSError:
        return f"the lock file {lock} blocked a data cache, but no longer exists. {_WAY_OUT}."
    if made >= attempt_start:
        return f"two iterators fill one data cache: the lock file {lock} was made in this attempt. {_WAY_OUT}."
    return (
        f"the lock file {lock} blocks a data cache. A killed process has left it behind, or a running process holds "
        f"it. If no process fills that cache, remove it: `rm '{lock}'`. {_WAY_OUT}."
    )


def lock_named_in(message: str) -> pathlib.Path | None:
    """Returns the cache's lock file named in an error of TensorFlow, or None if there is none or on remote storage."""
    found = _LOCK.search(message)
    return pathlib.Path(found["path"]) if found and "://" not in found["path"] else None


def _open_files() -> Iterator[str]:
    """Yields the paths of all files that processes of this user have open, to find caches in use."""
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield os.readlink(link)


def _file_system_of(path: pathlib.Path) -> str:
    """Returns a path's file system type as in /proc/self/mountinfo, to find local disks; empty if unknown."""
    place, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            point = mount.split()[4]
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, rest.split()[0]
    return kind
