"""A file that one process holds, to say that what it stands for is in use."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from typing import IO

from absl import logging

__all__ = ["held"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def held(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a file in the block, and removes it.

    The kernel lets go of it when this process dies, whatever that has started: no child inherits it. Hosts that share
    a disk exclude each other as far as its file system can lock; where it cannot, a warning says so.

    Raises:
      BlockingIOError: If another process holds it; its `strerror` says which.
      OSError: If it cannot be written.
    """
    while True:
        with open(path, "a+") as file:
            _lock(file)
            if not _is_at(path, file):  # removed by the one before, between the two lines above
                continue
            file.truncate(0)
            owner = os.getpid()
            file.write(f"process {owner} on {socket.gethostname()}")
            file.flush()
            os.fsync(file.fileno())  # or other hosts may see it much later
            try:
                yield
            finally:
                if os.getpid() == owner:  # and not a child that was forked in the block
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            return


def _lock(file: IO[str]) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logging.warning("%s cannot be locked (%s): let nobody else use its folder.", file.name, error.strerror)
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise BlockingIOError(errno.EAGAIN, file.read(1000) or "another process", file.name) from error
        else:
            raise


def _is_at(path: str | os.PathLike[str], file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
