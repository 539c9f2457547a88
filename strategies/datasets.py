"""The distributed datasets that strategies give to Keras, and the options of their `tf.data` pipelines."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist._compat import dataset_internals, keras_stack
from tfdist.errors import ScopeError
from tfdist.strategies import keras_calls
from tfdist.strategies.batch_rows import count_rows
from tfdist.strategies.row_comparison import RowComparison
from tfdist.strategies.stand_in_rows import ExampleRow, ExampleRows, noting
from tfdist.strategies.tensor_origin import calls_python, reads_files

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
_READ_BY_ALL = AutoShardPolicy.AUTO, AutoShardPolicy.DATA


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` without the thread that tunes its parallelism.

    A signal tells that thread to end. A thread that wakes too quickly does not recognize the signal and sleeps on, for
    as long as the pipeline has lived or a minute, while `fit` waits. On two cores this happens in half of all cases.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def owning_memory(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` with batches that do not share memory with arrays of Python code.

    TensorFlow uses an array from Python code, such as a batch `y[8:16]` of a generator, without a copy. It splits the
    batch among replicas, and a replica may compute in the memory of its part. The user's array would then hold losses
    instead of labels. Costs a copy of each batch that Python code makes; none if TensorFlow makes the batches.
    """
    if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly():
        return dataset
    batch_size = tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset))
    if int(batch_size) > 0 or not calls_python(dataset):
        return dataset
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def copied(*batch):
        whole = batch if is_tuple else batch[0]
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.raw_ops.DeepCopy(x=leaf), whole, expand_composites=True
        )

    return dataset.map(copied)


def is_read_by_all(dataset: tf.data.Dataset) -> bool:
    """Whether each worker reads the whole dataset and keeps its rows of each batch: policy AUTO or DATA."""
    return _policy_of(dataset) in _READ_BY_ALL


def is_split_by_rows(dataset: tf.data.Dataset) -> bool:
    """Whether each worker of a custom loop reads the whole dataset and keeps its rows of each batch."""
    if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly():
        return False
    policy = _policy_of(dataset)
    return policy == AutoShardPolicy.DATA or (policy == AutoShardPolicy.AUTO and not reads_files(dataset))


