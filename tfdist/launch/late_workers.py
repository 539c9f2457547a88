"""Policy: when to warn of workers that still run after others have ended. No processes, no clock."""

from collections.abc import Sequence

from tfdist.launch.run_summary import named
from tfdist.launch.worker_group import WorkerExit

_ALONE_SECONDS, _ALONE_AGAIN_SECONDS = 10.0, 60.0


class LateWorkers:
    """Reports workers that still run after other workers ended: after 10 s, and then every minute."""

    def __init__(self) -> None:
        self._due: float | None = None

    def tell(self, exits: Sequence[WorkerExit], running: Sequence[int], now: float) -> str | None:
        """Returns the warning about still running workers that is due at `now`, in seconds since the epoch, or None."""
        if not exits or not running or now < (self._due or exits[-1].time + _ALONE_SECONDS):
            return None
        self._due = now + _ALONE_AGAIN_SECONDS
        ended = named([each.index for each in exits])
        return f"{ended} ended with exit code {exits[-1].returncode}; still running: {named(running)}"
