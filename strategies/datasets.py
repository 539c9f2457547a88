"""The distributed datasets that Keras and custom loops read, and changes to the pipelines behind them."""

import functools
from typing import Any

import tensorflow as tf

from tfdist._compat import dataset_internals, keras_stack
from tfdist.strategies import keras_calls
from tfdist.strategies.auto_shard_policy import end_for_all, unordered
from tfdist.strategies.row_comparison import RowComparison
from tfdist.strategies.stand_in_rows import ExampleRow, ExampleRows, noting
from tfdist.strategies.tensor_origin import calls_python


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` without the thread that tunes its parallelism, for whose end `fit` might wait.

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


def are_kept_on_host(dataset: tf.data.Dataset) -> bool:
    """Returns whether all tensors of a batch are int32, which operations on a GPU read from the memory of the host.

    TensorFlow would copy a batch that was fetched to a GPU back to the host in each step.
    """
    return {getattr(spec, "dtype", None) for spec in tf.nest.flatten(dataset.element_spec)} == {tf.int32}


def untuned_on_devices(iterator: Any, reads_at_once: bool = False) -> Any:
    """Removes the threads that tune the parallelism of a new distributed iterator's device parts; see `untuned`.

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
    """Stores a stand-in row for replicas without rows, while Keras reads a distributed dataset for the first time.

    Later passes read the original dataset, since storing costs time in every batch. Endless datasets are not changed
    either, since no worker runs out of their rows.

    Args:
      examples: Keeps the stand-in row for the model that reads the dataset.
      row: The stand-in row, if the distributed dataset stores one already.
    """

    def __init__(self, examples: ExampleRows, row: ExampleRow | None = None):
        self._examples, self._row, self._is_noted_before = examples, row or ExampleRow(), row is not None
        self._datasets: list[tf.data.Dataset] | None = None

    def begin(self, distributed: Any) -> None:
        """Makes `distributed` store a row, before a new iterator. Does nothing in a custom loop, which needs no row."""
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
      first_pass: Stores a stand-in row, if there are other workers.
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
    """A distributed `tf.data.Dataset` that records which call of Keras reads it, and when."""


class DatasetOfEachWorker(NotedDataset):
    """A dataset that the user distributed, with separate rows on each worker. Keras reads it to the end.

    Args:
      distributed: The dataset as TensorFlow distributes it.
      dataset: The user's dataset.
      first_pass: Stores a stand-in row for replicas without rows.
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
    """The distributed dataset of a dataset function, which records which call of Keras reads it, and when."""


class PeekableDataset(tf.distribute.DistributedDataset):
    """A distributed dataset that `fit` can inspect without losing batches.

    Before the first step Keras takes one batch to learn its shapes, and drops it with the iterator and all batches that
    were prefetched. A generator would lose a different number on each worker. So Keras gets the specs instead.

    Args:
      dataset: TensorFlow's distributed dataset.
      comparison: Compares the first batch on all workers, if given.
      first_pass: Stores a stand-in row, if the comparison does not and there are other workers.
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
        if keras_stack.is_peeking() and (specs := specs_of_known_ranks(self)) is not None:
            return iter([specs])
        if self._first_pass is not None:
            self._first_pass.begin(self._dataset)
        if self._comparison is None:
            return dataset_internals.NotedIterator(untuned_on_devices(iter(self._dataset)))
        if keras_stack.is_peeking():  # Keras drops the iterator before its end; until then it may read on.
            self._comparison.compare_no_more()
        with self._comparison.beginning() as is_first:
            iterator = dataset_internals.NotedIterator(untuned_on_devices(iter(self._dataset), reads_at_once=is_first))
            self._comparison.begins(iterator)
        strategy = self._dataset._strategy
        if self._comparison.counts_batches and (call := strategy.reports.activity.call) is not None:
            check = self._comparison.check_batches
            call.at_end.append(functools.partial(check, strategy.extended.of_all_workers))
        return iterator

    @property
    def element_spec(self):
        """The types and shapes of the tensors in a batch, as of the wrapped dataset."""
        return self._dataset.element_spec


def specs_of_known_ranks(dataset: Any) -> Any:
    """Returns the specs of a replica's batch, for Keras to inspect; or None if a rank is unknown.

    A spec without a shape becomes None.
    """
    specs = tf.nest.map_structure(dataset_internals.spec_on_a_replica, dataset.element_spec)
    specs = tf.nest.map_structure(lambda spec: spec if hasattr(spec, "shape") else None, specs)
    return specs if all(spec is None or spec.shape.rank is not None for spec in tf.nest.flatten(specs)) else None
