"""Reads what the workers of a running attempt do: the files with their times, and their memory from /proc."""

import contextlib
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

from tfdist.events.straggler_file import StragglerRecord, read_records
from tfdist.events.time_record import TimeRecord, read_time_record
from tfdist.launch.live_figures import DONE, SeenWorker, WorkerRow, row_of, slow_workers
from tfdist.launch.recent_steps import RecentSteps
from tfdist.launch.worker_group import WorkerGroup, signal_name
from tfdist.readable_numbers import counted, duration, short_duration
from tfdist.run_files import RunFiles

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class AttemptWatch:
    """The workers of one attempt on this machine.

    Costs two small reads of files for each worker and call.

    Args:
      files: Files of the run.
      number: Number of the attempt.
      group: Processes of the workers.
      run_start: Start of the run, in seconds since the epoch.
    """

    def __init__(self, files: RunFiles, number: int, group: WorkerGroup, run_start: float):
        self._files, self._number, self._group, self._run_start = files, number, group, run_start
        self._workers = sorted(group.pids)
        self._recent = {worker: RecentSteps() for worker in self._workers}
        self._stragglers: Sequence[StragglerRecord] = ()
        self._stragglers_size = 0  # The file grows with each verdict.

    def rows(self) -> list[WorkerRow]:
        """Returns the present rows of all workers."""
        now = time.time()
        pids = self._group.pids
        ended = {each.index: _end_of(each.returncode) for each in self._group.exits}
        slow = slow_workers(self._read_stragglers())
        return [row_of(self._see(worker, pids, ended, slow), now) for worker in self._workers]

    def title(self) -> str:
        """Returns a line about the run: "attempt 1: 2 workers, 3 min 5 s, newest backup step-1200"."""
        again = f"attempt {self._number}: " if self._number else ""
        committed = self._files.committed
        backup = f", newest backup step-{committed[0]}" if committed else ""
        workers = counted(len(self._workers), "worker")
        seconds = time.time() - self._run_start
        return f"{again}{workers}, {short_duration(seconds) if seconds < 99 else duration(seconds)}{backup}"

    def _see(
        self, worker: int, pids: Mapping[int, int], ended: Mapping[int, str], slow: Mapping[int, str]
    ) -> SeenWorker:
        record = self._record(worker)
        recent = self._recent[worker]
        if record:
            recent.add(record)
        memory = _memory_of(pids[worker]) if worker in pids else None
        end = ended.get(worker)
        if end is None and worker not in pids:  # It ended a moment ago.
            end = "ended"
        return SeenWorker(worker, record, recent.recent, memory, end, slow.get(worker))

    def _read_stragglers(self) -> Sequence[StragglerRecord]:
        path = self._files.stragglers(self._number)
        with contextlib.suppress(OSError):  # Without a verdict there is no file.
            if (size := path.stat().st_size) != self._stragglers_size:
                self._stragglers_size = size
                self._stragglers, _ = read_records(path)
        return self._stragglers

    def _record(self, worker: int) -> TimeRecord | None:
        try:
            return read_time_record(self._files.times(self._number, worker))
        except (OSError, ValueError):  # The script may not use tfdist, or is about to.
            return None


def _end_of(returncode: int) -> str:
    if returncode == 0:
        return DONE
    return f"exit code {returncode}" if returncode > 0 else signal_name(-returncode)


def _memory_of(pid: int) -> int | None:
    """Returns the resident memory of a process in bytes; `None` if it has ended."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None
