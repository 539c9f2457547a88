"""Notes for the watchdog of what a worker does beside steps: saves, waits for all workers, creations of variables."""

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.events import recorder
from tfdist.events.phase_names import MEETING
from tfdist.faults.coordination_store import reported
from tfdist.faults.stall_suspect import UNLIKE_CALLS

section_seconds: "collections.defaultdict[str, float]" = collections.defaultdict(float)
"""Seconds that this process has spent in each section."""

sections: list[str] = []
"""The sections in which this worker is, the innermost last."""

waits: list["WaitForAll"] = []
"""The exchanges outside of steps in which this worker waits, the innermost last."""

_moves = 0


def _state() -> dict[str, Any]:
    """Returns the section or the exchange before a call in which this worker is, for the file with its events."""
    if waits:
        return {"section": MEETING, "meeting": waits[-1].what}
    return {"section": sections[-1] if sections else None}


recorder.add_state(_state)


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Tells the watchdog what this worker does in the block, outside of training, such as a save."""
    began = time.monotonic()
    sections.append(name)
    try:
        yield
    finally:
        sections.remove(name)
        section_seconds[name] += time.monotonic() - began


def moved() -> None:
    """Reports progress of this worker to the watchdog that no training step shows, such as a skipped batch."""
    global _moves
    _moves += 1


def moves() -> int:
    """Returns how often this worker has `moved`."""
    return _moves


class WaitForAll:
    """A wait for all workers outside of steps: its name, its start time and its fault (`None` until one is known)."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.since = time.monotonic()
        self.fault: str | None = None


@contextlib.contextmanager
def waiting_for_all(what: str) -> Iterator[WaitForAll]:
    """Tells the watchdog that all workers must join the block's exchange, named `what`, so that no wait lasts forever.

    Yields:
      The exchange with its `fault`. A fault makes collectives fail; a block that waits in another way must check it.

    Raises:
      ClusterError: If the exchange fails because a peer's program has ended, is in another call, or does not come.
    """
    wait = WaitForAll(what)
    waits.append(wait)
    try:
        yield wait
    except tf.errors.OpError as error:
        fault = wait.fault or reported(error, UNLIKE_CALLS)
        if fault:
            raise ClusterError(fault) from error
        raise
    finally:
        waits.remove(wait)


class Creations:
    """Counts the variables that a worker creates. At each, all workers wait, so the watchdog finds different models."""

    def __init__(self) -> None:
        self.count = 0
        self.since: float | None = None

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Tells the watchdog that the block creates one variable, for which all workers must come."""
        self.since = time.monotonic()
        try:
            with waiting_for_all("the creation of variables in the scope"):
                yield
            self.count += 1
        finally:
            self.since = None
