"""The state of backups that a process keeps from one `fit` to the next."""

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
    """The state of a backup directory that this process keeps from one `fit` to the next."""

    finished: int = 0
    sites: list[str] = dataclasses.field(default_factory=list)  # call sites of all `fit`s, with the running one
    steps: int = 0
    number: int = -1
    histories: list[Any] = dataclasses.field(default_factory=list)
    saver: CommitWriter | None = None
    store: CommitStore | None = None
    asked: PreemptionRequest | None = None
    starts: Starts = dataclasses.field(default_factory=list)  # of the previous `fit`'s callbacks

    def end_former(self) -> None:
        """Waits for the last save of an interrupted `fit`, and ends its listening for requests."""
        if self.saver is not None:
            try:
                self.saver.wait()
            except Exception as error:
                logging.warning("The last backup of a former fit failed: %s", error)
        if self.asked is not None:
            self.asked.end()


processes: dict[str, BackupSession] = {}  # by directory


def of_directory(directory: str) -> BackupSession:
    """Returns the session of a directory in this process."""
    return processes.setdefault(directory if is_remote(directory) else os.path.realpath(directory), BackupSession())
