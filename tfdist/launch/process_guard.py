"""Kills the child processes of workers if the supervisor is killed before it can do so itself."""

import contextlib
import subprocess
from collections.abc import Iterable

from tfdist.errors import ClusterError

# Remembers the last line of its input. At the end of input, kills the process groups in that line. Uses a shell, which
# starts in a millisecond and needs a megabyte.
_SCRIPT = """
trap '' HUP INT TERM USR1 USR2
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""


class ProcessGuard:
    """A process that outlives this process by a moment, to kill the child processes of workers if this one is killed.

    The kernel kills a worker with its parent, but not the worker's children. The guard finds them by process group.

    Raises:
      ClusterError: If the guard cannot be started.
    """

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Signals to this process's group must not reach the guard.
                cwd="/",
            )
        except OSError as error:
            raise ClusterError(
                f"The process that guards the workers could not be started as /bin/sh: {error}. "
                f"Raise the limits of this machine (`ulimit -a`)."
            ) from error

    def watch(self, groups: Iterable[int]) -> None:
        """Sets the process groups that must end with this process, and replaces earlier ones."""
        if self._process.stdin:
            with contextlib.suppress(OSError):  # The guard was killed. The workers continue without it.
                self._process.stdin.write(" ".join(map(str, groups)).encode() + b"\n")

    def close(self) -> None:
        """Ends the guard without killing any process group."""
        self.watch(())
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
