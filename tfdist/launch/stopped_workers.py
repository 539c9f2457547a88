"""Workers that are stopped (SIGSTOP): of one that still starts, or that trains alone, nobody else learns soon."""

import math
import pathlib
from collections.abc import Callable, Mapping

__all__ = ["SECONDS", "StoppedWorkers"]

SECONDS = 15.0  # More than others take to notice it of one that trains with them, and to tell.
_LOOK_SECONDS = 1.0


class StoppedWorkers:
    """Adds up for how long workers have been stopped; a debugger's hold is none.

    Costs reading a file of `/proc` for each worker and second.

    Args:
      is_stopped: Of the number of a process.
    """

    def __init__(self, is_stopped: Callable[[int], bool] | None = None):
        self._is_stopped = is_stopped or _is_stopped
        self._seconds: dict[int, float] = {}
        self._looked = -math.inf

    def see(self, pids: Mapping[int, int], now: float) -> list[int]:
        """Those that have been stopped for `SECONDS` by now, in seconds of any clock; by worker, the numbers of all."""
        elapsed = abs(now - self._looked)
        if elapsed < _LOOK_SECONDS:
            return []
        self._looked = now
        # Who is stopped itself, as a batch system may stop a whole job, does not count that time.
        elapsed = min(elapsed, 2 * _LOOK_SECONDS)
        stopped = [worker for worker, pid in pids.items() if self._is_stopped(pid)]
        self._seconds = {worker: self._seconds.get(worker, -elapsed) + elapsed for worker in stopped}
        return [worker for worker, seconds in self._seconds.items() if seconds >= SECONDS]


def _is_stopped(pid: int) -> bool:
    try:
        # After the name, in brackets, which may hold anything.
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
