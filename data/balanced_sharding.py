"""Input of `fit` that splits the global batches of a data set among replicas by their speed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._compat import dataset_internals
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.example_order import chosen_order
from tfdist.data.iterator_assignments import IteratorAssignments
from tfdist.data.pipeline import Pipeline, finished
from tfdist.data.replica_shares import Shares
from tfdist.data.sharding_state import ShardingState
from tfdist.data.sources import Source, as_source
from tfdist.data.statistics import Statistics
from tfdist.data.topology import ReplicaTopology
from tfdist.data.validation import check_truth, checked_count, checked_whole
from tfdist.data.weak_callbacks import weakly
from tfdist.readable_numbers import counted


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
      policy: "speed" measures the replicas and adapts the shares to them, unless workers train by local steps; "equal"
        keeps shares equal; a list holds one fixed weight per replica. Its length must fit the replicas present, also
        under `tfdist run --min-workers`.
      batch_size_range: The smallest and the largest global batch size that `tfdist.callbacks.AdaptiveBatch` or `resize`
        may choose during training; training begins with `global_batch_size`. By default the size is constant. Keras
        then does not know how many steps an epoch has.
      max_rows: Largest number of rows per replica, one number or one per replica. No limit by default.
      drop_remainder: Whether training leaves out a short last batch. `evaluate` and `predict` still read it. For a
        model with a fixed batch size, give them `steps=len(source) // global_batch_size`.
      repeat: Whether epochs follow each other without end, for `fit(steps_per_epoch=...)`.
      num_parallel_calls: Number of batches read and decoded at the same time; `tf.data.AUTOTUNE` for one per core.
      service: Address of a tf.data service, such as "node0:5050". Its servers read, decode and map the examples if that
        is too much work for the workers; see `tfdist.data.service_client`. Batches stay the same. Workers request them
        long before training on them, so shares cannot follow the speed: use another policy than "speed".

    Attributes:
      source: The object that reads the examples.
      plan: The `BatchPlan`, which computes the examples of each global batch.
      assignments: The object that gives each iterator of a strategy its batches.
      state: The position, shares and settings as text, which a strategy saves and compares between workers.
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
        batch_size_range: tuple[int, int] | None = None,
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
        seed, self._repeat, self._max_rows = checked_whole("seed", seed), repeat, max_rows
        shares = Shares(policy, size)
        if service is not None and shares.follow_speed:
            raise ValueError(
                "A tf.data service gets requests for batches long before the batches are trained on, so it does not "
                'support policy="speed". Give policy="equal", or a weight for each replica.'
            )
        self._pipeline = Pipeline(self.source, map_fn, num_parallel_calls, service)
        order = chosen_order(len(self.source), seed, shuffle, block_size, stratify_by)
        self.plan = BatchPlan(len(self.source), size, order, drop_remainder)
        if not self.plan.steps_per_epoch:
            raise ValueError(
                f"drop_remainder=True drops all data ({counted(len(self.source), 'example')}), since "
                f"global_batch_size is {global_batch_size}. Use a smaller global_batch_size."
            )
        self.batch_size_range = _checked_range(batch_size_range, size, len(self.source), drop_remainder)
        resizes = self.batch_size_range is not None
        self.assignments = IteratorAssignments(self.plan, shares, repeat, resizes=resizes)
        self.visitors = self.assignments.visitors
        settings = {"policy": shares.policy, "max_rows": max_rows, "repeat": repeat, "drop_remainder": drop_remainder}
        if resizes:
            settings["batch_size_range"] = self.batch_size_range
        self.state = ShardingState(self.source, seed, self.assignments, settings)

    def __repr__(self) -> str:
        # Keras shows this text in its error if `fit` is given the sharding itself.
        return (
            f"<BalancedSharding of {counted(len(self.source), 'example')}: give Keras "
            "strategy.distribute_datasets_from_function(sharding), or without a strategy sharding() to train and "
            "sharding(training=False) to evaluate and predict>"
        )

    @property
    def is_followed(self) -> bool:
        """Whether a tfdist strategy reports the steps that `fit` trains, so that the position counts steps."""
        return self.assignments.reports is not None

    @property
    def reported_steps(self) -> int:
        """Number of training steps that the attached strategy has reported, on any data."""
        latest = self.assignments.reports.latest if self.is_followed else None
        return latest.number if latest else 0

    # The methods below are called by a strategy.

    def attach(self, reports: Any) -> None:
        """Connects the sharding to a strategy's reports of training steps, which move its position and shares.

        Raises:
          ValueError: If the sharding belongs to another strategy already.
        """
        if self.is_followed and self.assignments.reports is not reports:
            raise ValueError("A BalancedSharding belongs to one strategy. Make another one for this strategy.")
        self.assignments.reports = reports

    def for_strategy(
        self, context: tf.distribute.InputContext, *, training: bool, is_alone: bool = False
    ) -> tf.data.Dataset:
        """Returns this worker's dataset for the attached strategy.

        The strategy calls `assignments.start` for each iterator of it.

        Args:
          context: The number of the worker, and how many workers and replicas there are.
          training: Whether to continue at the position of training, instead of reading an epoch in stored order.
          is_alone: Whether this worker evaluates all rows by itself, in a job of more workers. Its replicas then get
            equal shares, since weights and `max_rows` are those of all replicas of the job.

        Raises:
          ValueError: If the arguments of the sharding do not fit the number of replicas.
        """
        place = self._place_of(context, is_alone=is_alone)
        with self.assignments.lock:
            if training or self.assignments.place is None:
                self.assignments.place = place
                self.assignments.shares.settle(place, self.assignments.sizes.present)
            if not training:
                self.assignments.evaluation_place = place
        return self._dataset(place, training, is_started=True)

    def first_example(self) -> tf.data.Dataset | None:
        """Returns one batch of one row, a stand-in for replicas without rows; None if all always have rows."""
        place = self.assignments.place
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
        begin = functools.partial(weakly(self.assignments.begin), place, training=training, is_started=is_started)
        counts = training and not is_started
        on_end = functools.partial(weakly(self.assignments.has_read), place) if counts else None
        rows, has_rows = max(self.assignments.shares.at(place)), self._fewest_rows >= place.replicas
        made = finished(self._pipeline.dataset(begin, place, rows, has_rows=has_rows, on_end=on_end))
        made.sharding = self  # A reader of the dataset thus keeps the sharding alive.
        return made

    @property
    def cardinality(self) -> int:
        """Number of steps in a whole epoch, for Keras.

        It is `tf.data.INFINITE_CARDINALITY` if epochs repeat, and `tf.data.UNKNOWN_CARDINALITY` if the size of batches
        may change.
        """
        if self._repeat:
            return tf.data.INFINITE_CARDINALITY
        return self.plan.steps_per_epoch if self.batch_size_range is None else tf.data.UNKNOWN_CARDINALITY

    @property
    def evaluation_steps(self) -> int:
        """Number of steps in which an evaluation reads each example once."""
        return self.plan.of_evaluation().steps_per_epoch

    @property
    def _fewest_rows(self) -> int:
        """Rows of the smallest global batch, to decide whether some replicas may get no rows."""
        if self.batch_size_range is not None:
            return 1
        return self.plan.of_evaluation().rows(self.evaluation_steps - 1)

    def statistics(self) -> Statistics | None:
        """Returns how the work of the last training step was shared among replicas; `None` before the first."""
        return self.assignments.times.statistics

    @property
    def position(self) -> tuple[int, int]:
        """The epoch to train on next, and the step in it."""
        with self.assignments.lock:
            return self.assignments.position.next

    @property
    def global_batch_size(self) -> int:
        """The size of the global batch to train on next."""
        with self.assignments.lock:
            return self.assignments.sizes.present

    @property
    def steps_of_epoch(self) -> int:
        """Number of steps of the epoch to train on next, trained ones included, if the batch size stays as it is."""
        with self.assignments.lock:
            _, step, first = self.assignments.position.place
            return step - (first - len(self.source)) // self.assignments.sizes.latest

    def resize(self, global_batch_size: int, *, multiple: int = 1) -> int:
        """Changes the size of the global batch during training. No example is left out or repeated.

        All workers must call it after the same step, such as at the end of an epoch, or in a listener of
        `strategy.reports`. Between epochs the change is immediate. Within an epoch a few more steps have the present
        size, since their batches are read already.

        Args:
          global_batch_size: The new size, within `batch_size_range`.
          multiple: The `steps_per_execution` of the model. All steps of an execution then have one size.

        Returns:
          Number of steps that are still trained with the present size.

        Raises:
          ValueError: If the sharding has no `batch_size_range`, or the size is outside of it.
        """
        size = checked_count("global_batch_size", global_batch_size)
        if self.batch_size_range is None:
            raise ValueError(
                "A BalancedSharding changes its global batch size only within batch_size_range, but this one has none. "
                "Make it with batch_size_range=(smallest, largest)."
            )
        low, high = self.batch_size_range
        if not low <= size <= high:
            raise ValueError(
                f"global_batch_size must be within batch_size_range, from {low} to {high}, got {size}. Choose such a "
                "size, or make the sharding with a larger range."
            )
        return self.assignments.resize(size, multiple)

    # The methods below save and restore the state.

    def __reduce__(self) -> Any:
        raise TypeError(
            "A BalancedSharding cannot be copied or pickled, since a strategy moves its position. Make another with "
            "the same arguments; `other.deserialize(sharding.serialize())` sets its position."
        )

    def serialize(self) -> str:
        """Returns the position in training, the shares of the replicas and their speeds as JSON, for a checkpoint."""
        return self.state.save()

    def check(self, string_value: str) -> None:
        """Checks that `deserialize` can restore what `serialize` returned, and changes nothing.

        Raises:
          PositionError: If it belongs to another source, seed, order or batch size, as `check` finds.
        """
        self.state.read(string_value)

    def deserialize(self, string_value: str) -> None:
        """Continues training at the position that `serialize` has saved, on any number of replicas.

        Raises:
          PositionError: If it belongs to another source, seed, order or batch size.
        """
        self.state.restore(string_value)

    def _place_of(self, context: tf.distribute.InputContext, *, is_alone: bool = False) -> ReplicaTopology:
        smallest, largest = self.batch_size_range or [self.plan.global_batch_size] * 2
        limits = None if is_alone else self._max_rows
        return dataclasses.replace(ReplicaTopology.of(context, smallest, limits, largest), is_alone=is_alone)


def _checked_range(sizes: Any, size: int, examples: int, drop_remainder: bool) -> tuple[int, int] | None:
    if sizes is None:
        return None
    try:
        low, high = (checked_count("batch_size_range", each) for each in sizes)
    except (TypeError, ValueError):
        low, high = 0, 0
    if not 1 <= low <= size <= high <= examples:
        raise ValueError(
            f"batch_size_range must hold the smallest and the largest global batch size, of which global_batch_size "
            f"({size}) is one between, and not be larger than the data ({counted(examples, 'example')}), got {sizes!r}."
        )
    if drop_remainder:
        raise ValueError(
            "drop_remainder=True is for models with a fixed batch size, but batch_size_range lets it change. Leave out "
            "one of them."
        )
    return low, high
