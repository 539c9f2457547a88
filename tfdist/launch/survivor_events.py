"""Asks the workers that still run after a failure to write their events, before the supervisor ends them."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

from tfdist.events.event_file import ASKED, START, read_header
from tfdist.launch.worker_group import WorkerGroup
from tfdist.run_files import RunFiles

_SECONDS, _POLL_SECONDS = 1.5, 0.02


def ask_for_events(files: RunFiles, attempt: int, group: WorkerGroup, hurry: Callable[[], bool]) -> None:
    """Sends SIGUSR2 to the running workers that listen to it, and waits a moment for the files with their events.

    Only a worker that has written that it listens gets the signal, since it would end any other process. A worker that
    has noticed the failure has written its events already.
    """
    asked = {}
    for worker, pid in group.pids.items():
        header = read_header(files.events(attempt, worker))
        if header.get("pid") == pid and header.get("hears") and header.get("why") in (START, ASKED):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                asked[worker] = header
    deadline = time.monotonic() + _SECONDS
    while asked and time.monotonic() < deadline and not hurry():
        time.sleep(_POLL_SECONDS)
        group.poll()
        asked = {
            worker: header
            for worker, header in asked.items()
            if worker in group.running and read_header(files.events(attempt, worker)) == header
        }
