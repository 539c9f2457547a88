"""Measures the memory that this process may still use, also in a container or a job of a scheduler."""

import contextlib
import pathlib

# Control groups version 2 and 1: folder, file with the limit, file with the used memory. The last column names the
# entry for cached files, which the kernel can free.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(
    groups: pathlib.Path = pathlib.Path("/sys/fs/cgroup"), own: pathlib.Path = pathlib.Path("/proc/self/cgroup")
) -> int:
    """Returns the free bytes on this machine, or in the container or job of this process if it has fewer.

    Args:
      groups: Folder of the control groups, with which Linux limits the memory of containers and jobs.
      own: File with the control groups of this process. The limits of their parent groups count too.
    """
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    (available,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    places = {"": "/", **dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())}
    for controller, limit, used, cached in _VERSIONS:
        inside = pathlib.PurePosixPath(places.get(controller, "/").lstrip("/"))
        for path in (inside, *inside.parents):
            group = groups / controller / path
            with contextlib.suppress(OSError, ValueError):  # No such group, or no limit: "max".
                room = int((group / limit).read_text()) - int((group / used).read_text())
                counts = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                available = min(available, room + int(counts.get(cached, 0)))
    return available
