"""The global batches of a data set, split among replicas by their speed, as an input of `fit`."""

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _tf
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
_LEAD = 4  # Steps that reading may be ahead of training while shares change.
_STATE_CHARACTERS = 1000


class BalancedSharding(tf.train.experimental.PythonState):
    """Splits each global batch among the replicas so that all of them take equally long. A dataset function:

        train = strategy.distribute_datasets_from_function(
            tfdist.data.BalancedSharding((x, y), global_batch_size=1024, seed=0))
        model.fit(train, epochs=10)

    Global batch k of an epoch is the same set of examples, in the same order, for any number of workers, since it
    depends on the seed, the epoch, k and the batch size only; workers merely split it. Each example comes once in an
    epoch. Weights, losses and metrics are those of one device on the same global batches, whatever the shares. Under
    "speed" shares follow the clock, so two runs differ by rounding; under "equal" and fixed weights they have the same
    bits.

    It is at the same time what a checkpoint keeps of it, less than 1 KB: `tf.train.Checkpoint(data=sharding)`. After
    `restore`, on any number of workers, training continues with the next global batch that was not trained on; what was
    only read ahead does not count. That epoch then has fewer steps, of which Keras warns; under `steps_per_epoch` it
    has as many, and takes them from the next.

    In a custom loop, or under a strategy that is not of tfdist, nobody says what was trained on: shares stay as they
    are and the position counts whole epochs that were read, each when its last batch is taken; by TensorFlow's own
    strategies, and in a graph under a strategy, some batches ahead. So a loop in a graph that ends amid `repeat`ed
    epochs may leave workers an epoch apart, of which the next `fit` raises; batches that Python takes by `next` are
    counted as they are taken. Without a strategy call `sharding(training=False)` for `evaluate` and `predict`, which
    otherwise cannot be told from training.

    A call with a context gives what that worker reads, so one process can see what each of several would be given.
    Of several the position is that of the furthest. Once a strategy of tfdist trains on it, other calls only look at
    the epoch that training stands in, and move nothing.

    Costs a permutation of each batch, and little memory beside the batches that are read ahead;
    `benchmarks/balance.py` measures both.

    Args:
      source: NumPy arrays or eager tensors of equal first dimension, in tuples and dicts; a `tfdist.data.sources`
        object; paths of TFRecord or ArrayRecord files; a TFDS builder with a split, `(builder, "train")`; any object
        with `__len__` and `__getitem__`. See `tfdist.data.sources.as_source`.
      global_batch_size: Examples in a step, over all replicas.
      seed: Of the shuffle. Must be the same on all workers.
      shuffle: Whether each epoch has a new order, a permutation of the whole data set.
      block_size: Shuffles blocks of so many neighbours, and within each, for files that want sequential reads.
      stratify_by: A class for each example, [n]; every global batch and every share then has the proportions of all.
      map_fn: What to make of an example, as for `tf.data.Dataset.map`, in parallel. Unseeded random operations such as
        `tf.random.uniform` draw afresh in each epoch, on each worker and in each run, so they are not repeated after a
        restart; with a seed of their own they draw the same for each batch. For augmentation that repeats, take
        `tf.random.stateless_uniform` and the like with a seed made of what is in the example, or Keras' layers in the
        model.
      policy: "speed" measures the replicas and follows them; "equal" is equal shares; or fixed weights, one for each
        replica: where `tfdist run --min-workers` may start fewer workers, make them of the number that there is.
      max_rows: The most rows that a replica takes, one number or one for each replica. By default no limit.
      drop_remainder: Whether training leaves out a short last batch. `evaluate` and `predict` read it all the same; a
        model of one batch size is told `steps=len(source) // global_batch_size` there.
      repeat: Whether epochs follow each other without end, for `fit(steps_per_epoch=...)`.
      num_parallel_calls: Batches that are read and decoded at once; `tf.data.AUTOTUNE` for one on each core.
      service: The address of a tf.data service, such as "node0:5050", whose servers read, decode and map where that
        outgrows the workers; see `tfdist.data.service`. Batches are the same. They are asked for long before they are
        trained on, so shares cannot follow the clock: needs another policy than "speed".

    Attributes:
      source: What is read.
      plan: The global batches.
      visitors: Functions that take, after each step in `fit`, its epoch and the examples that this worker's replicas
        were trained on, int64 [rows]. Add them before the dataset is iterated over.

    Raises:
      ValueError: If an argument is out of range, or there are fewer examples in a global batch than replicas.
      TypeError: If `source` is nothing that can be read from, `map_fn` no function, or classes cannot be sorted.
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
        self._place: ReplicaTopology | None = None  # Where the strategy reads that it belongs to.
        self._reports: Any = None
        # Without such a strategy: where all begin, and the epochs before which all was read, by who reads.
        self._restored = (0, 0)
        self._epochs_read: dict[ReplicaTopology, int] = {}
        # For iterators from which nothing was read yet, those of training and those of evaluation.
        self._begun: dict[bool, list[BatchAssignment]] = {True: [], False: []}
        self._unreported: BatchAssignment | None = None
        self._times = StepTimes()
        self.visitors: list[Callable[[int, np.ndarray], None]] = []

    def __repr__(self) -> str:
        # Keras quotes it where `fit` is given the sharding itself.
        return (
            f"<BalancedSharding of {len(self.source)} examples: give Keras strategy.distribute_datasets_from_function("
            "sharding), or without a strategy sharding() to train and sharding(training=False) to evaluate and predict>"
        )

    @property
    def is_followed(self) -> bool:
        """Whether a strategy of tfdist says what is trained on, so that the position counts steps."""
        return self._reports is not None

    @property
    def reported_steps(self) -> int:
        """Training steps of that strategy, on whatever data."""
        latest = self._reports.latest if self.is_followed else None
        return latest.number if latest else 0

    # What a strategy calls.

    def attach(self, reports: Any) -> None:
        """Connects it to the step reports of the strategy that will call it.

        Raises:
          ValueError: If it belongs to another strategy already.
        """
        if self._reports is not None and self._reports is not reports:
            raise ValueError("A BalancedSharding belongs to one strategy. Make another one for this strategy.")
        self._reports = reports

    def for_strategy(self, context: tf.distribute.InputContext, *, training: bool) -> tf.data.Dataset:
        """This worker's dataset for the strategy that it is attached to, which calls `start` for each iterator.

        Raises:
          ValueError: As `__call__`.
        """
        place = self._place_of(context)
        with self._lock:
            self._place = place
            self._shares.settle(place)
        return self._dataset(place, training, is_started=True)

    def first_example(self) -> tf.data.Dataset | None:
        """One batch of one row, if some batch leaves a replica without rows; such a row stands in there."""
        place = self._place
        if place is None or self._fewest_rows >= place.replicas:
            return None
        return self._pipeline.first_example(place)

    def __call__(self, context: tf.distribute.InputContext | None = None, *, training: bool = True) -> tf.data.Dataset:
        """A worker's dataset: for each step the batches of its replicas, one after the other.

        Args:
          context: Who the worker is among how many; one replica if None.
          training: Whether to go on where training stands, instead of a whole epoch in the order of the source.

        Raises:
          ValueError: If arguments of the sharding do not fit so many replicas.
        """
        context = context or tf.distribute.InputContext()
        place = self._place_of(context)
        made = self._dataset(place, training, is_started=False)
        made.context = context  # A strategy compares it with that of the worker that reads.
        steps = self.cardinality if training else self.evaluation_steps
        # Of a whole epoch: one that is continued is shorter, where TensorFlow's own assertion would raise.
        counted = _tf.CountedDataset(made, steps * len(place.own) if steps > 0 else steps)
        counted.sharding, counted.context = made.sharding, context
        return counted

    def _dataset(self, place: ReplicaTopology, training: bool, is_started: bool) -> tf.data.Dataset:
        use = PipelineUse(place, training, is_started, has_rows=self._fewest_rows >= place.replicas)
        rows, has_read = max(self._shares.at(place)), functools.partial(weakly(self._has_read), place)
        made = finished(self._pipeline.dataset(use, rows, weakly(self._batches), has_read))
        made.sharding = self  # Kept by who reads from it.
        return made

    @property
    def cardinality(self) -> int:
        """Steps in a whole epoch, or `tf.data.INFINITE_CARDINALITY`."""
        return tf.data.INFINITE_CARDINALITY if self._repeat else self.plan.steps_per_epoch

    @property
    def evaluation_steps(self) -> int:
        """Steps in which an evaluation takes each example once."""
        return self._plan_of_evaluation.steps_per_epoch

    @property
    def _fewest_rows(self) -> int:
        """Of any batch."""
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
        """Begins to hand out to the iterator that is made next.

        Args:
          training: Whether to go on where training stands, instead of a whole epoch in the order of the source.
          models: Whose `fit` it is for, innermost first: the strategy reports what that is trained on.
          counts: If it is for none, whether what is read counts, once an epoch is over.
          goes_on: Whether training goes on with the next epoch at the end of one, as under `repeat`.
          is_seen: Whether `has_given` and `gives_unseen` say what is taken from the iterator. Else what was read for
            it counts, which is more.

        Raises:
          ValueError: If no dataset was made of it that calls this, as `for_strategy` does.
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

    # What the pipeline calls.

    def _batches(self, make: Make, use: PipelineUse) -> Iterator[tuple[Any, When]]:
        """What `make` makes of batches, of one or of several that stand alike, and when they stand."""
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
        """Of the iterators that nobody has read from, the newest: Keras makes some that it drops."""
        with self._lock:
            waiting = [handout for handout in self._begun[training] if not handout.closed]
            handout = waiting[-1] if waiting else self.start(training=training)
            self._begun[training] = waiting[:-1]
            return handout

    def _handout_apart(self, use: PipelineUse) -> BatchAssignment:
        """For whom no strategy of tfdist calls `start`."""
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
        """Takes note that all before `epoch` was read for an iterator."""
        with self._lock:
            handout.epoch_read = epoch
            self._count(handout)

    def has_given(self, handout: BatchAssignment) -> None:
        """Takes note that one more batch was taken from an iterator, by Python."""
        with self._lock:
            handout.given += 1
            self._count(handout)

    def gives_unseen(self, handout: BatchAssignment) -> None:
        """Takes note that from now on batches are taken by a graph, where nobody counts them."""
        with self._lock:
            handout.is_seen = False
            self._count(handout)

    def _count(self, handout: BatchAssignment) -> None:
        if handout is self._unreported and (epoch := handout.epoch_taken) > self._epoch:
            self._epoch, self._step = epoch, 0

    def _has_read(self, place: ReplicaTopology, epoch: np.ndarray) -> None:
        """Takes note that all before `epoch` was taken in some place."""
        with self._lock:
            if self.is_followed:
                return
            self._epochs_read[place] = max(int(epoch), self._epochs_read.get(place, 0))
            if epoch > self._epoch:
                self._epoch, self._step = int(epoch), 0

    # What training says.

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
            for visitor in list(self.visitors):  # One that is let go meanwhile takes itself out.
                visitor(epoch, examples)

    def statistics(self) -> Statistics | None:
        """How the last training step was shared; `None` before the first."""
        return self._times.statistics

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the step in it, that is trained on next."""
        return self._epoch, self._step

    # What a checkpoint keeps.

    def __reduce__(self) -> Any:
        raise TypeError(
            "A BalancedSharding cannot be copied or pickled, as a strategy moves its position. Make another of the "
            "same arguments; `other.deserialize(sharding.serialize())` has it begin there."
        )

    def serialize(self) -> str:
        """The position, shares and speeds as JSON."""
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
            state[learnt] = None  # So many replicas learn it anew.
        return text

    def check(self, string_value: str) -> None:
        """Checks that `deserialize` can continue there, and changes nothing.

        Raises:
          PositionError: If the state is of another source, seed or batch size.
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
        """Continues where `serialize` was called, on any number of replicas.

        Raises:
          PositionError: If the state is of another source, seed or batch size.
        """
        epoch, step, state = self._read(string_value)
        if step >= self.plan.steps_per_epoch:  # saved before a short last batch that is left out now
            epoch, step = epoch + 1, 0
        with self._lock:
            self._epoch, self._step = self._restored = epoch, step
            self._epochs_read.clear()
            self._shares.restore(state)
            if self._place is not None:
                self._shares.settle(self._place)

    def described(self) -> list[str]:
        """What all workers must have alike, else they would train on other examples than each other think."""
        alike = {**self._identity(), "policy": self._shares.policy, "max_rows": self._max_rows, "repeat": self._repeat}
        alike["drop_remainder"] = self.plan.drop_remainder
        return [f"{name} {value}" for name, value in alike.items()]

    def shown(self) -> list[str]:
        """The same as a reader wants it: where the examples come from, instead of their checksum."""
        of_source = f"source {self._fingerprint}"
        named = f"examples with the checksum {self._fingerprint} from {self.source.origin()}"
        return [named if each == of_source else each for each in self.described()]

    def described_state(self) -> list[str]:
        """What all workers must have alike when they begin to train."""
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

    # Who reads.

    def _place_of(self, context: tf.distribute.InputContext) -> ReplicaTopology:
        return ReplicaTopology.of(context, self.plan.global_batch_size, self._max_rows)
