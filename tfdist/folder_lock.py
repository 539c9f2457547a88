"""Lock files, with which one process marks a folder or another resource as in use."""

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import IO

from absl import logging

from tfdist.symlink_safe_file import no_follow

OTHER_HOST_SECONDS = 120.0  # An NFS server keeps a dead host's locks for its lease time, 90 s by default.
_POLL_SECONDS, _TELL_SECONDS = 0.1, 30.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A `struct flock` of Linux that locks the whole file. Fields: type, whence, start, length, process.
_ALL_OF_IT = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_held: set[IO[str]] = set()  # Files that this process holds.


@contextlib.contextmanager
def held(
    path: str | os.PathLike[str],
    wait_seconds: float = 0.0,
    other_host_seconds: float = OTHER_HOST_SECONDS,
    make_room: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Holds a lock file while the block runs, then removes the file.

    The kernel releases the lock when this process dies; child processes do not inherit the lock. Reading the file does
    not release the lock. Hosts with a shared disk exclude each other if its file system supports locks; without locks,
    a warning is logged. The lock of a dead host is released late. On a full disk the file may not name its holder.

    Args:
      path: Path of the lock file.
      wait_seconds: Longest time to wait for another process to release the lock.
      other_host_seconds: Longest time to wait for a holder on another host, if larger than `wait_seconds`.
      make_room: Called with the lock held, before the file is written.

    Raises:
      BlockingIOError: If another process holds the lock. `strerror` names the process.
      OSError: If the file cannot be written.
    """
    with _opened(path, wait_seconds, other_host_seconds) as file:
        owner = os.getpid()
        _held.add(file)
        try:
            make_room()
            _write(file, f"process {owner} on {socket.gethostname()}")
            yield
        finally:
            _held.discard(file)
            if os.getpid() == owner:  # A child that was forked in the block must not remove it.
                with contextlib.suppress(OSError):
                    os.unlink(path)


def way_out(error: BlockingIOError) -> str:
    """Returns advice to end an error message with if a lock's holder is on another host, otherwise an empty string."""
    if not _is_elsewhere(error):
        return ""
    return f" If its host has failed, storage may notice it late: then remove {error.filename}."


def _opened(path: str | os.PathLike[str], wait_seconds: float, other_host_seconds: float) -> IO[str]:
    began = told = time.monotonic()
    while True:
        file = open(path, "a+", opener=no_follow)  # noqa: SIM115 (the caller closes the file)
        try:
            _lock(file)
            if _is_at(path, file):
                return file  # Otherwise the previous holder removed it after `open`.
        except BlockingIOError as error:
            now = time.monotonic()
            if now - began >= (max(wait_seconds, other_host_seconds) if _is_elsewhere(error) else wait_seconds):
                file.close()
                raise
            if _is_elsewhere(error) and (told == began or now - told >= _TELL_SECONDS):
                told = now
                logging.warning(
                    "%s is locked by %s: waiting up to %.0f s, since storage may notice late that a host has failed.",
                    *(path, error.strerror, max(wait_seconds, other_host_seconds) - (now - began)),
                )
            time.sleep(_POLL_SECONDS)
        except BaseException:
            file.close()
            raise
        file.close()


def _is_elsewhere(error: BlockingIOError) -> bool:
    """Returns whether a lock's holder runs on another host, or in a container with this host's name."""
    known = re.fullmatch(r"process (\d+) on (.*)", error.strerror or "")
    if known is None:
        return False
    pid, host = int(known[1]), known[2]
    if host != socket.gethostname() or pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # The process exists, but belongs to another user.
    return False


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    try:
        os.write(file.fileno(), text.encode())
        os.fsync(file.fileno())  # Without fsync, other hosts may see the text much later.
    except OSError as error:
        if error.errno not in _FULL:
            raise


def _let_go_in_child() -> None:
    """Closes the lock files in a forked child, which would otherwise hold the locks after its parent died."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _lock(file: IO[str]) -> None:
    try:
        _lock_as_opened(file)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logging.warning("%s cannot be locked (%s): let no other job use its folder.", file.name, error.strerror)
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise BlockingIOError(errno.EAGAIN, file.read(1000) or "another process", file.name) from error
        else:
            raise


def _lock_as_opened(file: IO[str]) -> None:
    """Locks a file for this open file description: a process's lock ends when any code in it closes the same file."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _ALL_OF_IT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_NO_LOCKS):
            raise
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(path: str | os.PathLike[str], file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
