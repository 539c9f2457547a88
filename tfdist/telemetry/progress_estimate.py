"""Estimates how much of a `fit` is done, and how long the rest takes. Does not load TensorFlow."""

import time


class ProgressEstimate:
    """The progress of one `fit`. One thread updates it, another reads.

    Args:
      epochs: Number of the last epoch of the `fit`, counted from 1; `None` if it is not known.
      steps: Steps of an epoch; `None` if they are not known.
    """

    def __init__(self, epochs: int | None, steps: int | None) -> None:
        self._epochs, self._steps = epochs, steps
        self._position = 0, 0  # Finished epochs, and finished steps of the next one.
        self._first: tuple[float, float] | None = None  # Progress after the first step of this process, and its time.

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins, counted from 0."""
        self._position = epoch, 0

    def end_batch(self, batch: int) -> None:
        """Notes that a step of the epoch has ended, counted from 0."""
        self._position = self._position[0], batch + 1
        if self._first is None and (done := self.done) is not None:
            self._first = done, time.monotonic()

    def end_epoch(self, epoch: int) -> None:
        """Notes that an epoch has ended, counted from 0. The next epochs probably have as many steps."""
        if self._position[1]:
            self._steps = max(self._steps or 0, self._position[1])  # A restored epoch may have had fewer.
        self._position = epoch + 1, 0

    @property
    def done(self) -> float | None:
        """The part of the steps of all epochs that is done; `None` while the steps of an epoch are not known."""
        epoch, step = self._position
        if not self._epochs or (step and self._steps is None):
            return None
        return min((epoch + (step / self._steps if self._steps else 0.0)) / self._epochs, 1.0)

    @property
    def remaining_seconds(self) -> float | None:
        """The time of the rest at the mean speed of this process, with validations and saves; `None` if not known."""
        done, first = self.done, self._first
        if done is None or first is None or done <= first[0]:
            return None
        return (time.monotonic() - first[1]) * (1 - done) / (done - first[0])
