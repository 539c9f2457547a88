"""Input of `fit` that splits the global batches of a data set among replicas by their speed."""

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import dataset_internals
from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_coalescing import Asked, When
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.example_order import Unshuffled, chosen_order
from tfdist.data.pipeline import Make, Pipeline, PipelineUse, finished
from tfdist.data.replica_shares import Shares
from tfdist.data.sources import Source, as_source
from tfdist.data.statistics import Statistics, StepTimes
from tfdist.data.topology import ReplicaTopology
from tfdist.data.validation import check_truth, checked_count, checked_whole
from tfdist.data.weak_callbacks import weakly
from tfdist.errors import PositionError

_FORMAT = 1
_LEAD = 4  # Steps by which reading may be ahead of training while shares change.
_STATE_CHARACTERS = 1000


class BalancedSharding(tf.train.experimental.PythonState):
    """Dataset function that splits each global batch among the replicas so that all of them take equally long.

        train = strategy.distribute_datasets_from_function(
            tfdist.data.BalancedSharding((x, y), global_batch_size=1024, seed=0))
        model.fit(train, epochs=10)

    Global batch k of an epoch depends only on the seed, the epoch, k and the batch size. It holds the same examples, in
    the same order, for any number of workers; they only split it. An epoch holds each example once. Weights, losses and
    metrics equal those of one device on the same global batches, for any shares. Under "speed", shares depend on
    measured times, so two runs differ by rounding. Under "equal" and fixed weights, two runs agree in every bit.

    The sharding saves itself in a checkpoint, in less than 1 KB: `tf.train.Checkpoint(data=sharding)`. After `restore`,
    on any number of workers, training continues with the first global batch that was not trained on. Batches that were
    only read ahead do not count. That epoch then has fewer steps, and Keras warns about it. Under `steps_per_epoch` it
    has the full number of steps and takes the missing ones from the next epoch.

    Custom loops, and strategies other than those of tfdist, do not report which steps were trained on. Shares then stay
    constant, and the position counts whole epochs that were read. An epoch counts when its last batch is taken.
    TensorFlow's own strategies, and graphs under a strategy, take batches some steps ahead. So after a loop in a graph
    that ends within `repeat`ed epochs, workers may be an epoch apart, and the next `fit` raises an error. Batches that
    Python takes with `next` are counted one by one. Without a strategy, call `sharding(training=False)` for `evaluate`
    and `predict`, since the sharding cannot otherwise distinguish them from training.

    A call with a context returns the dataset of that worker, so one process can inspect the data of several workers.
    The position is then that of the furthest worker. Once a tfdist strategy trains on the sharding, other calls read
    from the position of training and do not move it.

    Costs the computation of a permutation for each batch, and little memory besides the batches that are read ahead.
    `benchmarks/balance.py` measures both.

    Args:
      source: NumPy arrays or eager tensors of equal first dimension, in tuples and dicts; a `tfdist.data.sources`
        object; paths of TFRecord or ArrayRecord files; a TFDS builder with a split, `(builder, "train")`; any object
        with `__len__` and `__getitem__`. See `tfdist.data.sources.as_source`.
      global_batch_size: Number of examples in a step, over all replicas.
      seed: Seed of the shuffle. Must be equal on all workers.
      shuffle: Whether each epoch has a new order, a permutation of the whole data set.
      block_size: Number of consecutive examples in a block. Shuffles the blocks, and the examples within each block,
        for files that are best read sequentially.
      stratify_by: Class of each example, [n]. Gives every global batch and every share the proportions of the data set.
      map_fn: Function applied to each example, in parallel, as in `tf.data.Dataset.map`. Unseeded random operations
        such as `tf.random.uniform` draw new numbers in each epoch, worker and run, so a restart does not repeat them.
        Random operations with a seed draw the same numbers for each batch. For repeatable augmentation, use
        `tf.random.stateless_uniform` and the like with a seed computed from the example, or Keras layers in the model.
      policy: "speed" measures the replicas and adapts the shares to them; "equal" keeps shares equal; a list holds one
        fixed weight per replica. Its length must fit the replicas present, also under `tfdist run --min-workers`.
      max_rows: Largest number of rows per replica, one number or one per replica. No limit by default.
      drop_remainder: Whether training leaves out a short last batch. `evaluate` and `predict` still read it. For a
        model with a fixed batch size, give them `steps=len(source) // global_batch_size`.
      repeat: Whether epochs follow each other without end, for `fit(steps_per_epoch=...)`.
      num_parallel_calls: Number of batches read and decoded at the same time; `tf.data.AUTOTUNE` for one per core.
      service: Address of a tf.data service, such as "node0:5050". Its servers read, decode and map the examples if that
        is too much work for the workers; see `tfdist.data.service_client`. Batches stay the same. Workers request them
        long before training on them, so shares cannot follow the speed: use another policy than "speed".

    Attributes:
      source: The source of the examples.
      plan: The plan of the global batches.
      visitors: Functions called after each step of `fit` with the epoch and the examples that this worker's replicas
        were trained on, int64 [rows]. Add them before iterating over the dataset.

    Raises:
      ValueError: If an argument is out of range, or a global batch has fewer examples than there are replicas.
      TypeError: If `source` is not readable, `map_fn` is not a function, or the classes cannot be sorted.
      SourceError: If the source cannot be read, or no service answers.
    """

    def __init__(
        self,
        source: Any,
        global_batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        block_size: int | None = None,
        stratify_by: Any = None,
        map_fn: Callable[..., Any] | None = None,
        policy: str | Sequence[float] = "speed",
        max_rows: int | Sequence[int] | None = None,
        drop_remainder: bool = False,
        repeat: bool = False,
        num_parallel_calls: int = 2,
        service: str | None = None,
    ):
        self.source: Source = as_source(source)
        size = checked_count("global_batch_size", global_batch_size)
        for name, value in (("shuffle", shuffle), ("drop_remainder", drop_remainder), ("repeat", repeat)):
            check_truth(name, value)
        self._seed, self._repeat, self._max_rows = checked_whole("seed", seed), repeat, max_rows
        self._shares = Shares(policy, size)
        if service is not None and self._shares.follow_speed:
            raise ValueError(
                'A tf.data service is asked for batches long before they are trained on, so policy="speed" has no say. '
                'Give policy="equal", or a weight for each replica.'
            )
        self._pipeline = Pipeline(self.source, map_fn, num_parallel_calls, service)
        order = chosen_order(len(self.source), self._seed, shuffle, block_size, stratify_by)
        self.plan = BatchPlan(len(self.source), size, order, drop_remainder)
        if not self.plan.steps_per_epoch:
            raise ValueError(
                f"drop_remainder=True leaves nothing of {len(self.source)} examples in batches of {global_batch_size}. "
                "Use a smaller global_batch_size."
            )
        self._fingerprint = self.source.fingerprint()
        self._epoch = self._step = 0
        self._lock = threading.RLock()
        self._place: ReplicaTopology | None = None  # This worker, under the attached strategy.
        self._reports: Any = None
        # Without an attached strategy: the position where all readers begin, and the epoch that each has reached.
        self._restored = (0, 0)
        self._epochs_read: dict[ReplicaTopology, int] = {}
        # Assignments of iterators that were not read from yet, for training (True) and for evaluation (False).
        self._begun: dict[bool, list[BatchAssignment]] = {True: [], False: []}
        self._unreported: BatchAssignment | None = None
        self._times = StepTimes()
        self.visitors: list[Callable[[int, np.ndarray], None]] = []

    def __repr__(self) -> str:
        # Keras shows this text in its error if `fit` is given the sharding itself.
        return (
            f"<BalancedSharding of {len(self.source)} examples: give Keras strategy.distribute_datasets_from_function("
            "sharding), or without a strategy sharding() to train and sharding(training=False) to evaluate and predict>"
        )

    @property
    def is_followed(self) -> bool:
        """Whether a tfdist strategy reports the steps that were trained on, so that the position counts steps."""
        return self._reports is not None

    @property
    def reported_steps(self) -> int:
        """Number of training steps that this strategy has reported, on any data."""
        latest = self._reports.latest if self.is_followed else None
        return latest.number if latest else 0

    # The methods below are called by a strategy.

    def attach(self, reports: Any) -> None:
        """Connects the sharding to the step reports of the strategy that will call it.

        Raises:
          ValueError: If the sharding belongs to another strategy already.
        """
        if self._reports is not None and self._reports is not reports:
            raise ValueError("A BalancedSharding belongs to one strategy. Make another one for this strategy.")
        self._reports = reports

    def for_strategy(self, context: tf.distribute.InputContext, *, training: bool) -> tf.data.Dataset:
        """Returns this worker's dataset for the attached strategy, which calls `start` for each iterator.

        Raises:
          ValueError: See `__call__`.
        """
        place = self._place_of(context)
        with self._lock:
            self._place = place
            self._shares.settle(place)
        return self._dataset(place, training, is_started=True)

    def first_example(self) -> tf.data.Dataset | None:
        """Returns one batch of one row, a stand-in for replicas without rows; None if every batch has enough rows."""
        place = self._place
        if place is None or self._fewest_rows >= place.replicas:
            return None
        return self._pipeline.first_example(place)

    def __call__(self, context: tf.distribute.InputContext | None = None, *, training: bool = True) -> tf.data.Dataset:
        """Returns a worker's dataset: for each step the batches of its replicas, one after the other.

        Args:
          context: The number of the worker, and how many workers and replicas there are; one replica if None.
          training: Whether to continue at the position of training, instead of reading an epoch in stored order.

        Raises:
          ValueError: If the arguments of the sharding do not fit the number of replicas.
        """
        context = context or tf.distribute.InputContext()
        place = self._place_of(context)
        made = self._dataset(place, training, is_started=False)
        made.context = context  # A strategy compares it with the context of the worker that reads.
        steps = self.cardinality if training else self.evaluation_steps
        # The count of a whole epoch. For a continued epoch, which is shorter, `assert_cardinality` would raise.
        counted = dataset_internals.CountedDataset(made, steps * len(place.own) if steps > 0 else steps)
        counted.sharding, counted.context = made.sharding, context
        return counted

    def _dataset(self, place: ReplicaTopology, training: bool, is_started: bool) -> tf.data.Dataset:
        use = PipelineUse(place, training, is_started, has_rows=self._fewest_rows >= place.replicas)
        rows, has_read = max(self._shares.at(place)), functools.partial(weakly(self._has_read), place)
        made = finished(self._pipeline.dataset(use, rows, weakly(self._batches), has_read))
        made.sharding = self  # A reader of the dataset thus keeps the sharding alive.
        return made

    @property
    def cardinality(self) -> int:
        """Number of steps in a whole epoch, or `tf.data.INFINITE_CARDINALITY`."""
        return tf.data.INFINITE_CARDINALITY if self._repeat else self.plan.steps_per_epoch

    @property
    def evaluation_steps(self) -> int:
        """Number of steps in which an evaluation reads each example once."""
        return self._plan_of_evaluation.steps_per_epoch

    @property
    def _fewest_rows(self) -> int:
        """Rows of the smallest batch."""
        return self._plan_of_evaluation.rows(self.evaluation_steps - 1)

    @property
    def _plan_of_evaluation(self) -> BatchPlan:
        return dataclasses.replace(self.plan, order=Unshuffled(), drop_remainder=False)

    def start(
        self,
        *,
        training: bool,
        models: Sequence[Any] = (),
        counts: bool = True,
        goes_on: bool = False,
        is_seen: bool = False,
    ) -> BatchAssignment:
        """Starts the assignment of batches for the iterator that is made next.

        Args:
          training: Whether to continue at the position of training, instead of reading an epoch in stored order.
          models: The models that `fit` trains on the data, innermost first; the strategy reports their steps.
          counts: Without models, whether the position moves at the end of an epoch that was read.
          goes_on: Whether the next epoch follows at the end of an epoch, as under `repeat`.
          is_seen: Whether `has_given` and `gives_unseen` report the batches taken from the iterator. If not, all
            batches read for the iterator count, which may be more.

        Raises:
          ValueError: If `for_strategy` was not called before.
        """
        if self._place is None:
            raise ValueError(
                "A strategy starts the iterators of what for_strategy gave it, and this BalancedSharding was asked for "
                "nothing. Call for_strategy(context, training=...) first; or read what a call of the sharding returns."
            )
        with self._lock:
            if not training:
                handout = self._handout_of_evaluation(self._place)
            else:
                handout = self._start_training(self._place, models, counts, self._repeat or goes_on)
                handout.is_seen = is_seen
            self._begun[training] = [each for each in self._begun[training] if not each.closed] + [handout]
            return handout

    def _handout_of_evaluation(self, place: ReplicaTopology) -> BatchAssignment:
        return BatchAssignment(self._plan_of_evaluation, 0, 0, self._shares.at(place), place.at_most, repeat=False)

    def _start_training(
        self, place: ReplicaTopology, models: Sequence[Any], counts: bool, repeat: bool
    ) -> BatchAssignment:
        reported = bool(models) and self._reports is not None
        adapts = reported and self._shares.follow_speed and place.replicas > 1
        lead = _LEAD if adapts else None
        position = self._epoch, self._step
        handout = BatchAssignment(self.plan, *position, self._shares.present, place.at_most, repeat=repeat, lead=lead)
        if reported:
            self._reports.feed(models, functools.partial(self._take, place, handout))
            self._unreported = None
        elif counts:
            self._unreported = handout
        self._times.begin()
        return handout

    # The methods below are called by the pipeline.

    def _batches(self, make: Make, use: PipelineUse) -> Iterator[tuple[Any, When]]:
        """Yields the elements that `make` makes, of one batch or of several with the same `When`, and that `When`."""
        handout = self._begun_for(use.training) if use.is_started else self._handout_apart(use)
        for when, examples, made in make(self._asked(handout, use.place), handout):
            if use.is_started:
                self._count_read(handout, when.epoch)
                if self.visitors:
                    handout.handed_out.extend(examples)
            yield made, when
        if handout.finished and use.is_started:
            self._count_read(handout, handout.epoch + 1)

    def _asked(self, handout: BatchAssignment, place: ReplicaTopology) -> Asked:
        own = place.own
        before, of_epoch = handout.position[1] * len(own), self.plan.steps_per_epoch * len(own)
        for number, indices in enumerate(handout.indices(own, place.parts), before + 1):
            yield When(handout.epoch, handout.epoch + 1 if number % of_epoch == 0 else 0), indices

    def _begun_for(self, training: bool) -> BatchAssignment:
        """Returns the assignment of the newest iterator that was not read from, since Keras drops some iterators."""
        with self._lock:
            waiting = [handout for handout in self._begun[training] if not handout.closed]
            handout = waiting[-1] if waiting else self.start(training=training)
            self._begun[training] = waiting[:-1]
            return handout

    def _handout_apart(self, use: PipelineUse) -> BatchAssignment:
        """Returns the assignment for a reader for which no tfdist strategy calls `start`."""
        with self._lock:
            if not use.training:
                return self._handout_of_evaluation(use.place)
            if self.is_followed:
                position = self.position
            else:
                read = self._epochs_read.get(use.place)
                position = self._restored if read is None else (read, 0)
            return BatchAssignment(
                self.plan, *position, self._shares.at(use.place), use.place.at_most, repeat=self._repeat
            )

    def _count_read(self, handout: BatchAssignment, epoch: int) -> None:
        """Notes that all epochs before `epoch` were read for an iterator."""
        with self._lock:
            handout.epoch_read = epoch
            self._count(handout)

    def has_given(self, handout: BatchAssignment) -> None:
        """Notes that Python code has taken one more batch from an iterator."""
        with self._lock:
            handout.given += 1
            self._count(handout)

    def gives_unseen(self, handout: BatchAssignment) -> None:
        """Notes that from now on a graph takes the batches, where they cannot be counted."""
        with self._lock:
            handout.is_seen = False
            self._count(handout)

    def _count(self, handout: BatchAssignment) -> None:
        if handout is self._unreported and (epoch := handout.epoch_taken) > self._epoch:
            self._epoch, self._step = epoch, 0

    def _has_read(self, place: ReplicaTopology, epoch: np.ndarray) -> None:
        """Notes that a worker has taken all epochs before `epoch`."""
        with self._lock:
            if self.is_followed:
                return
            self._epochs_read[place] = max(int(epoch), self._epochs_read.get(place, 0))
            if epoch > self._epoch:
                self._epoch, self._step = int(epoch), 0

    # The methods below are called after steps of training.

    def _take(self, place: ReplicaTopology, handout: BatchAssignment, report: Any) -> None:
        with self._lock:
            epoch, step = handout.position
            if not handout.has_trained(report.rows):
                return
            self._epoch, self._step = handout.position
            self._tell_visitors(place, epoch, handout)
            statistics = self._times.note(report, self._shares.changes)
            if handout.adapts:
                is_first = step == 0 or not statistics.step_seconds
                self._shares.learn(place, handout, report, is_first=is_first)

    def _tell_visitors(self, place: ReplicaTopology, epoch: int, handout: BatchAssignment) -> None:
        if self.visitors:
            examples = np.concatenate([handout.handed_out.popleft() for _ in place.own])
            for visitor in list(self.visitors):  # A copy, since a deleted visitor removes itself.
                visitor(epoch, examples)

    def statistics(self) -> Statistics | None:
        """Returns how the last training step was shared among replicas; `None` before the first step."""
        return self._times.statistics

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the step in it, to train on next."""
        return self._epoch, self._step

    # The methods below save and restore the state.

    def __reduce__(self) -> Any:
        raise TypeError(
            "A BalancedSharding cannot be copied or pickled, as a strategy moves its position. Make another of the "
            "same arguments; `other.deserialize(sharding.serialize())` has it begin there."
        )

    def serialize(self) -> str:
        """Returns the position, shares and speeds as JSON."""
        with self._lock:
            state = {
                "format": _FORMAT,
                "epoch": self._epoch,
                "step": self._step,
                "of": self._identity(),
                **self._shares.state(),
            }
        for learnt in ("speed", "shares", None):
            text = json.dumps(state, separators=(",", ":"))
            if len(text) <= _STATE_CHARACTERS or learnt is None:
                break
            state[learnt] = None  # The state of so many replicas is too long, so they measure again.
        return text

    def check(self, string_value: str) -> None:
        """Checks that `deserialize` can restore a state, and changes nothing.

        Raises:
          PositionError: If the state belongs to another source, seed, order or batch size.
        """
        self._read(string_value)

    def _read(self, string_value: str) -> tuple[int, int, dict[str, Any]]:
        try:
            state = json.loads(string_value)
            epoch, step, identity = int(state["epoch"]), int(state["step"]), dict(state["of"])
        except (ValueError, KeyError, TypeError) as error:
            raise PositionError(f"Not a position of a BalancedSharding: {string_value!r:.200}.") from error
        if (own := self._identity()) != identity:
            different = ", ".join(
                f"{key} was {identity.get(key)}, is {own[key]}" for key in own if identity.get(key) != own[key]
            )
            if identity.get("source") != own["source"]:
                different += f" (checksums of the examples; it now reads {self.source.origin()})"
            raise PositionError(
                f"The saved position belongs to other global batches: {different}. Restore it with the source and "
                "arguments that it was saved with, or start a new run."
            )
        return epoch, step, state

    def deserialize(self, string_value: str) -> None:
        """Continues at the position that `serialize` has saved, on any number of replicas.

        Raises:
          PositionError: If the state belongs to another source, seed, order or batch size.
        """
        epoch, step, state = self._read(string_value)
        if step >= self.plan.steps_per_epoch:  # The next batch was a short last one, now left out.
            epoch, step = epoch + 1, 0
        with self._lock:
            self._epoch, self._step = self._restored = epoch, step
            self._epochs_read.clear()
            self._shares.restore(state)
            if self._place is not None:
                self._shares.settle(self._place)

    def described(self) -> list[str]:
        """Returns the settings that must be equal on all workers, so that they agree on the examples of each step."""
        alike = {**self._identity(), "policy": self._shares.policy, "max_rows": self._max_rows, "repeat": self._repeat}
        alike["drop_remainder"] = self.plan.drop_remainder
        return [f"{name} {value}" for name, value in alike.items()]

    def shown(self) -> list[str]:
        """Returns the settings of `described` for error messages, with the origin of the examples."""
        of_source = f"source {self._fingerprint}"
        named = f"examples with the checksum {self._fingerprint} from {self.source.origin()}"
        return [named if each == of_source else each for each in self.described()]

    def described_state(self) -> list[str]:
        """Returns the state that must be equal on all workers when training begins."""
        with self._lock:
            state = {"position": self.position, **self._shares.state()}
        return [f"{name} {value}" for name, value in state.items()]

    def _identity(self) -> dict[str, Any]:
        return {
            "examples": self.plan.num_examples,
            "global_batch_size": self.plan.global_batch_size,
            "seed": self._seed,
            "order": repr(self.plan.order),
            "source": self._fingerprint,
        }

    def _place_of(self, context: tf.distribute.InputContext) -> ReplicaTopology:
        return ReplicaTopology.of(context, self.plan.global_batch_size, self._max_rows)
