"""A file that one process holds, to say that what it stands for is in use."""

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

__all__ = ["OTHER_HOST_SECONDS", "held", "way_out"]

OTHER_HOST_SECONDS = 120.0  # A server of NFS keeps the locks of a host that died for its lease, 90 s by default.
_POLL_SECONDS, _TELL_SECONDS = 0.1, 30.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# All of a file, as `struct flock` of Linux: type, whence, start, length, process.
_ALL_OF_IT = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_held: set[IO[str]] = set()  # by this process


@contextlib.contextmanager
def held(
    path: str | os.PathLike[str],
    wait_seconds: float = 0.0,
    other_host_seconds: float = OTHER_HOST_SECONDS,
    make_room: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Holds a file in the block, and removes it.

    The kernel lets go of it when this process dies, whatever that has started: no child inherits it. Whoever reads the
    file leaves it held. Hosts that share a disk exclude each other as far as its file system can lock; where it cannot,
    a warning says so. A host that dies lets go late. On a full disk the file may not say who holds it.

    Args:
      path: The file.
      wait_seconds: How long to wait for another process that holds it.
      other_host_seconds: The same for one on another host, if that is longer.
      make_room: Called when it is held, before it is written.

    Raises:
      BlockingIOError: If another process holds it; its `strerror` says which.
      OSError: If it cannot be written.
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
            if os.getpid() == owner:  # and not a child that was forked in the block
                with contextlib.suppress(OSError):
                    os.unlink(path)


def way_out(error: BlockingIOError) -> str:
    """What to do if the holder is on another host, for the end of a message; nothing if it is on this one."""
    if not _is_elsewhere(error):
        return ""
    return f" If its host is gone, which storage may learn late, remove {error.filename}."


def _opened(path: str | os.PathLike[str], wait_seconds: float, other_host_seconds: float) -> IO[str]:
    began = told = time.monotonic()
    while True:
        file = open(path, "a+", opener=no_follow)  # noqa: SIM115 (closed by who holds it)
        try:
            _lock(file)
            if _is_at(path, file):
                return file  # else removed by the one before, between the two lines above
        except BlockingIOError as error:
            now = time.monotonic()
            if now - began >= (max(wait_seconds, other_host_seconds) if _is_elsewhere(error) else wait_seconds):
                file.close()
                raise
            if _is_elsewhere(error) and (told == began or now - told >= _TELL_SECONDS):
                told = now
                logging.warning(
                    "%s is held by %s, not here: waiting up to %.0f s, as storage learns late that a host is gone.",
                    *(path, error.strerror, max(wait_seconds, other_host_seconds) - (now - began)),
                )
            time.sleep(_POLL_SECONDS)
        except BaseException:
            file.close()
            raise
        file.close()


def _is_elsewhere(error: BlockingIOError) -> bool:
    """Whether the holder is on another host, or in a container of this one's name: no such process is here."""
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
        return False  # somebody else's
    return False


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    try:
        os.write(file.fileno(), text.encode())
        os.fsync(file.fileno())  # or other hosts may see it much later
    except OSError as error:
        if error.errno not in _FULL:
            raise


def _let_go_in_child() -> None:
    """A child that is forked has the same files, and would hold them for longer than its parent lives."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _lock(file: IO[str]) -> None:
    try:
        _lock_as_opened(file)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logging.warning("%s cannot be locked (%s): let nobody else use its folder.", file.name, error.strerror)
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise BlockingIOError(errno.EAGAIN, file.read(1000) or "another process", file.name) from error
        else:
            raise


def _lock_as_opened(file: IO[str]) -> None:
    """By a lock of the file as it was opened here: one of the process ends when any part of it closes that file."""
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
