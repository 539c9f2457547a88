"""Detects stopped workers (SIGSTOP). Peers do not notice a stop soon if the worker still starts or trains alone."""

import math
import pathlib
from collections.abc import Callable, Mapping

SECONDS = 15.0  # Longer than peers need to notice and report a stopped worker that trains with them.
_LOOK_SECONDS = 1.0


class StoppedWorkers:
    """Measures how long workers have been stopped (SIGSTOP), to kill them. A stop by a debugger does not count.

    Costs one read of a file in `/proc` per worker and second.
    """

    def __init__(self, is_stopped: Callable[[int], bool] | None = None):
        self._is_stopped = is_stopped or _is_stopped
        self._seconds: dict[int, float] = {}
        self._looked = -math.inf

    def see(self, pids: Mapping[int, int], now: float) -> list[int]:
        """Returns workers stopped (SIGSTOP) for `SECONDS`, given process ids by worker and the time of any clock."""
        elapsed = abs(now - self._looked)
        if elapsed < _LOOK_SECONDS:
            return []
        self._looked = now
        # If this process was stopped too, as when a batch system stops a whole job, that time does not count.
        elapsed = min(elapsed, 2 * _LOOK_SECONDS)
        stopped = [worker for worker, pid in pids.items() if self._is_stopped(pid)]
        self._seconds = {worker: self._seconds.get(worker, -elapsed) + elapsed for worker in stopped}
        return [worker for worker, seconds in self._seconds.items() if seconds >= SECONDS]


def _is_stopped(pid: int) -> bool:
    try:
        # The state follows the process name in brackets, which may contain any character.
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
