"""The global batch size of the steps to train on next, which may change while training goes on."""

from collections.abc import Mapping
from typing import Any


class BatchSizeSchedule:
    """The global batch size of the next steps: the present one, and those that follow it.

    Not thread-safe: callers must hold a lock.

    Args:
      size: The size to begin with.
    """

    def __init__(self, size: int):
        # Each size with the number of steps before it, counted from the step to train on next.
        self._sizes = [(0, size)]

    @property
    def present(self) -> int:
        """The size of the step to train on next."""
        return self.ahead(0)

    @property
    def latest(self) -> int:
        """The size after all changes that are decided."""
        return self._sizes[-1][1]

    def ahead(self, steps: int) -> int:
        """Returns the size of the step that follows `steps` steps after the next one."""
        return next(size for before, size in reversed(self._sizes) if before <= steps)

    def change(self, size: int, steps: int) -> None:
        """Changes the size, from the step on that follows `steps` steps after the next one."""
        self._sizes = [each for each in self._sizes if each[0] < steps] + [(steps, size)]

    def has_trained(self) -> None:
        """Notes that one more step was trained on."""
        present = self.ahead(1)
        self._sizes = [(0, present)] + [(before - 1, size) for before, size in self._sizes if before > 1]

    def state(self) -> dict[str, Any]:
        """Returns the sizes for `restore`."""
        return {"sizes": [list(each) for each in self._sizes]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the sizes that `state` has returned; keeps the present ones if there are none."""
        if state.get("sizes"):
            self._sizes = [(int(steps), int(size)) for steps, size in state["sizes"]]
