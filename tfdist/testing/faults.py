"""Faults for drills: what may happen to a process, its disk, its network and its files.

Nothing here pretends: processes are stopped by signals, writes are refused by the kernel, links are taken down. Loads
no TensorFlow. `tfdist.testing.Fault` makes them happen at a named step of a training.
"""

import contextlib
import errno
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

__all__ = ["Slowdown", "corrupt", "cut_network", "fill_disk", "freeze", "kill", "small_disk", "thaw"]

_PERIOD_SECONDS = 0.1
# Its standard input holds the factor; at its end the process goes on at full speed.
_SLOW_CODE = """
import os, select, signal, sys
pid, period, factor = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while True:
        for number, share in ((signal.SIGSTOP, 1 - 1 / factor), (signal.SIGCONT, 1 / factor)):
            if number == signal.SIGCONT or factor > 1:
                os.kill(pid, number)
            if select.select([0], [], [], period * share)[0]:
                line = os.read(0, 64)
                if not line:
                    raise SystemExit
                factor = float(line.split()[-1])
except ProcessLookupError:
    pass
finally:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


def kill(pid: int) -> None:
    """Ends a process at once (SIGKILL), as the kernel does when memory is out."""
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """Stops a process (SIGSTOP): it lives, keeps its connections and answers nothing."""
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    """Lets a frozen process go on."""
    os.kill(pid, signal.SIGCONT)


class Slowdown:
    """Makes a process slower by stopping it for a part of each tenth of a second, in all its threads.

    A helper process does it, so it acts on computation itself. It ends with the block, or with this process. The
    slowed process may be this one.

    Args:
      pid: Which process.
      factor: How many times slower, from 1 up.

    Raises:
      ValueError: If the factor is below 1.
    """

    def __init__(self, pid: int, factor: float):
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SLOW_CODE, str(pid), str(_PERIOD_SECONDS), str(_checked(factor))],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> "Slowdown":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def change(self, factor: float) -> None:
        """Sets another factor, from now on.

        Raises:
          ValueError: If it is below 1.
        """
        if self._helper.stdin:
            with contextlib.suppress(BrokenPipeError):  # the slowed process has ended, and so has the helper
                self._helper.stdin.write(f" {_checked(factor)}\n".encode())

    def close(self) -> None:
        """Lets the process go on at full speed."""
        if self._helper.stdin:
            self._helper.stdin.close()
        self._helper.wait()


def _checked(factor: float) -> float:
    if not factor >= 1:
        raise ValueError(f"A slowdown needs a factor from 1 up, got {factor}.")
    return float(factor)


def fill_disk(largest_bytes: int = 1 << 16) -> None:
    """Lets this process, and what it starts, write no file beyond a size: such a write raises `OSError` (EFBIG).

    Needs no rights, and cannot be undone. Logs are files too: leave them some room. For a disk that is full for all,
    with ENOSPC, see `small_disk`.

    Args:
      largest_bytes: The size up to which files can be written.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Else the kernel ends the process.
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def small_disk(folder: str | os.PathLike[str], size_bytes: int) -> Iterator[pathlib.Path]:
    """Mounts a disk in memory at a folder, of a size that is soon used up: then writes raise `OSError` (ENOSPC).

    Needs root. What was in the folder is hidden for as long as the block lasts; what is written there is lost with it.

    Args:
      folder: An existing folder.
      size_bytes: Its size, rounded up to whole pages of memory.

    Raises:
      PermissionError: If this process may not mount.
    """
    options = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tfdist-small-disk", os.fspath(folder)]
    _run(options, "small_disk mounts a disk, which needs root (CAP_SYS_ADMIN)")
    try:
        yield pathlib.Path(folder)
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(folder)], check=True, timeout=10)


def cut_network(link: str) -> None:
    """Takes a link of this machine, or of the network namespace that this process is in, down: no message passes.

    Needs root. Also the connections of others over that link are cut: give workers namespaces of their own (`ip netns`,
    containers). `ip link set dev LINK up` undoes it.

    Args:
      link: The name of a network interface, such as "eth0".

    Raises:
      PermissionError: If there is no such link, or it may not be changed.
    """
    _run(["ip", "link", "set", "dev", link, "down"], f"cut_network takes the link {link!r} down, which needs root")


def corrupt(path: str | os.PathLike[str], seed: int, how: str | None = None) -> str:
    """Damages a file.

    Args:
      path: Which file; not an empty one.
      seed: Of the choices made here.
      how: "truncate", "flip" (one bit) or "remove"; by default one of them by chance.

    Returns:
      What was done, in words.

    Raises:
      ValueError: If `how` is none of these, or the file is empty.
    """
    choose = random.Random(seed)
    path = pathlib.Path(path)
    content = bytearray(path.read_bytes())
    if how not in (None, "truncate", "flip", "remove"):
        raise ValueError(f'corrupt knows "truncate", "flip" and "remove", got {how!r}.')
    if not content:
        raise ValueError(f"corrupt needs a file with content, but {path} is empty.")
    how = how or choose.choice(["truncate", "flip", "remove"])
    place = choose.randrange(len(content))
    if how == "truncate":
        os.truncate(path, place)
        return f"truncated {path} from {len(content)} to {place} bytes"
    if how == "flip":
        content[place] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        return f"flipped a bit of byte {place} of {path}"
    path.unlink()
    return f"removed {path}"


def _run(command: list[str], need: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise PermissionError(errno.EPERM, f"{need}: {done.stderr.strip()}")
