"""Gives each iterator of a `BalancedSharding` its batches, and follows the steps that were trained on."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.batch_size_schedule import BatchSizeSchedule
from tfdist.data.replica_shares import Shares
from tfdist.data.statistics import StepTimes
from tfdist.data.topology import ReplicaTopology
from tfdist.data.training_position import TrainingPosition

_LEAD = 4  # Steps by which reading may be ahead of training while shares change.


class IteratorAssignments:
    """Gives each iterator of a `BalancedSharding` its batches, from the position of training on, by present shares.

    Under `repeat` epochs follow each other without end.

    Attributes:
      position: The epoch and step to train on next.
      lock: Protects `shares` and `position`.
      reports: The attached strategy's reports of training steps, if there is one.
      place: The replicas of this worker, under the attached strategy.
      evaluation_place: Those for evaluation; others than `place` if each worker evaluates all rows.
      times: Statistics of the training steps.
      visitors: Functions called after each step with its examples; see `BalancedSharding`.
      sizes: The global batch sizes of the next steps of training.
      resizes: Whether these may change.
    """

    def __init__(self, plan: BatchPlan, shares: Shares, repeat: bool, *, resizes: bool = False):
        self.plan, self.shares, self._repeat, self.resizes = plan, shares, repeat, resizes
        self.sizes = BatchSizeSchedule(plan.global_batch_size)
        self._trained: BatchAssignment | None = None  # The assignment that `fit` trains on.
        self.position, self.lock = TrainingPosition(), threading.RLock()
        self.reports: Any = None
        self.place: ReplicaTopology | None = None
        self.evaluation_place: ReplicaTopology | None = None
        self.times = StepTimes()
        self.visitors: list[Callable[[int, np.ndarray], None]] = []
        # Assignments of iterators that were not read from yet, for training (True) and for evaluation (False).
        self._begun: dict[bool, list[BatchAssignment]] = {True: [], False: []}

    def start(
        self, *, training: bool, models: Sequence[Any] = (), counts: bool = True, goes_on: bool = False
    ) -> BatchAssignment:
        """Starts an assignment of batches for the iterator that is made next, and returns it.

        Args:
          training: Whether to continue at the position of training, instead of reading an epoch in stored order.
          models: The models that `fit` trains on the data, innermost first; the strategy reports their steps.
          counts: Without models, whether the position moves at the end of an epoch. The epoch must be taken from the
            iterator if the caller sets `is_seen` of the assignment. Otherwise it must be read ahead.
          goes_on: Whether the next epoch follows at the end of an epoch, as under `repeat`.

        Raises:
          ValueError: If the sharding's `for_strategy` was not called before.
        """
        place = self.place
        if place is None:
            raise ValueError(
                "An iterator of a strategy needs a dataset from for_strategy, but for_strategy was not called. Call "
                "for_strategy(context, training=...) first; or read the dataset that a call of the sharding returns."
            )
        with self.lock:
            if training:
                assignment = self._of_training(place, models, counts, self._repeat or goes_on)
            else:
                assignment = self._of_evaluation(self.evaluation_place or place)
            self._begun[training] = [each for each in self._begun[training] if not each.closed] + [assignment]
            return assignment

    def _of_evaluation(self, place: ReplicaTopology) -> BatchAssignment:
        return BatchAssignment(self.plan.of_evaluation(), 0, 0, self.shares.at(place), place, repeat=False)

    def _of_training(
        self, place: ReplicaTopology, models: Sequence[Any], counts: bool, repeat: bool
    ) -> BatchAssignment:
        reported = bool(models) and self.reports is not None
        # Workers that train by local steps do not know each other's speeds.
        is_local = getattr(self.reports, "are_local", False)
        follows_speed = self.shares.follow_speed and place.replicas > 1
        adapts = reported and (self.resizes or follows_speed) and not is_local
        lead = _LEAD if adapts else None
        epoch, step, first = self.position.place
        shares, *upcoming = [self.shares.at(place, self.sizes.ahead(steps)) for steps in range(lead or 1)]
        assignment = BatchAssignment(
            self.plan, epoch, step, shares, place, repeat=repeat, lead=lead, first=first, upcoming=upcoming
        )
        if reported:
            self._trained = assignment
            assignment.visitors = self.visitors
            self.reports.feed(models, functools.partial(self._take, assignment))
            self.position.count(None)
        elif counts:
            self.position.count(assignment)
        self.times.begin()
        return assignment

    # The methods below are called by the pipeline.

    def begin(self, place: ReplicaTopology, *, training: bool, is_started: bool) -> BatchAssignment:
        """Returns the assignment of batches for an iterator when its first batch is read by the worker at `place`.

        `is_started` tells whether `start` is called for each iterator. Keras drops some iterators, so the assignment is
        then that of the newest one that was not read from.
        """
        with self.lock:
            if is_started:
                waiting = [assignment for assignment in self._begun[training] if not assignment.closed]
                assignment = waiting[-1] if waiting else self.start(training=training)
                self._begun[training] = waiting[:-1]
                return assignment
            if not training:
                return self._of_evaluation(place)
            of_job = self.reports is not None
            epoch, step, first = self.position.place if of_job else self.position.of_reader(place)
            shares = self.shares.at(place, self.sizes.present)
            return BatchAssignment(self.plan, epoch, step, shares, place, repeat=self._repeat, first=first)

    def has_read(self, place: ReplicaTopology, epoch: np.ndarray) -> None:
        """Notes that a worker without `start` has taken all epochs before `epoch`, to move the position."""
        with self.lock:
            if self.reports is None:
                self.position.has_read(place, int(epoch))

    # The methods below are called after steps of training.

    def resize(self, size: int, multiple: int = 1) -> int:
        """Changes the global batch size from an early step on, the same on all workers if all call it after one step.

        Args:
          size: The new size.
          multiple: Number of steps in an execution, which have the same size.

        Returns:
          How many more steps are trained with the present size.
        """
        with self.lock:
            steps = 0
            if self._trained is not None and not self._trained.is_over:
                # The steps before are decided, and workers may have read them.
                steps = _LEAD + -(self._trained.trained + _LEAD) % multiple
            self.sizes.change(size, steps)
            return steps

    def _take(self, assignment: BatchAssignment, report: Any) -> None:
        with self.lock:
            epoch, step = assignment.position
            if not assignment.has_trained(report.rows, is_local=report.is_local):
                return
            self.position.has_trained((*assignment.position, assignment.trained_examples))
            self.sizes.has_trained()
            if self.visitors:
                examples = np.concatenate([assignment.handed_out.popleft() for _ in assignment.place.own])
                for visitor in list(self.visitors):  # A copy, since a deleted visitor removes itself.
                    visitor(epoch, examples)
            statistics = self.times.note(report, self.shares.changes)
            if assignment.adapts:
                is_first = step == 0 or not statistics.step_seconds
                self.shares.learn(assignment, report, self.sizes.ahead(_LEAD - 1), is_first=is_first)
