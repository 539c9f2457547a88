"""The `fit` that a worker runs in a job that goes on without lost workers, and its counts since the last round."""

import dataclasses
import time
import weakref
from typing import Any

import keras

from tfdist._compat import keras_stack


@dataclasses.dataclass
class FitInRounds:
    """The running `fit`: the work of this worker since the last synchronization, and the batches that it passes over.

    Attributes:
      number: Number of earlier `fit`s of the program.
      model: The model, weakly.
      until: The epoch and batch before which to pass over batches, since the others had trained on them; or `None`.
      reads: Whether these must be read.
      is_warm: Whether this worker has run a step, which traces it, or is to join before.
      target: Executions to train in a round.
      steps: Steps since the last synchronization, trained or skipped.
      trained: Those that were trained.
      rows: Rows trained on since then, and `epoch_rows` in this epoch.
      skipped: Rows of batches skipped since then.
      behind: Skipped steps that the schedule of the learning rate has not counted yet.
      began: When the round began, and `away` the seconds in which batches were skipped.
      skipping_since: When the last step was skipped, until the next step begins.
      is_over: Whether worker 0 has ended the `fit`.
      has_begun: Whether this worker has trained in it.
      epoch_logs: The averaged logs of its epochs: on worker 0, and on others of the epochs before they joined.
    """

    number: int
    model: weakref.ref[keras.Model]
    target: int
    until: tuple[int, int] | None = None
    reads: bool = False
    is_warm: bool = True
    steps: int = 0
    trained: int = 0
    rows: int = 0
    epoch_rows: int = 0
    skipped: int = 0
    behind: int = 0
    began: float = 0.0
    away: float = 0.0
    skipping_since: float | None = None
    is_over: bool = False
    has_begun: bool = False
    logs: Any = dataclasses.field(default_factory=dict)
    epoch_logs: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> list[int]:
        """The place in training at which this worker is: the number of the `fit`, the epoch and the batch."""
        return [self.number, *keras_stack.place_in_fit()]

    def end_skipping(self) -> None:
        """Counts the time since the last step as `away` if that step was skipped, with the callbacks after it."""
        if self.skipping_since is not None:
            self.away += time.monotonic() - self.skipping_since
            self.skipping_since = None
