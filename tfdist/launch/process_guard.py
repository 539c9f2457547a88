"""Ends what workers started, should this process be killed before it can."""

import contextlib
import subprocess
from collections.abc import Iterable

from tfdist.errors import ClusterError

__all__ = ["ProcessGuard"]

# Remembers the last line; when there will be no more, kills the process groups in it. A shell, since it starts in a
# millisecond and takes a megabyte.
_SCRIPT = """
trap '' HUP INT TERM USR1 USR2
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""


class ProcessGuard:
    """A process that outlives this one by a moment.

    The kernel kills a worker with its parent, but not the worker's own children: they are found by their process group.

    Raises:
      ClusterError: If it cannot be started.
    """

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal to this process's group is not for it
                cwd="/",
            )
        except OSError as error:
            raise ClusterError(
                f"The process that guards the workers could not be started as /bin/sh: {error}. "
                f"Raise the limits of this machine (`ulimit -a`)."
            ) from error

    def watch(self, groups: Iterable[int]) -> None:
        """Says which process groups are to end with this process, instead of those said before."""
        if self._process.stdin:
            with contextlib.suppress(OSError):  # someone killed the guard; that is no reason to end the workers
                self._process.stdin.write(" ".join(map(str, groups)).encode() + b"\n")

    def close(self) -> None:
        """Ends the guard without harm to anyone."""
        self.watch(())
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
