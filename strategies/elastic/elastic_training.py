"""Local steps of a strategy that goes on without lost workers: when a worker trains, synchronizes and joins."""

import contextlib
import dataclasses
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals, keras_stack
from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError
from tfdist.events.phase_names import WAITING
from tfdist.faults import watchdog
from tfdist.strategies.chief_only_guard import is_on_chief_alone
from tfdist.strategies.elastic import model_state
from tfdist.strategies.elastic.elastic_input import check_sharding, own_rows
from tfdist.strategies.elastic.elastic_start import greeting_of, setup_of_worker, take_greeting, write_members
from tfdist.strategies.elastic.ended_fits import EndedFits
from tfdist.strategies.elastic.fit_in_rounds import FitInRounds
from tfdist.strategies.elastic.round_averaging import RoundAveraging, averaged_logs
from tfdist.strategies.elastic.round_chief import RoundChief
from tfdist.strategies.elastic.round_member import RoundMember
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution, RowLedger, RowReport, trains
from tfdist.strategies.local_steps.synchronization import Synchronization, check_keeps_no_averages

_BEATS_MISSED = 3  # A busy process may be late for its signs of life.
_PROGRESS_SECONDS = 0.2
_PATIENCE_ROUNDS = 10


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
        self._averaging, self._fits, self._round_seconds = RoundAveraging(synchronization, self.workers), 0, 0.0
        self._fit: FitInRounds | None = None
        self._options = options = strategy.fault_tolerance
        self._told_at, self._has_trained = 0.0, False
        self._chief: RoundChief | None = None
        self._ended = EndedFits()
        silence_seconds = _BEATS_MISSED * options.heartbeat_timeout_seconds
        self._devices = devices = len(strategy.extended.worker_devices)
        setup = setup_of_worker(synchronization, devices)
        if self.worker == 0:
            write = functools.partial(write_members, start_seconds=options.start_timeout_seconds)
            self._chief = RoundChief(cluster, silence_seconds, greeting_of(setup), self._lose, write)
            self._chief.late = self._ended.over
        else:
            self._member = RoundMember(cluster, options.start_timeout_seconds, silence_seconds)
            take_greeting(self._member.hear("greeting"), setup, self.worker)
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
        fit = self._fit = FitInRounds(self._fits, weakref.ref(model), self._executions(model))
        self._fits += 1
        if self._chief is not None:
            self._chief.fit = fit.number
            if keras_stack.trains_no_epoch():  # No callback would end it.
                self.end_fit()
            return
        self._member.send(Message("join", {"fit": fit.number, "is_warm": False}))
        with self._waiting():
            said = self._member.hear("place", "state", "over", fit=fit.number)
        if said.kind == "over":
            self._take_end(fit, said)
            keras_internals.begin_with_epoch(model, sys.maxsize)  # Nothing is left to train.
            return
        if said.kind == "state":
            self._take_state(model, said)
        fit.is_warm = said.kind == "state"  # All begin together, and need not trace before.
        epoch, batch = said.fields["place"]
        fit.until = epoch, batch
        text, sharding = said.fields["sharding"], self._sharding()
        fit.reads = sharding is None or text is None
        if not fit.reads:
            sharding.deserialize(text)
        keras_internals.begin_with_epoch(model, epoch)

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
            self._warm_up(fit, model, function)
            return dict(fit.logs)
        if not fit.steps:
            self._begin_round(fit, model)
        fit.end_skipping()
        if trains(fit.steps // together, fit.target, self._executions(model)):
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

    def _warm_up(self, fit: FitInRounds, model: keras.Model, function: Callable[[], Any]) -> None:
        """Runs a step, and joins the `fit` of the others after it: they do not wait until this worker has traced it.

        The results of the step are replaced by the state of worker 0, at a later place than this step.
        """
        fit.logs = function()
        fit.is_warm = True
        self._member.send(Message("join", {"fit": fit.number, "is_warm": True}))
        with self._waiting():
            said = self._member.hear("state", "over", fit=fit.number)
        fit.rows = fit.epoch_rows = 0
        if said.kind == "over":
            self._take_end(fit, said)
            return
        self._take_state(model, said)
        model.reset_metrics()
        epoch, batch = said.fields["place"]
        fit.until, fit.reads = (epoch, batch), True
        logging.warning("worker %d joins in epoch %d, after batch %d", self.worker, epoch + 1, batch)

    def _take_state(self, model: keras.Model, state: Message) -> None:
        self._assign(model_state.all_state_of(model), state.arrays)
        self._averaging.ledger = RowLedger.from_json(state.fields["ledger"])
        if self._fit is not None:
            self._fit.epoch_logs = dict(map(tuple, state.fields["logs"]))

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
        part = Message("logs", {"fit": fit.number, "place": self._place(fit), "rows": fit.epoch_rows, "logs": own})
        fit.epoch_rows = 0
        with self._waiting():
            if self._chief is not None:
                parts = {0: part, **self._chief.gather("logs", self._place(fit), self._patience_seconds)}
                averages = fit.epoch_logs[epoch] = averaged_logs(parts)
                answer = Message("logs", {"fit": fit.number, "logs": averages})
                self._chief.answer(dict.fromkeys(parts.keys() - {0}, answer))
            else:
                self._member.send(part)
                answer = self._member.hear("logs", "over", fit=fit.number)
                if answer.kind == "over":
                    self._take_end(fit, answer)
                    return
                averages = answer.fields["logs"]
        (logs or {}).update(averages)

    def end_fit(self) -> None:
        """Ends a `fit` on this worker; worker 0 thereby ends it for all."""
        fit, self._fit = self._fit, None
        if fit is None:
            return
        if self._chief is not None:
            model = fit.model()
            over = self._over(fit.number, model)
            self._ended.note(model, over)
            self._chief.end_fit(fit.number, over)
            logging.info("%s", self.report().describe())
        elif not fit.is_over:
            self._member.send(Message("leave", {"fit": fit.number}))

    def joining(self) -> list[int]:
        """Returns the workers that worker 0 lets join the running `fit` when its next round begins."""
        return [] if self._chief is None or self._fit is None else self._chief.joining(self._fit.number)

    def tell_progress(self) -> None:
        """Tells worker 0 how many rows this worker has trained on since the last synchronization."""
        if self._chief is None and self._fit is not None:
            self._told_at = time.monotonic()
            self._member.send(Message("progress", {"rows": self._fit.rows}))

    def report(self) -> RowReport:
        """Returns the rows that each worker has trained on, until the last synchronization."""
        return self._averaging.ledger.report(self.workers)

    # -- backups

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns what worker 0 keeps beside the model, for a backup: the outer optimizer, and the counts of rows."""
        return self._averaging.state()

    def restore(self, arrays: Mapping[str, np.ndarray], counts: Mapping[str, Any]) -> None:
        """Restores what `state` has returned."""
        self._averaging.restore(arrays, counts)

    # -- rounds

    def _begin_round(self, fit: FitInRounds, model: keras.Model) -> None:
        if self._chief is not None:
            is_first, fit.has_begun = not fit.has_begun, True
            if is_first:
                workers = None if self._has_trained else range(1, self.workers)
                with self._waiting():
                    joining = self._chief.await_workers(fit.number, workers, self._options.start_timeout_seconds)
                self._has_trained = True
            else:
                joining = self._chief.joining(fit.number)
            if joining:
                self._chief.welcome(joining, self._state(fit, model))
                if not is_first:
                    logging.warning("worker %s has joined", ", ".join(map(str, joining)))
            self._chief.present = Message("place", self._place_fields(fit))
            trainable = self._values(model_state.weights_of(model)[0])
            self._averaging.begin(model, trainable)
        fit.began, fit.away = time.monotonic(), 0.0

    def _synchronize(self, fit: FitInRounds, model: keras.Model) -> None:
        place = self._place(fit)
        trainable, others = model_state.weights_of(model)
        ends = self._values([*trainable, *others])  # Waits until a GPU has computed them.
        fit.end_skipping()
        seconds = time.monotonic() - fit.began - fit.away
        done = Contribution(fit.rows, fit.trained, fit.skipped, seconds)
        with self._waiting():
            if self._chief is not None:
                parts = self._chief.gather("weights", place, self._patience_seconds)
                executions = self._executions(model)
                answer = self._averaging.averaged(fit.number, done, ends, parts, len(trainable), executions)
                self._chief.answer(dict.fromkeys(parts, answer))
                self._chief.close_round(parts, fit.steps)
                self._round_seconds = time.monotonic() - fit.began
            else:
                fields = {"fit": fit.number, "place": place, "done": dataclasses.asdict(done)}
                self._member.send(Message("weights", fields, ends))
                answer = self._member.hear("weights", "over", fit=fit.number)
        if answer.kind == "over":
            self._take_end(fit, answer)
            return
        self._assign([*trainable, *others], answer.arrays)
        if self._chief is None:
            self._averaging.ledger = RowLedger.from_json(answer.fields["ledger"])
        fit.target = dict(map(tuple, answer.fields["targets"])).get(self.worker, self._executions(model))
        fit.steps = fit.trained = fit.rows = fit.skipped = 0

    def _state(self, fit: FitInRounds, model: keras.Model) -> Message:
        """Returns the state of the model and the place where training goes on, for workers that join."""
        fields = {**self._place_fields(fit), "ledger": self._averaging.ledger.to_json()}
        fields["logs"] = sorted(fit.epoch_logs.items())
        return Message("state", fields, self._values(model_state.all_state_of(model)))

    def _place_fields(self, fit: FitInRounds) -> dict[str, Any]:
        """Returns the place where training goes on, as JSON."""
        sharding = self._sharding()
        text = None if sharding is None else sharding.serialize()
        text = text.decode() if isinstance(text, bytes) else text
        return {"fit": fit.number, "place": keras_stack.place_in_fit(), "sharding": text}

    def _over(self, number: int, model: keras.Model | None) -> Message:
        arrays = [] if model is None else self._values(model_state.all_state_of(model))
        fields = {"fit": number, "has_optimizer": True, "ledger": self._averaging.ledger.to_json()}
        return Message("over", fields, arrays)

    def _take_end(self, fit: FitInRounds, over: Message) -> None:
        """Takes the news that worker 0 has ended a `fit`, which ends it on this worker."""
        model, fit.is_over = fit.model(), True
        if model is not None:
            model.stop_training = True
            if over.arrays:
                has_optimizer = over.fields["has_optimizer"]
                self._assign(model_state.all_state_of(model) if has_optimizer else model.weights, over.arrays)
        self._averaging.ledger = RowLedger.from_json(over.fields["ledger"])

    # -- helpers

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """The context of a wait for other workers, which has deadlines of its own."""
        strategy = self._strategy()
        with watchdog.section(WAITING), strategy.reports.activity.exchanging("fit"):  # type: ignore[union-attr]
            yield

    @property
    def _patience_seconds(self) -> float:
        """How long worker 0 waits for a member that lives but has not finished its round."""
        given = self._options.stall_timeout_seconds
        return given or max(self._options.start_timeout_seconds, _PATIENCE_ROUNDS * self._round_seconds)

    def _place(self, fit: FitInRounds) -> list[int]:
        return [fit.number, *keras_stack.place_in_fit()]

    def _executions(self, model: keras.Model) -> int:
        """Number of executions of the train function in a round."""
        return -(-self._synchronization.every // model.steps_per_execution)

    def _sharding(self) -> Any:
        """The `BalancedSharding` that the running `fit` reads, if any."""
        return keras_stack.sharding_of_fit()

    def _values(self, variables: list[Any]) -> list[np.ndarray]:
        return model_state.values_of(variables, self._strategy())

    def _assign(self, variables: list[Any], values: Any) -> None:
        model_state.assign(variables, values, self._strategy())

    def _lose(self, worker: int, rows: int) -> None:
        self._averaging.ledger.lose(worker, rows)

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
            watchdog.moved()
            first = tf.nest.flatten(batch)[0]
            rows = [int(tf.shape(own)[0]) for own in strategy.experimental_local_results(first)]  # type: ignore[union-attr]
            total += sum(rows)
            strategy.reports.pass_over(model, rows)  # type: ignore[union-attr]
        return total
