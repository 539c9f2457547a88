"""Finds the process of this machine that listens at a TCP port."""

import contextlib
import os
import pathlib

_LISTENS = "0A"
_PROC = pathlib.Path("/proc")


def holder_of(port: int) -> str | None:
    """Returns the process that listens at a TCP port of this machine or container: "process 4711 (python)".

    Processes of other users are visible to root only. The command line is not shown, since it may hold secrets.

    Returns:
      The process, or None if none is found.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for process in _PROC.iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError), os.scandir(process / "fd") as descriptors:
            if any(_target(each.path) in sockets for each in descriptors):
                name = (process / "comm").read_text(errors="replace").strip()
                return f"process {process.name} ({name})"
    return None


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "self/net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(rest[5])
    return found


def _target(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""
