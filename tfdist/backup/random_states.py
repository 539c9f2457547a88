"""Saves the global random states of Python and NumPy, from which a program and Keras may draw, and restores them."""

import random
from typing import Any

import numpy as np

from tfdist.backup.serialization import apart, decode, encode, with_arrays
from tfdist.backup.state_provider import CapturedState, SavedState, StateProvider, TrainedFit

NAMES = frozenset({"python", "numpy"})


class RandomStates(StateProvider):
    """Saves and restores the global random states of Python and NumPy, as of now and as the input began.

    After a restart, an input is read again from the states with which it began, so that Keras draws the same numbers.
    """

    name = "random"

    def __init__(self, fit: TrainedFit):
        super().__init__(fit)
        self._of_input: Any = None
        self._replaced: Any = None  # the states before an input was read again
        self._as_begun: Any = None  # the states when such an input had begun
        self._reads_again = False

    def capture(self) -> CapturedState:
        """Returns the random states for a commit: those of now, and those with which the present input began."""
        return CapturedState(own_plain={"now": capture(), "of_input": self._of_input})

    def restore(self, saved: SavedState) -> None:
        """Restores the random states of a commit, unless the number of workers or replicas has changed."""
        names = self._undrawn() if saved.is_reread else NAMES
        if saved.is_alike:
            restore(saved.own.plain["now"], names)

    def begin_input(self) -> None:
        """Notes the random states before Keras makes an iterator and shuffles, so that a restart repeats that."""
        self._of_input = capture()

    def begin_input_again(self, saved: SavedState) -> None:
        """Restores the random states with which the input of a commit began, to read it again."""
        before = saved.own.plain["of_input"] if saved.is_alike else None
        self._reads_again = before is not None
        if before is not None:
            self._replaced, self._of_input = capture(), before
            restore(before)

    def note_begun(self) -> None:
        """Notes the random states when an input that is read again has begun, to see if its reading draws."""
        if self._reads_again and self._as_begun is None:
            self._as_begun = capture()

    def end_reading_again(self) -> None:
        """Restores the random states that `begin_input_again` replaced, after the input was read again."""
        if self._replaced is not None:
            restore(self._replaced, self._undrawn())

    def _undrawn(self) -> frozenset[str]:
        """Returns the names of the global random states from which the repeated reading of the input has not drawn.

        The other states must not be restored: reading has moved them to where the next batches need them, and a thread
        may be drawing more. Their saved values include the draws of the batches that the thread had then read ahead.
        """
        if not self._reads_again:
            return NAMES
        self._reads_again = False
        return unmoved(self._as_begun or self._of_input, self._fit.input.batches_of_pass)


def capture() -> Any:
    """Returns the global random states of Python and NumPy as JSON."""
    arrays: list[np.ndarray] = []
    return with_arrays(encode([random.getstate(), np.random.get_state()], arrays), arrays)


def restore(captured: Any, names: frozenset[str] = NAMES) -> None:
    """Sets the global random states of Python and NumPy to captured ones, or only those named."""
    of_python, of_numpy = decode(*apart(captured))
    if "python" in names:
        random.setstate(of_python)
    if "numpy" in names:
        np.random.set_state(of_numpy)


def unmoved(begun: Any, batches: int | None) -> frozenset[str]:
    """Returns the names of random states that are unused since `begun`, but for Keras' first `PyDataset` shuffle.

    Args:
      begun: States captured when an input had begun. The thread of an enqueuer may or may not have shuffled by then.
      batches: Number of batches of the input, if known.
    """
    of_python, of_numpy = decode(*apart(begun))
    shuffled = random.Random()
    shuffled.setstate(of_python)
    shuffled.shuffle(list(range(batches or 0)))
    still = {
        "python": random.getstate() in (of_python, shuffled.getstate()),
        "numpy": all(map(np.array_equal, np.random.get_state(), of_numpy)),
    }
    return frozenset(name for name, is_still in still.items() if is_still)
