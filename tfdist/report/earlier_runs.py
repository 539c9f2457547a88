"""Policy: which folders among the logs are of an earlier run than the newest one. No files, no clock."""

import dataclasses
import pathlib
from collections.abc import Mapping

_START_SECONDS = 300.0  # The hosts of a job may start so long after each other, and their clocks may differ a little.


@dataclasses.dataclass(frozen=True)
class FolderSpan:
    """The facts about a run in the folder of a supervisor. A value is `None` if it is unknown.

    Attributes:
      worker: The worker that the supervisor has started; `None` if it has started all.
      begin: Begin of the run, in seconds since the epoch.
      end: End of the run, in seconds since the epoch; `None` also if it goes on.
      workers: Number of workers of the job.
    """

    worker: int | None
    begin: float | None
    end: float | None
    workers: int | None


def earlier_runs(folders: Mapping[pathlib.Path, FolderSpan]) -> list[pathlib.Path]:
    """Returns the folders that are certainly of an earlier run than the newest one.

    A supervisor sets aside the files of its own folder only, so those of workers that the newest run lacks stay. Every
    job needs worker 0, while other workers may join later or start again. So the newest run is the one of worker 0.
    """
    leading = [(each.begin, each) for each in folders.values() if not each.worker and each.begin is not None]
    if not leading:
        return []
    begin, newest = max(leading, key=lambda pair: pair[0])
    return [path for path, each in folders.items() if _is_earlier(each, newest, begin)]


def _is_earlier(folder: FolderSpan, newest: FolderSpan, begin: float) -> bool:
    if folder.begin is None or folder.begin >= begin:
        return False
    if folder.worker is None or newest.worker is None:  # A run has one supervisor for all workers, or one for each.
        return True
    if newest.workers is not None and folder.worker >= newest.workers:
        return True
    return folder.end is not None and folder.end + _START_SECONDS < begin
