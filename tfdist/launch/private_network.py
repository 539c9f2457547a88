"""A private network for one job: a Linux network namespace that contains only loopback."""

import ctypes
import errno
import fcntl
import os
import pathlib
import socket
import struct

from tfdist.errors import ClusterError

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # From sched.h. `os.unshare` needs Python 3.12.
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Moves this process and its later children to a network that nothing outside can reach.

    Needs no privileges if the kernel lets users create namespaces. Call it before any thread is started.

    Raises:
      ClusterError: If the kernel does not allow the move.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        try:
            _unshare(_CLONE_NEWNET)
        except PermissionError:  # Without root, works as root of an own user namespace.
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
            _map_to_itself(uid, gid)
        _set_loopback_up()
    except OSError as error:
        raise ClusterError(
            f"--private-network needs a kernel that lets this user make network namespaces, but it refuses: {error}. "
            "Ask the administrator to allow user namespaces (`sysctl user.max_user_namespaces`, "
            "`kernel.apparmor_restrict_unprivileged_userns`, the seccomp profile of a container), or leave the option "
            "out and close the ports in a firewall."
        ) from error


def _unshare(flags: int) -> None:
    if _LIBC.unshare(flags):
        number = ctypes.get_errno()
        why = "this process has several threads" if number == errno.EINVAL else os.strerror(number)
        raise OSError(number, why)


def _map_to_itself(uid: int, gid: int) -> None:
    """Maps the user and the group to the same ids inside the user namespace as outside."""
    here = pathlib.Path("/proc/self")
    (here / "setgroups").write_text("deny")
    (here / "uid_map").write_text(f"{uid} {uid} 1")
    (here / "gid_map").write_text(f"{gid} {gid} 1")


def _set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
