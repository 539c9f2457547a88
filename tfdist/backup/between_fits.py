"""The options of `BackupAndRestore`, and what a process keeps of a backup directory from one `fit` to the next."""

import dataclasses
import os
from typing import Any

from absl import logging

from tfdist.backup.commit_store import CommitStore
from tfdist.backup.commit_writer import CommitWriter
from tfdist.backup.preemption_request import PreemptionRequest
from tfdist.backup.storage import is_remote


@dataclasses.dataclass(frozen=True)
class BackupOptions:
    """The checked arguments of `BackupAndRestore`, which explains them."""

    directory: str
    save_freq: Any
    keep: int
    delete_checkpoint: bool
    save_before_preemption: bool
    timeout_seconds: float


@dataclasses.dataclass
class BackupSession:
    """The facts about a backup directory that this process keeps from one `fit` to the next, such as step counts."""

    finished: int = 0
    sites: list[str] = dataclasses.field(default_factory=list)  # call sites of all `fit`s, with the running one
    steps: int = 0
    number: int = -1
    histories: list[Any] = dataclasses.field(default_factory=list)  # see `TrainedFit`
    writer: CommitWriter | None = None
    store: CommitStore | None = None
    request: PreemptionRequest | None = None
    starts: list[Any] = dataclasses.field(default_factory=list)  # see `TrainedFit`

    def begin_fit(self, sites: list[str], newest: int) -> None:
        """Counts finished `fit`s and steps when a `fit` begins.

        Args:
          sites: Call sites of all `fit`s of the program so far.
          newest: Number of the newest commit; -1 without one.
        """
        self.sites, self.finished = sites, len(sites) - 1
        if newest > self.number:  # A skipped `fit`'s commit must not stay newest.
            self.steps = self.number = newest
        self.histories += [{} for _ in range(self.finished - len(self.histories))]

    def end_former(self) -> None:
        """Ends an interrupted `fit`: waits for its last save and stops listening for requests to leave."""
        if self.writer is not None:
            try:
                self.writer.wait()
            except Exception as error:
                logging.warning("The last backup of an earlier fit failed: %s", error)
        if self.request is not None:
            self.request.end()


processes: dict[str, BackupSession] = {}  # by directory


def of_directory(directory: str) -> BackupSession:
    """Returns what this process keeps of a backup directory; makes it at the first `fit`."""
    return processes.setdefault(directory if is_remote(directory) else os.path.realpath(directory), BackupSession())
