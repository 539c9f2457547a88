"""The output of `tfdist run` in plain lines, and the choice between it, a live table and `--quiet`."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from absl import logging

from tfdist.launch.attempt_watch import AttemptWatch
from tfdist.launch.live_figures import progress_line
from tfdist.launch.output_target import OutputTarget

_LOOK_SECONDS = 5.0
_SILENCE_SECONDS = 60.0
_WITHOUT_CURSOR = ("", "dumb", "unknown")
_FALSE = ("", "0", "false")


class RunTerminal:
    """Shows the output of workers, and a line about their progress if they have printed nothing for a minute.

    Args:
      tells_progress: Whether to show this line. One supervisor of a job does.
    """

    def __init__(self, *, tells_progress: bool = True):
        self._tells_progress = tells_progress
        self._targets: list[OutputTarget] = []
        self._told_at = 0.0

    def target(self, descriptor: int | None) -> OutputTarget:
        """Returns what shows output for a descriptor of this process; None shows nothing."""
        target = OutputTarget(descriptor)
        self._targets.append(target)
        return target

    @contextlib.contextmanager
    def watching(self, watch: AttemptWatch) -> Iterator[None]:
        """Shows the progress of an attempt during the block. Uses a thread, so start workers before."""
        if not self._tells_progress:
            yield
            return
        self._told_at = time.monotonic()
        with repeating(_LOOK_SECONDS, lambda: self._look(watch)):
            yield
        self._targets.clear()

    def _look(self, watch: AttemptWatch) -> None:
        rows, now = watch.rows(), time.monotonic()
        if now - max([self._told_at, *(target.wrote_at for target in self._targets)]) >= _SILENCE_SECONDS:
            self._told_at = now
            if line := progress_line(rows):
                logging.info("%s", line)


def can_draw_table(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Returns whether a live table can be drawn, by the environment and whether standard output is a terminal."""
    is_ci = environ.get("CI", "").lower() not in _FALSE
    return is_terminal and not is_ci and environ.get("TERM", "") not in _WITHOUT_CURSOR


@contextlib.contextmanager
def repeating(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` every few seconds in a thread, until the end of the block. An error only ends the calls."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, name="tfdist-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
