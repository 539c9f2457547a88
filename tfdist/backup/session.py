"""What a process remembers of its backups from one `fit` to the next."""

import dataclasses
import os
from typing import Any

from absl import logging

from tfdist.backup.callback_states import Starts
from tfdist.backup.commit_store import CommitStore
from tfdist.backup.commit_writer import CommitWriter
from tfdist.backup.preemption_request import PreemptionRequest
from tfdist.backup.storage import is_remote


@dataclasses.dataclass
class BackupSession:
    """What this process remembers of a directory from one `fit` to the next."""

    finished: int = 0
    sites: list[str] = dataclasses.field(default_factory=list)  # of the `fit`s so far, with the one that runs
    steps: int = 0
    number: int = -1
    histories: list[Any] = dataclasses.field(default_factory=list)
    saver: CommitWriter | None = None
    store: CommitStore | None = None
    asked: PreemptionRequest | None = None
    starts: Starts = dataclasses.field(default_factory=list)  # of the callbacks of the `fit` before

    def end_former(self) -> None:
        """Waits for the last save of a `fit` that was broken off, which is asked no more."""
        if self.saver is not None:
            try:
                self.saver.wait()
            except Exception as error:
                logging.warning("The last backup of a former fit failed: %s", error)
        if self.asked is not None:
            self.asked.end()


processes: dict[str, BackupSession] = {}  # by directory


def of_directory(directory: str) -> BackupSession:
    """What this process remembers of a directory."""
    return processes.setdefault(directory if is_remote(directory) else os.path.realpath(directory), BackupSession())
