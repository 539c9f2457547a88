"""How much memory is left."""

import contextlib
import pathlib

# Of control groups version 2 and 1: the limit, what is used, and how much of that is files the kernel can forget.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(groups: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> int:
    """Bytes that are left on this machine, or to the container around this process."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    (available,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for limit, used, cached in _FILES:
        with contextlib.suppress(OSError, ValueError):  # no such container, or one without a limit: "max"
            room = int((groups / limit).read_text()) - int((groups / used).read_text())
            counts = dict(map(str.split, (groups / used).with_name("memory.stat").read_text().splitlines()))
            available = min(available, room + int(counts.get(cached, 0)))
    return available
