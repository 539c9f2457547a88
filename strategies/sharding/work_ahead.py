"""Policy: how far the work of a step may run ahead, so that few whole tensors are in memory at once."""

from typing import Generic, TypeVar

AHEAD_BYTES = 16 << 20  # Work on tensors of this size may run ahead; at least one piece of work.

_Work = TypeVar("_Work")


class WorkAhead(Generic[_Work]):
    """Pieces of work, such as gathers of weights, of which the last ones may run while the next one is done.

    The last ones are those of up to 16 MiB together, and at least one. The next piece waits for all before them.
    """

    def __init__(self) -> None:
        self._running: list[tuple[_Work, int]] = []

    @property
    def last(self) -> _Work:
        """The piece of work that was added last."""
        return self._running[-1][0]

    def add(self, work: _Work, size: int) -> None:
        """Adds a piece of work on a tensor of `size` bytes."""
        self._running.append((work, size))

    def to_await(self) -> list[_Work]:
        """Returns the work for which the next piece must wait, and which no piece before has waited for."""
        ahead, kept = 0, 0
        for _, size in reversed(self._running):
            ahead += size
            if kept and ahead > AHEAD_BYTES:
                break
            kept += 1
        first = len(self._running) - kept
        done, self._running = self._running[:first], self._running[first:]
        return [work for work, _ in done]