def alike_on_workers(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` with options by which all workers read the whole dataset in the same order.

    By default TensorFlow gives each worker some of the files, if there are files. Global batches then differ from those
    of one device, and fewer files than workers are an error. Workers that read in different orders
    (`deterministic=False`) would take some rows twice and others never.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    options.deterministic = True
    return dataset.with_options(options)


def is_own_of_each(dataset: tf.data.Dataset) -> bool:
    """Whether each worker reads rows that its peers do not read: policy OFF, FILE or HINT."""
    return isinstance(dataset, tf.data.Dataset) and _policy_of(dataset) not in _READ_BY_ALL


def _policy_of(dataset):
    return dataset.options().experimental_distribute.auto_shard_policy


def divided_one_by_one(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` in a form that makes TensorFlow divide each batch separately.

    TensorFlow then takes as many steps for each batch as there are workers. Without the added `map`, it may join the
    rest of one batch with the next batch, and the number of steps is unknown.
    """
    is_tuple = type(dataset.element_spec) is tuple
    return dataset.map(tf.autograph.experimental.do_not_convert(lambda *batch: batch if is_tuple else batch[0]))


def batches_of_own(dataset: tf.data.Dataset, workers: int) -> int:
    """The number of batches that this worker takes of its own rows; negative if unknown or infinite.

    Under OFF a step takes a part of a batch, since batch_size counts the rows of all workers. TensorFlow assigns files
    to workers without telling how many rows a worker gets.

    Args:
      dataset: A result of `divided_one_by_one`, for which `is_own_of_each` is true.
      workers: Number of workers.
    """
    batches = int(dataset.cardinality())
    if _policy_of(dataset) == AutoShardPolicy.OFF:
        return batches * workers if batches > 0 else batches
    return tf.data.UNKNOWN_CARDINALITY


def end_for_all(distributed: Any, dataset: tf.data.Dataset, batches: int) -> None:
    """Makes Keras read a dataset with separate rows on each worker until no worker has rows left.

    Args:
      distributed: The distributed dataset.
      dataset: The dataset that was distributed.
      batches: The largest number of batches of a worker; see `batches_of_own`.
    """
    if _policy_of(dataset) == AutoShardPolicy.HINT:
        dataset_internals.end_when_all_have_ended(distributed)
    dataset_internals.set_cardinality(distributed, batches)


def unordered(dataset: tf.data.Dataset) -> ValueError:
    """The error for `predict` on a dataset with separate rows on each worker."""
    policy = _policy_of(dataset).name
    return ValueError(
        "`predict` returns rows in the order of the data, so all workers must read the same data, but under "
        f"AutoShardPolicy.{policy} each worker reads its own. Leave the policy out, or set AutoShardPolicy.DATA in the "
        "tf.data.Options of the dataset: each worker then predicts its part of each batch. Or call `model(x)` on each "
        "worker with its own rows."
    )


def made_by(dataset_fn: Callable[[Any], Any], context: tf.distribute.InputContext) -> Any:
    """Calls a dataset function, and checks that the dataset does not read a sharding without the strategy.

    Raises:
      ValueError: If the dataset is the result of a `BalancedSharding` call, or if a sharding was called with another
        context than `context`.
    """
    dataset = dataset_fn(context)
    read = [each for each in dataset_internals.datasets_read_by(dataset) if _is_of_sharding(each)]
    if any(each is dataset for each in read):
        raise ValueError(
            "A strategy must read a BalancedSharding itself, to know which rows are trained on, but the dataset "
            "function calls the sharding. Pass the sharding itself, without a function around it: "
            "strategy.distribute_datasets_from_function(sharding)."
        )
    if any(_who_reads(getattr(each, "context", None)) != _who_reads(context) for each in read):
        raise ValueError(
            "A dataset function must call a BalancedSharding with its own input context, but this one calls it without "
            "that context, so that each worker would read rows of its peers. Call `sharding(context)`; or pass the "
            "sharding itself: strategy.distribute_datasets_from_function(sharding)."
        )
    if read:
        logging.log_first_n(
            logging.WARN,
            "A dataset function composes datasets of a BalancedSharding, so the sharding cannot know which rows are "
            "trained on: shares stay as they are, its position counts epochs that were read, and `predict` reads in "
            "the order of training, unless it is called with training=False. If no other dataset is needed, pass the "
            "sharding itself: strategy.distribute_datasets_from_function(sharding).",
            1,
        )
    return dataset


def _is_of_sharding(dataset):
    return hasattr(getattr(dataset, "sharding", None), "for_strategy")


def _who_reads(context):
    return context and (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)


def check_reads_no_sharding(dataset: Any) -> None:
    """Refuses a dataset made by a call of a sharding, since its batches are not split among workers.

    Raises:
      ValueError: If `dataset` reads from a dataset of a sharding.
    """
    if any(map(_is_of_sharding, dataset_internals.datasets_read_by(dataset))):
        raise ValueError(
            "A strategy must read a BalancedSharding itself, but got a dataset that a call of the sharding made: each "
            "worker would read all of it. Give `fit`, `evaluate` and `predict` the result of "
            "strategy.distribute_datasets_from_function(sharding)."
        )


def _untuned_on_devices(iterator: Any, reads_at_once: bool = False) -> Any:
    """Removes the threads that tune the device parts of a new distributed iterator.

    Args:
      iterator: The new iterator.
      reads_at_once: Whether the iterator reads ahead from now on, instead of from the first step on.
    """

    def changed(dataset):
        options = tf.data.Options()
        options.experimental_warm_start = reads_at_once
        return untuned(dataset.with_options(options))

    if tf.executing_eagerly():  # No pipeline has anything to tune in these parts.
        dataset_internals.make_iterators_on_devices_anew(iterator, changed)
    return iterator


class FirstPass:
    """Notes a row for replicas without rows while Keras reads a distributed dataset for the first time.

    Later passes read the original dataset, since noting costs time in every batch. Endless datasets are not changed
    either, since no worker runs out of their rows.

    Args:
      examples: Keeps the row for the model that reads.
      row: The row, if the distributed dataset notes a row already.
    """

    def __init__(self, examples: ExampleRows, row: ExampleRow | None = None):
        self._examples, self._row, self._is_noted_before = examples, row or ExampleRow(), row is not None
        self._datasets: list[tf.data.Dataset] | None = None

    def begin(self, distributed: Any) -> None:
        """Prepares `distributed` for a new iterator. Does nothing in a custom loop, which needs no row."""
        model = keras_stack.reader()
        if model is None:
            return
        if not self._is_noted_before:
            if self._datasets is None:
                self._datasets = dataset_internals.datasets_of_worker(distributed)
            dataset_internals.set_datasets_of_worker(distributed, [self._noting(dataset) for dataset in self._datasets])
        self._examples.put(model, self._row)

    def _noting(self, dataset):
        is_wanted = self._row.tensors is None and int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY
        return noting(dataset, self._row) if is_wanted else dataset


class _Noted:
    """Mixin for TensorFlow's distributed datasets: notes which call of Keras reads the dataset, and when.

    Args:
      made: The dataset that this object replaces.
      first_pass: Notes a row, if there are other workers.
    """

    def __init__(self, made: Any, first_pass: FirstPass | None):
        self.__dict__.update(made.__dict__)
        self._first_pass = first_pass

    def __iter__(self):
        keras_calls.note_call(self._strategy.reports.activity)
        if self._first_pass is not None:
            self._first_pass.begin(self)
        return dataset_internals.NotedIterator(super().__iter__())


class NotedDataset(_Noted, dataset_internals.DistributedDataset):
    """A `_Noted` dataset made of a `tf.data.Dataset`."""


class DatasetOfEachWorker(NotedDataset):
    """A dataset that the user distributed, with separate rows on each worker. Keras reads it to the end.

    Args:
      distributed: The dataset as TensorFlow distributes it.
      dataset: The user's dataset.
      first_pass: Notes a row for replicas without rows.
    """

    def __init__(self, distributed: Any, dataset: tf.data.Dataset, first_pass: FirstPass | None):
        super().__init__(distributed, first_pass)
        self._given = dataset
        end_for_all(self, dataset, tf.data.UNKNOWN_CARDINALITY)

    def __iter__(self):
        if keras_stack.is_predicting():
            raise unordered(self._given)
        return super().__iter__()


class NotedDatasetsFromFunction(_Noted, dataset_internals.DistributedDatasetsFromFunction):
    """A `_Noted` dataset made of a dataset function."""


class PeekableDataset(tf.distribute.DistributedDataset):
    """A distributed dataset that `fit` can inspect without losing batches.

    Before the first step Keras takes one batch to learn its shapes, and drops it with the iterator and all batches that
    were prefetched. A generator would lose a different number on each worker. So Keras gets the specs instead.

    Args:
      dataset: TensorFlow's distributed dataset.
      comparison: Compares the first batch on all workers, if given.
      first_pass: Notes a row, if the comparison does not and there are other workers.
    """

    def __init__(
        self,
        dataset: tf.distribute.DistributedDataset,
        comparison: RowComparison | None = None,
        first_pass: FirstPass | None = None,
    ):
        self._dataset, self._comparison, self._first_pass = dataset, comparison, first_pass

    def __iter__(self):
        keras_calls.note_call(self._dataset._strategy.reports.activity)
        if keras_stack.is_peeking() and (specs := _specs_of_known_ranks(self)) is not None:
            return iter([specs])
        if self._first_pass is not None:
            self._first_pass.begin(self._dataset)
        if self._comparison is None:
            return dataset_internals.NotedIterator(_untuned_on_devices(iter(self._dataset)))
        if keras_stack.is_peeking():  # Keras drops the iterator before its end; until then it may read on.
            self._comparison.compare_no_more()
        with self._comparison.beginning() as is_first:
            iterator = dataset_internals.NotedIterator(_untuned_on_devices(iter(self._dataset), reads_at_once=is_first))
            self._comparison.begins(iterator)
        return iterator

    @property
    def element_spec(self):
        """The element spec of the wrapped dataset."""
        return self._dataset.element_spec


class BalancedDataset(dataset_internals.DistributedDatasetsFromFunction):
    """The distributed batches of a `BalancedSharding`, for training or evaluation. Keras can inspect it without loss.

    Args:
      distribute: The strategy's function that makes a distributed dataset of a dataset function.
      sharding: The sharding.
      examples: Keeps rows for replicas without rows.
      maps: Functions that `map` applies to each batch.

    Attributes:
      sharding: As given.
    """

    def __init__(
        self,
        distribute: Callable[[Any], Any],
        sharding: Any,
        examples: ExampleRows,
        maps: tuple[Callable[..., Any], ...] = (),
    ):
        self._distribute, self.sharding, self._examples, self._maps = distribute, sharding, examples, maps
        # Replaces the parent's `__init__`, which would build the dataset again.
        self.__dict__.update(self._made(training=True).__dict__)

    def __iter__(self):
        keras_calls.note_call(self._strategy.reports.activity)
        fitting, epochs = keras_stack.fitting_models(), keras_stack.epochs_of_iterator()
        if epochs and fitting and not keras_stack.is_evaluating():
            _check_strategy(fitting[0])
        if keras_stack.is_peeking() and (specs := _specs_of_known_ranks(self)) is not None:
            return iter([specs])
        training = not (epochs and keras_stack.is_evaluating())
        if epochs and self._example is not None:
            self._examples.put(keras_stack.reader(), self._example)
        if epochs:
            # Keras takes `steps_per_epoch` batches of an iterator, wherever in the epoch that iterator begins.
            goes_on = epochs.steps_per_epoch is not None
            assignment = self.sharding.assignments.start(training=training, models=fitting, goes_on=goes_on)
        else:  # a custom loop, or a read during `fit`, such as by a callback
            counts = not fitting
            assignment = self.sharding.assignments.start(training=True, counts=counts)
            assignment.is_seen = counts and tf.executing_eagerly()
        iterator = _untuned_on_devices(super().__iter__() if training else iter(self._for_evaluation))
        if assignment.is_seen:
            iterator = dataset_internals.CountingIterator(iterator, assignment.note_taken, assignment.note_unseen)
        else:
            iterator = dataset_internals.NotedIterator(iterator)
        weakref.finalize(iterator, assignment.close)  # Otherwise TensorFlow would wait for its next assignment.
        return iterator

    def map(self, fn: Callable[..., Any]) -> "BalancedDataset":
        """Applies `fn` to each batch, as in `tf.data.Dataset`. Keras calls it for `class_weight`.

        Raises:
          tf.errors.InvalidArgumentError: When the dataset is read, if `fn` changes the number of rows.
        """
        return BalancedDataset(self._distribute, self.sharding, self._examples, (*self._maps, fn))

    def prefetch(self, buffer_size: int) -> "BalancedDataset":
        """Returns the dataset itself, which reads ahead already."""
        del buffer_size
        return self

    @property
    def cardinality(self) -> int:
        """Number of steps in an epoch, of evaluation while Keras evaluates and otherwise of training."""
        return self.sharding.evaluation_steps if keras_stack.is_evaluating() else self.sharding.cardinality

    @functools.cached_property
    def _example(self) -> ExampleRow | None:
        """A row from the first example, if a batch may leave a replica without rows; otherwise `None`."""
        dataset = self.sharding.first_example()
        return None if dataset is None else ExampleRow.of(self._mapped(dataset).get_single_element())

    @functools.cached_property
    def _for_evaluation(self) -> Any:
        """A separate dataset, since iterators for evaluation exist beside those of training."""
        return self._made(training=False)

    def _made(self, *, training: bool) -> Any:
        return dataset_internals.end_together(self._distribute(functools.partial(self._make, training)))

    def _make(self, training: bool, context: tf.distribute.InputContext) -> tf.data.Dataset:
        return self._mapped(self.sharding.for_strategy(context, training=training))

    def _mapped(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        for fn in self._maps:
            dataset = dataset.map(_keeping_rows(fn))
        return dataset


def _keeping_rows(fn):
    """Adds a check to `fn` that it keeps the rows of a batch, since the sharding counts trained rows by them."""

    def mapped(*batch):
        result = fn(*batch)
        before, after = count_rows(batch), count_rows(result)
        if before is None or after is None:
            return result
        kept = tf.debugging.assert_equal(
            after,
            before,
            "A map of a BalancedSharding's batches must keep their number of rows, by which the sharding counts "
            "trained rows, but it changed the number. Make more or fewer examples of one in the source.",
        )
        with tf.control_dependencies([kept]):
            return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), result)

    return mapped


def _check_strategy(model):
    if not hasattr(model.distribute_strategy, "shardings"):
        raise ScopeError(
            f"Model {model.name!r} must be made inside `with strategy.scope():` to train on a BalancedSharding, but "
            "was made outside. Move the lines that build and compile the model there."
        )


def _specs_of_known_ranks(dataset: Any) -> Any:
    """Returns the specs of a replica's batch, with None for specs without a shape; or None if a rank is unknown."""
    specs = tf.nest.map_structure(dataset_internals.spec_on_a_replica, dataset.element_spec)
    specs = tf.nest.map_structure(lambda spec: spec if hasattr(spec, "shape") else None, specs)
    return specs if all(spec is None or spec.shape.rank is not None for spec in tf.nest.flatten(specs)) else None
