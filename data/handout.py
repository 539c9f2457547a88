"""One pass over the global batches on one worker: which rows its replicas get, and what has been trained on."""

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from tfdist import _tf
from tfdist.data.plan import Plan, split
from tfdist.errors import PositionError

# Without a report while `fit` trains or waits for input, after reports of other rows for all that was handed out. More
# than a step should take.
_SILENT_SECONDS = 600.0
_LOOKS = 10  # In that time, at what `fit` does.
_STEPS_BETWEEN_CHANGES = 4  # Measurements under new shares, beside the steps that pass before they are in force.


class Handout:
    """Hands out the rows of this worker's replicas, step by step, from a position on.

    Shares may change while the pipeline reads ahead. So that all workers change at the same step, the shares of step k
    follow from the reports of steps up to k - lead, and nobody hands out step k before they are in.

    Args:
      plan: The global batches.
      epoch: Where to start.
      step: Where to start in that epoch.
      shares: Rows of a whole batch, by replica.
      at_most: The most rows of a replica.
      repeat: Whether another epoch follows.
      lead: How many steps reading may be ahead of training; None if shares never change.

    Attributes:
      finished: Whether all was handed out.
      closed: Whether it was ended by `close`.
      epoch: The epoch that is being handed out.
      handed_out: For whoever asks what was trained on; unused here.
      given: Steps that were taken from the iterator, so far as `is_seen`.
      is_seen: Whether `given` is all that was taken.
      epoch_read: The epoch before which all was read, by a pipeline that reads ahead.
      latest_shares: Rows of a whole batch by replica, of the last step that is decided.
    """

    def __init__(
        self,
        plan: Plan,
        epoch: int,
        step: int,
        shares: tuple[int, ...],
        at_most: Sequence[int],
        *,
        repeat: bool,
        lead: int | None = None,
    ):
        self._plan, self._at_most, self._repeat, self._lead = plan, at_most, repeat, lead
        self.epoch, self._first_epoch, self._first_step = epoch, epoch, step
        self.finished = False
        self.given, self.is_seen, self.epoch_read = 0, False, epoch
        self.handed_out: collections.deque[np.ndarray] = collections.deque()
        self._trained_epoch, self._trained_step, self._trained = epoch, step, 0
        self.latest_shares = shares
        self._decided = dict.fromkeys(range(lead or 0), shares)  # By step since the start; those not yet trained on.
        self._last_change = -_STEPS_BETWEEN_CHANGES
        self.closed = False
        self._number = 0  # Of the step that is handed out next.
        self._unlike = 0  # Reports of other rows since the last step of ours.
        self._unlike_rows: tuple[int, ...] = ()  # Of the last one.
        self._news = threading.Condition()

    def indices(self, replicas: Sequence[int], places: Sequence[int]) -> Iterator[np.ndarray]:
        """The examples of this worker's replicas, step by step, int64 [rows] each.

        Args:
          replicas: Their numbers.
          places: By replica of all, which part of a global batch it gets, counted from its beginning.
        """
        first, by_place = self._first_step, np.argsort(places)
        while True:
            for step in range(first, self._plan.steps_per_epoch):
                rows = self._rows(step)
                if rows is None:
                    return
                batch = self._plan.batch(self.epoch, step)
                ends = np.cumsum(np.asarray(rows)[by_place])
                for replica in replicas:
                    end = int(ends[places[replica]])
                    yield batch[end - rows[replica] : end]
            if not self._repeat:
                break
            self.epoch, first = self.epoch + 1, 0
        self.finished = True

    def is_decided(self) -> bool:
        """Whether `indices` has more to give without waiting for reports."""
        with self._news:
            return self._lead is None or self._number in self._decided

    def close(self) -> None:
        """Ends it; whoever waits to hand out more is let go."""
        with self._news:
            self.closed = True
            self._news.notify_all()

    def _rows(self, step: int) -> tuple[int, ...] | None:
        """Rows by replica of the next step; waits until it is decided. None if closed meanwhile."""
        with self._news:
            number = self._number
            if self._lead is not None:
                self._wait_for(number)
                if number < self._trained and not self.closed:
                    raise PositionError(
                        f"Of this BalancedSharding {self._trained} steps count as trained on, and only {number} were "
                        "handed out: its model is also trained otherwise amid the `fit`, as by train_on_batch in a "
                        "callback, on as many rows. Do that at the end of an epoch, or on other numbers of rows."
                    )
            self._number += 1
            return None if self.closed else self._split(number, step)

    def _wait_for(self, number: int) -> None:
        silent = 0
        while not (self.closed or number in self._decided or number < self._trained):
            heard = self._news.wait(_SILENT_SECONDS / _LOOKS)
            is_suspect = not heard and self._unlike >= number - self._trained and not _is_in_callback_or_validation()
            silent = silent + 1 if is_suspect else 0
            if silent >= _LOOKS:
                raise PositionError(
                    f"A BalancedSharding hands out by what was trained on, and waits: it handed out {number} steps, of "
                    f"which {self._trained} were reported, then {self._unlike} of other rows, the last of "
                    f"{self._unlike_rows} by replica, and nothing for {_SILENT_SECONDS:g} s. Train on the rows as they "
                    "are handed out."
                )

    def _split(self, number: int, step: int) -> tuple[int, ...]:
        shares, rows = self._decided.get(number, self.latest_shares), self._plan.rows(step)
        return shares if rows == sum(shares) else split(rows, shares, self._at_most)

    # What training says, from another thread.

    def has_trained(self, rows: np.ndarray) -> bool:
        """Takes note that one more step was trained on; False if these were not the rows of the next step.

        Rows of anything else that are as many are taken for it, once something was handed out. How much was does not
        matter here: each worker has read ahead by another number of steps, and all are to say the same. If more steps
        are said to be trained on than were handed out, who hands out raises.
        """
        with self._news:
            if self.closed or not self._number or self._trained_step >= self._plan.steps_per_epoch:
                return False
            if tuple(rows.tolist()) != self._split(self._trained, self._trained_step):
                self._unlike, self._unlike_rows = self._unlike + 1, tuple(rows.tolist())
                self._news.notify_all()
                return False
            self._unlike = 0
            self._decided.pop(self._trained, None)
            self._trained += 1
            self._trained_step += 1
            if self._trained_step == self._plan.steps_per_epoch and self._repeat:
                self._trained_epoch, self._trained_step = self._trained_epoch + 1, 0
            return True

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and step that is trained on next."""
        if self._trained_step == self._plan.steps_per_epoch:
            return self._trained_epoch + 1, 0
        return self._trained_epoch, self._trained_step

    @property
    def epoch_taken(self) -> int:
        """The epoch before which all was taken from the iterator; or was read, where nobody sees what is taken."""
        if not self.is_seen:
            return self.epoch_read
        return self._first_epoch + (self._first_step + self.given) // self._plan.steps_per_epoch

    @property
    def adapts(self) -> bool:
        """Whether shares may ever change, and each step is decided on."""
        return self._lead is not None

    def may_change(self) -> bool:
        """Whether shares change at all, and the last change has been in force long enough to be measured."""
        return self.adapts and self._trained >= self._last_change + _STEPS_BETWEEN_CHANGES

    def decide(self, shares: tuple[int, ...]) -> None:
        """Decides on one more step; call it once after each step that was trained on."""
        if self._lead is None:
            return
        with self._news:
            number = self._trained + self._lead - 1
            if shares != self.latest_shares:
                self._last_change, self.latest_shares = number, shares
            self._decided[number] = shares
            self._news.notify_all()


def _is_in_callback_or_validation() -> bool:
    """Whether `fit` does what takes no batches of training: a callback that trains on its own rows may be followed."""
    with contextlib.suppress(OSError):
        return _tf.keras_fit_activity() in ("callback", "validation")
    return True  # It cannot be told.
