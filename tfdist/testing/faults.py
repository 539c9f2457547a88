"""Fault injection for a process, its disk, its network and its files.

The faults are real: signals stop processes, the kernel refuses writes, network interfaces go down. Does not load
TensorFlow. `tfdist.testing.Fault` injects these faults at a given step of training.
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

__all__ = ["Slowdown", "corrupt", "cut_network", "fill_disk", "freeze", "small_disk", "thaw"]

_PERIOD_SECONDS = 0.1
# Reads new factors from standard input. When standard input closes, the slowed process continues at full speed.
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


def freeze(pid: int) -> None:
    """Stops the process with the id `pid` (SIGSTOP). It stays alive, keeps its connections and answers nothing."""
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    """Continues the process with the id `pid`, which `freeze` has stopped."""
    os.kill(pid, signal.SIGCONT)


class Slowdown:
    """Slows a process down by stopping all its threads for a part of each tenth of a second.

    A helper process sends the signals, so computation itself slows down. The slowdown ends with the block or with this
    process. The slowed process may be this one.

    Args:
      pid: Id of the process.
      factor: Slowdown factor, at least 1.

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def change(self, factor: float) -> None:
        """Changes the slowdown factor of the process from now on.

        Raises:
          ValueError: If the factor is below 1.
        """
        if self._helper.stdin:
            with contextlib.suppress(BrokenPipeError):  # The slowed process and the helper have ended.
                self._helper.stdin.write(f" {_checked(factor)}\n".encode())

    def close(self) -> None:
        """Ends the slowdown, so that the process continues at full speed."""
        if self._helper.stdin:
            self._helper.stdin.close()
        self._helper.wait()


def _checked(factor: float) -> float:
    if not factor >= 1:
        raise ValueError(f"A slowdown needs a factor of at least 1, got {factor}.")
    return float(factor)


def fill_disk(largest_bytes: int = 1 << 16) -> None:
    """Limits the size of files that this process and its later children write. Larger writes raise `OSError` (EFBIG).

    Needs no privileges and cannot be undone. The limit also applies to log files, so leave room for logs. To simulate a
    disk that is full for all processes (ENOSPC), see `small_disk`.

    Args:
      largest_bytes: Largest allowed file size.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Otherwise the kernel ends the process.
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def small_disk(folder: str | os.PathLike[str], size_bytes: int) -> Iterator[pathlib.Path]:
    """Mounts a small in-memory disk at a folder. Once the disk is full, writes raise `OSError` (ENOSPC).

    Needs root. The mount hides the folder's files while the block runs. Files written in the block are lost at its end.

    Args:
      folder: An existing folder.
      size_bytes: Size of the disk, rounded up to whole pages of memory.

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
    """Takes down a network interface of this machine or of this process's network namespace.

    Needs root. Cuts the connections of all processes that use the interface, so give each worker a network namespace of
    its own (`ip netns`, containers). `ip link set dev LINK up` undoes the cut.

    Args:
      link: Name of the network interface, such as "eth0".

    Raises:
      PermissionError: If the interface does not exist, or this process may not change it.
    """
    _run(["ip", "link", "set", "dev", link, "down"], f"cut_network takes the link {link!r} down, which needs root")


def corrupt(path: str | os.PathLike[str], seed: int, how: str | None = None) -> str:
    """Damages a file, to test whether a program detects the damage.

    Args:
      path: Path of a file that is not empty.
      seed: Seed of the random choices.
      how: "truncate", "flip" (one bit) or "remove"; by default a random choice.

    Returns:
      Description of the damage.

    Raises:
      ValueError: If `how` is unknown, or the file is empty.
    """
    choose = random.Random(seed)
    path = pathlib.Path(path)
    content = bytearray(path.read_bytes())
    if how not in (None, "truncate", "flip", "remove"):
        raise ValueError(f'corrupt needs "truncate", "flip" or "remove" as `how`, got {how!r}.')
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
