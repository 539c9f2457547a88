"""The rows of each global batch that this worker's replicas get, step by step, and the count of steps trained on."""

import collections
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tfdist.data.batch_plan import BatchPlan, split
from tfdist.data.topology import ReplicaTopology
from tfdist.errors import PositionError
from tfdist.faults import activity
from tfdist.readable_numbers import counted

# Longest time without a report while `fit` trains or waits for input, once all assigned steps were reported with other
# rows. Longer than any step should take.
_SILENT_SECONDS = 600.0
_LOOKS = 10  # How often to check, in that time, what `fit` does.
_STEPS_BETWEEN_CHANGES = 4  # Steps measured under new shares, after they are in force, before the next change.


class When(NamedTuple):
    """The epoch of a batch in training, and whether another epoch begins after it."""

    epoch: int
    begins: int  # The epoch that begins after the batch if it is the last of an epoch, else 0.


class BatchAssignment:
    """Gives one iterator the rows of global batches for this worker's replicas, step by step, from a position on.

    Shares may change while the pipeline reads ahead. All workers must change them at the same step. So the shares of
    step k follow from the reports of steps up to k - lead, and no worker assigns step k before it has these reports.
    Their sum is the size of the global batch, so that the size may change too.

    Args:
      plan: Computes the examples of the global batches.
      epoch, step: The epoch of the first step, and its number in that epoch.
      shares: Rows of a whole global batch that each replica gets.
      place: Which of the cluster's replicas are this worker's.
      repeat: Whether another epoch follows.
      lead: Number of steps by which reading may be ahead of training; None if shares never change.
      first: Number of examples of the epoch before the first step; by default as if all steps had the plan's size.
      upcoming: Shares of the steps after the first that are decided, if they differ from `shares`.

    Attributes:
      finished: Whether all steps were assigned.
      closed: Whether `close` has ended the assignment.
      epoch: The epoch of the steps being assigned.
      visitors: Functions that others call after each step of training, with the examples of the step.
      handed_out: Indices of the batches that were read, for visitors.
      is_seen: Whether `note_taken` is called for each step that is taken from the iterator.
      latest_shares: Shares of the last step that is decided.
    """

    def __init__(
        self,
        plan: BatchPlan,
        epoch: int,
        step: int,
        shares: tuple[int, ...],
        place: ReplicaTopology,
        *,
        repeat: bool,
        lead: int | None = None,
        first: int | None = None,
        upcoming: Sequence[tuple[int, ...]] = (),
    ):
        self._plan, self.place, self._repeat, self._lead = plan, place, repeat, lead
        self.epoch, self._first_epoch = epoch, epoch
        self._first = step * plan.global_batch_size if first is None else first
        self._end = plan.examples_per_epoch
        self.finished = False
        self.is_seen, self._taken, self._epoch_read = False, 0, epoch
        self.visitors: Sequence[Callable[..., None]] = ()
        self.handed_out: collections.deque[np.ndarray] = collections.deque()
        self._trained_epoch, self._trained_step, self._trained = epoch, step, 0
        self._trained_examples = self._first
        decided = [shares, *upcoming]
        self.latest_shares = decided[-1]
        # By step since the start, if not yet trained on.
        self._decided = {i: decided[min(i, len(decided) - 1)] for i in range(lead or 0)}
        self._last_change = -_STEPS_BETWEEN_CHANGES
        self.closed = False
        self._number = 0  # The step to assign next, counted from the start.
        self._unlike = 0  # Number of reports of other rows since the last step that matched.
        self._unlike_rows: tuple[int, ...] = ()  # The rows of the last such report.
        self._news = threading.Condition()

    def batches(self) -> Iterator[tuple[When, np.ndarray]]:
        """Yields for each step and each replica of this worker the indices of its examples, int64 [rows]."""
        own, parts = self.place.own, self.place.parts
        first, by_part = self._first, np.argsort(parts)
        while True:
            while first < self._end:
                rows = self._rows(first)
                if rows is None:
                    return
                batch = self._plan.examples(self.epoch, first, sum(rows))
                first += len(batch)
                ends = np.cumsum(np.asarray(rows)[by_part])
                for replica in own:
                    is_last = first == self._end and replica == own[-1]
                    end = int(ends[parts[replica]])
                    yield When(self.epoch, self.epoch + 1 if is_last else 0), batch[end - rows[replica] : end]
            if not self._repeat:
                break
            self.epoch, first = self.epoch + 1, 0
        self.finished = True

    def note_read(self, when: When, batches: Sequence[np.ndarray]) -> None:
        """Notes that the pipeline has read these batches, and thus all epochs before theirs."""
        with self._news:
            self._epoch_read = max(self._epoch_read, when.epoch)
        if self.visitors:
            self.handed_out.extend(batches)

    def note_end(self) -> None:
        """Notes that the pipeline has read all batches that it got, so that the last epoch counts as read."""
        with self._news:
            if self.finished:
                self._epoch_read = max(self._epoch_read, self.epoch + 1)

    def is_decided(self) -> bool:
        """Whether `batches` can yield the next step at once, since the shares of that step are decided."""
        with self._news:
            return self._lead is None or self._number in self._decided

    def close(self) -> None:
        """Ends the assignment of batches and wakes a thread that waits in `batches`."""
        with self._news:
            self.closed = True
            self._news.notify_all()

    def _rows(self, first: int) -> tuple[int, ...] | None:
        """Waits for the shares of the next step, which begins at example `first` of the epoch.

        Returns its rows by replica, or None if closed meanwhile.
        """
        with self._news:
            number = self._number
            if self._lead is not None:
                self._wait_for(number)
                if number < self._trained and not self.closed:
                    raise PositionError(
                        f"This BalancedSharding got reports of {counted(self._trained, 'training step')}, but assigned "
                        f"only {number}. The model was also trained on other data with equally many rows during `fit`, "
                        "for example by train_on_batch in a callback. Do that at the end of an epoch, or with another "
                        "number of rows."
                    )
            self._number += 1
            return None if self.closed else self._split(number, first)

    def _wait_for(self, number: int) -> None:
        silent = 0
        while not (self.closed or number in self._decided or number < self._trained):
            heard = self._news.wait(_SILENT_SECONDS / _LOOKS)
            is_suspect = not heard and self._unlike >= number - self._trained and not activity.is_between_steps()
            silent = silent + 1 if is_suspect else 0
            if silent >= _LOOKS:
                raise PositionError(
                    "A BalancedSharding assigns further steps only after reports of trained steps. It assigned "
                    f"{counted(number, 'step')} and got reports of {self._trained}, then of {self._unlike} with other "
                    f"rows, the last with {self._unlike_rows} by replica, and nothing for {_SILENT_SECONDS:g} s. "
                    "Train on the batches without changing their rows."
                )

    def _split(self, number: int, first: int) -> tuple[int, ...]:
        shares = self._decided.get(number, self.latest_shares)
        rows = min(sum(shares), self._end - first)
        return shares if rows == sum(shares) else split(rows, shares, self.place.at_most)

    # The methods below are called by the thread that takes batches from the iterator or trains on them.

    def note_taken(self) -> None:
        """Notes that Python code has taken the batches of one more step from the iterator."""
        with self._news:
            self._taken += 1

    def note_unseen(self) -> None:
        """Notes that from now on a graph takes batches, where they cannot be counted."""
        with self._news:
            self._epoch_read, self.is_seen = max(self._epoch_read, self.epoch_taken), False

    def has_trained(self, rows: np.ndarray, is_local: bool = False) -> bool:
        """Records one more step of training. Returns False if its rows by replica are not those of the next step.

        If `is_local`, only the rows of this worker's first replica are known.

        The check cannot detect other data with the same rows. It does not depend on the number of steps assigned, which
        differs between workers. If more steps are reported than were assigned, `batches` raises.
        """
        with self._news:
            if self.closed or not self._number or self._trained_examples >= self._end:
                return False
            known = slice(self.place.own.start, self.place.own.start + 1) if is_local else slice(None)
            expected = self._split(self._trained, self._trained_examples)
            if tuple(rows[known].tolist()) != expected[known]:
                self._unlike, self._unlike_rows = self._unlike + 1, tuple(rows.tolist())
                self._news.notify_all()
                return False
            self._unlike = 0
            self._decided.pop(self._trained, None)
            self._trained += 1
            self._trained_step += 1
            self._trained_examples += sum(expected)
            if self._trained_examples >= self._end and self._repeat:
                self._trained_epoch, self._trained_step, self._trained_examples = self._trained_epoch + 1, 0, 0
            return True

    @property
    def position(self) -> tuple[int, int]:
        """The epoch to train on next, and the step in it."""
        if self.is_over:
            return self._trained_epoch + 1, 0
        return self._trained_epoch, self._trained_step

    @property
    def trained_examples(self) -> int:
        """Number of examples of the epoch at `position` that come before the step there."""
        return 0 if self.is_over else self._trained_examples

    @property
    def is_over(self) -> bool:
        """Whether all steps were trained on, of assignments without `repeat`."""
        return self._trained_examples >= self._end

    @property
    def trained(self) -> int:
        """Number of steps that were trained on since the start of the assignment."""
        return self._trained

    @property
    def epoch_taken(self) -> int:
        """The epoch before which all epochs were taken from the iterator, or read if taking is not counted."""
        if not self.is_seen:
            return self._epoch_read
        size = sum(self.latest_shares)
        left = -(-(self._end - self._first) // size)  # Steps of the first epoch.
        if self._taken < left:
            return self._first_epoch
        return self._first_epoch + 1 + (self._taken - left) // -(-self._end // size)

    @property
    def adapts(self) -> bool:
        """Whether shares of the replicas may change, so that each step needs a decision."""
        return self._lead is not None

    def may_change(self) -> bool:
        """Whether the shares may change now: the last change was in force long enough to be measured."""
        return self.adapts and self._trained >= self._last_change + _STEPS_BETWEEN_CHANGES

    def decide(self, shares: tuple[int, ...]) -> None:
        """Sets the shares of the replicas for one more step. Call it once after each step of training."""
        if self._lead is None:
            return
        with self._news:
            number = self._trained + self._lead - 1
            if shares != self.latest_shares:
                self._last_change, self.latest_shares = number, shares
            self._decided[number] = shares
            self._news.notify_all()
