"""How much memory is left."""

import contextlib
import pathlib

# Of control groups version 2 and 1: their folder, the limit, what is used, and how much of that is files the kernel can
# forget.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(
    groups: pathlib.Path = pathlib.Path("/sys/fs/cgroup"), own: pathlib.Path = pathlib.Path("/proc/self/cgroup")
) -> int:
    """Bytes that are left on this machine, or to the container or job around this process.

    Args:
      groups: Where the kernel shows control groups.
      own: Where it says which this process is in; each within others, which may be limited, too.
    """
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    (available,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    places = {"": "/", **dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())}
    for controller, limit, used, cached in _VERSIONS:
        inside = pathlib.PurePosixPath(places.get(controller, "/").lstrip("/"))
        for path in (inside, *inside.parents):
            group = groups / controller / path
            with contextlib.suppress(OSError, ValueError):  # no such group, or one without a limit: "max"
                room = int((group / limit).read_text()) - int((group / used).read_text())
                counts = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                available = min(available, room + int(counts.get(cached, 0)))
    return available
