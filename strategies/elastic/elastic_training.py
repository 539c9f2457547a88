"""Local steps of a strategy that goes on without lost workers: when a worker trains, skips and synchronizes."""

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist._compat import keras_internals, keras_stack
from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError
from tfdist.faults import beside_steps
from tfdist.strategies.chief_only_guard import is_on_chief_alone
from tfdist.strategies.elastic import model_state
from tfdist.strategies.elastic.chief_role import ChiefRole
from tfdist.strategies.elastic.elastic_input import check_sharding, own_rows
from tfdist.strategies.elastic.elastic_start import setup_of_worker
from tfdist.strategies.elastic.fit_in_rounds import FitInRounds
from tfdist.strategies.elastic.fit_role import FitRole
from tfdist.strategies.elastic.member_role import MemberRole
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution, RowReport, trains
from tfdist.strategies.local_steps.synchronization import Synchronization, check_keeps_no_averages

_BEATS_MISSED = 3  # A busy process may be late for its signs of life.
_PROGRESS_SECONDS = 0.2


class ElasticTraining:
    """Trains by local steps, and synchronizes with the workers that live.

    Each worker runs TensorFlow by itself, so that the end of one does not fail the others. A round are the steps
    between two synchronizations. At its end each member sends its weights to worker 0, which averages them and answers
    with the next weights. A worker that has started again gets weights, optimizer and position from worker 0 before the
    next round begins.

    Args:
      synchronization: How often to synchronize, and how.
      cluster: The cluster.
      strategy: The strategy of this worker's devices.

    Attributes:
      worker: The number of this worker.
      workers: Number of workers of the job.

    Raises:
      ValueError: If this process has made one for the cluster before.
    """

    _clusters: ClassVar[set[tuple[int, tuple[str, ...]]]] = set()

    def __init__(self, synchronization: Synchronization, cluster: ClusterSpec, strategy: Any):
        here = cluster.worker_id, cluster.training_addresses
        if here in self._clusters:
            raise ValueError(
                "With tolerate_lost_workers a program must make one strategy, since a worker that starts again could "
                "not tell which of several the others use, but this program makes another. Use the first one for all "
                "models."
            )
        self.worker, self.workers = cluster.worker_id, cluster.num_workers
        self._synchronization, self._strategy = synchronization, weakref.ref(strategy)
        self._fit: FitInRounds | None = None
        self._fits, self._told_at = 0, 0.0
        self._devices = devices = len(strategy.extended.worker_devices)
        silence_seconds = _BEATS_MISSED * strategy.fault_tolerance.heartbeat_timeout_seconds
        role = ChiefRole if self.worker == 0 else MemberRole
        setup = setup_of_worker(synchronization, devices, cluster)
        self._role: FitRole = role(synchronization, strategy, cluster, silence_seconds, setup)
        strategy.reports.are_local = True
        strategy.reports.place = range(self.worker * devices, (self.worker + 1) * devices), self.workers * devices
        count = weakref.WeakMethod(self._count_rows)
        strategy.reports.listeners.append(lambda report: (known := count()) and known(report))
        self._clusters.add(here)

    def refuse_loop(self) -> None:
        """Refuses training outside of `fit`, where nothing would synchronize.

        Raises:
          ValueError: Always.
        """
        raise ValueError(
            "With tolerate_lost_workers, workers synchronize in `fit`, but the script trains in a loop of its own or "
            "by `train_on_batch`. Use `fit`, with a `train_step` of your own if need be, or leave it out."
        )

    # -- the input

    def input_context(self, context: tf.distribute.InputContext) -> tf.distribute.InputContext:
        """Returns the input context of this worker among all workers of the job."""
        replicas = context.num_replicas_in_sync * self.workers
        return tf.distribute.InputContext(self.workers, self.worker, replicas)

    def of_own_context(self, dataset_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a dataset function that is called with the input context of this worker in the job."""
        return lambda context: dataset_fn(self.input_context(context))

    def check_sharding(self, sharding: Any) -> None:
        """Checks that each worker has rows of each batch of a `BalancedSharding`; raises `ValueError` if not."""
        check_sharding(sharding, self.workers * self._devices)

    def own_rows(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches of a dataset that all workers read, with this worker's rows of each."""
        return own_rows(dataset, self.worker, self.workers)

    # -- the run of a `fit`

    def begin_fit(self, model: keras.Model) -> None:
        """Begins a `fit`, when Keras has built the model. Other workers than worker 0 wait for its state here."""
        check_keeps_no_averages(model.optimizer)
        if self._fit is not None:
            self.end_fit()
        fit = self._fit = FitInRounds(self._fits, weakref.ref(model), self._role.executions(model))
        self._fits += 1
        self._role.begin_fit(fit, model)
        if self.worker == 0 and keras_stack.trains_no_epoch():  # No callback would end it.
            self.end_fit()

    def train(self, model: keras.Model | None, function: Callable[[], Any], iterator: Any) -> Any:
        """Runs the train function of a model for its next steps, or skips them; synchronizes if it is due.

        Args:
          model: The model.
          function: Runs the steps, and returns their logs.
          iterator: The iterator that the steps read.
        """
        fit = self._fit
        if model is None or fit is None or fit.model() is not model:
            raise ClusterError(
                "With tolerate_lost_workers, workers synchronize within one `fit` of one model, but another model is "
                "trained, or within the `fit` of another. Train one model after the other."
            )
        assert model is not None
        keras_internals.begin_with_epoch(model, None)
        together = model.steps_per_execution
        if self._passes_over(fit):
            if fit.reads:
                self._read(iterator, together, model)
            return dict(fit.logs)
        if fit.is_over:
            return dict(fit.logs)
        if not fit.is_warm:
            fit.logs = function()
            self._role.join_late(fit, model)
            return dict(fit.logs)
        if not fit.steps:
            self._role.begin_round(fit, model)
            fit.began, fit.away = time.monotonic(), 0.0
        fit.end_skipping()
        if trains(fit.steps // together, fit.target, self._role.executions(model)):
            fit.logs = function()
            fit.trained += together
        else:
            fit.skipping_since = time.monotonic()
            fit.skipped += self._read(iterator, together, model)
            fit.behind = model_state.advance_schedule(model.optimizer, fit.behind + together)
        fit.steps += together
        if time.monotonic() - self._told_at > _PROGRESS_SECONDS:
            self.tell_progress()
        if fit.steps >= self._synchronization.every:
            self._synchronize(fit, model)
        return fit.logs

    def _passes_over(self, fit: FitInRounds) -> bool:
        """Whether the others have trained on the present batch before this worker joined."""
        if fit.until is not None and keras_stack.place_in_fit() >= fit.until:
            fit.until = None
        return fit.until is not None

    def synchronize(self) -> None:
        """Synchronizes if this worker has trained since the last time, as at the end of an epoch."""
        fit = self._fit
        model = None if fit is None else fit.model()
        if fit is not None and model is not None and fit.steps and not fit.is_over and not is_on_chief_alone():
            self._synchronize(fit, model)

    def end_epoch(self, logs: dict[str, Any] | None) -> None:
        """Synchronizes, and averages the logs of an epoch over all members by rows.

        An epoch that this worker passes over gets the logs of the others, so that callbacks decide as theirs.
        """
        self.synchronize()
        fit = self._fit
        if fit is None or fit.is_over:
            return
        epoch = keras_stack.place_in_fit()[0]
        if self._passes_over(fit):
            if logs is not None:
                logs.clear()
                logs.update(fit.epoch_logs.get(epoch, {}))
            return
        own = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        part = Message("logs", {"fit": fit.number, "place": fit.place, "rows": fit.epoch_rows, "logs": own})
        fit.epoch_rows = 0
        averages = self._role.averaged_logs(fit, epoch, part)
        if averages is not None:
            (logs or {}).update(averages)

    def end_fit(self) -> None:
        """Ends a `fit` on this worker; worker 0 thereby ends it for all."""
        fit, self._fit = self._fit, None
        if fit is not None:
            self._role.end_fit(fit)

    def joining(self) -> list[int]:
        """Returns the workers that worker 0 lets join the running `fit` when its next round begins."""
        return [] if self._fit is None else self._role.joining(self._fit)

    def tell_progress(self) -> None:
        """Tells worker 0 how many rows this worker has trained on since the last synchronization."""
        if self._fit is not None:
            self._told_at = time.monotonic()
            self._role.tell_progress(self._fit)

    def report(self) -> RowReport:
        """Returns the rows that each worker has trained on, until the last synchronization."""
        return self._role.averaging.ledger.report(self.workers)

    # -- backups

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns what worker 0 keeps beside the model, for a backup: the outer optimizer, and the counts of rows."""
        return self._role.averaging.state()

    def restore(self, arrays: Mapping[str, np.ndarray], counts: Mapping[str, Any]) -> None:
        """Restores what `state` has returned."""
        self._role.averaging.restore(arrays, counts)

    # -- helpers

    def _synchronize(self, fit: FitInRounds, model: keras.Model) -> None:
        weights = [each for kind in model_state.weights_of(model) for each in kind]
        ends = self._role.values(weights)  # Waits until a GPU has computed them.
        fit.end_skipping()
        seconds = time.monotonic() - fit.began - fit.away
        done = Contribution(fit.rows, fit.trained, fit.skipped, seconds)
        answer = self._role.averaged_weights(fit, model, done, ends)
        if answer is None:
            return
        self._role.assign(weights, answer.arrays)
        targets = dict(map(tuple, answer.fields["targets"]))
        fit.target = targets.get(self.worker, self._role.executions(model))
        fit.steps = fit.trained = fit.rows = fit.skipped = 0

    def _count_rows(self, report: Any) -> None:
        """Counts the rows of a training step, in a thread of TensorFlow, before the step ends."""
        if self._fit is not None:
            rows = int(report.rows.sum())
            self._fit.rows += rows
            self._fit.epoch_rows += rows

    def _read(self, iterator: Any, batches: int, model: keras.Model) -> int:
        """Reads batches on which the model does not train, and returns their rows."""
        total, strategy = 0, self._strategy()
        for _ in range(batches):
            try:
                batch = next(iterator)
            except StopIteration as error:
                raise tf.errors.OutOfRangeError(None, None, "The input has ended.") from error
            beside_steps.moved()
            first = tf.nest.flatten(batch)[0]
            rows = [int(tf.shape(own)[0]) for own in strategy.experimental_local_results(first)]  # type: ignore[union-attr]
            total += sum(rows)
            strategy.reports.pass_over(model, rows)  # type: ignore[union-attr]
        return total
