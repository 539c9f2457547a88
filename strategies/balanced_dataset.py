"""The distributed dataset of a `BalancedSharding`, and checks that a sharding is read through its strategy."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist._compat import dataset_internals, keras_internals, keras_stack
from tfdist.errors import ScopeError
from tfdist.strategies import keras_calls
from tfdist.strategies.datasets import specs_of_known_ranks, untuned_on_devices
from tfdist.strategies.row_count import count_rows
from tfdist.strategies.stand_in_rows import ExampleRow, ExampleRows


class BalancedDataset(dataset_internals.DistributedDatasetsFromFunction):
    """The distributed batches of a `BalancedSharding`, to train or evaluate. Keras can learn shapes without a batch.

    `distribute` makes a distributed dataset of a dataset function. `examples` keeps stand-in rows for replicas without
    rows. `maps` are applied to each batch. `of_job` returns the input context of training, if TensorFlow knows only a
    part of the workers; each worker then evaluates all rows, in equal shares.
    """

    def __init__(
        self,
        distribute: Callable[[Any], Any],
        sharding: Any,
        examples: ExampleRows,
        maps: tuple[Callable[..., Any], ...] = (),
        of_job: Callable[[tf.distribute.InputContext], tf.distribute.InputContext] | None = None,
    ):
        self._distribute, self.sharding, self._examples, self._maps = distribute, sharding, examples, maps
        self._of_job = of_job
        # Replaces the parent's `__init__`, which would build the dataset again.
        self.__dict__.update(self._made(training=True).__dict__)

    def __iter__(self):
        keras_calls.note_call(self._strategy.reports.activity)
        fitting, epochs = keras_stack.fitting_models(), keras_stack.epochs_of_iterator()
        if epochs and fitting and not keras_stack.is_evaluating():
            _check_strategy(fitting[0], self._strategy)
        if keras_stack.is_peeking() and (specs := specs_of_known_ranks(self)) is not None:
            return iter([specs])
        training = not (epochs and keras_stack.is_evaluating())
        evaluation = None if training else self._for_evaluation  # Made first, since `start` below needs its replicas.
        if epochs and self._example is not None:
            self._examples.put(keras_stack.reader(), self._example)
        if epochs:
            # Keras takes `steps_per_epoch` batches of an iterator, wherever in the epoch that iterator begins.
            goes_on = epochs.steps_per_epoch is not None
            if training and not goes_on and self.sharding.batch_size_range is not None:
                keras_internals.end_with_input(epochs)
            assignment = self.sharding.assignments.start(training=training, models=fitting, goes_on=goes_on)
        else:  # a custom loop, or a read during `fit`, such as by a callback
            counts = not fitting
            assignment = self.sharding.assignments.start(training=True, counts=counts)
            assignment.is_seen = counts and tf.executing_eagerly()
        iterator = untuned_on_devices(super().__iter__() if evaluation is None else iter(evaluation))
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
        return BalancedDataset(self._distribute, self.sharding, self._examples, (*self._maps, fn), self._of_job)

    def prefetch(self, buffer_size: int) -> "BalancedDataset":
        """Returns this dataset itself, which reads batches ahead already. Keras calls it."""
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
        """The distributed dataset for evaluation: a separate one, as its iterators exist beside those of training."""
        return self._made(training=False)

    def _made(self, *, training: bool) -> Any:
        return dataset_internals.end_together(self._distribute(functools.partial(self._make, training)))

    def _make(self, training: bool, context: tf.distribute.InputContext) -> tf.data.Dataset:
        is_alone = self._of_job is not None and not training
        if self._of_job is not None and training:
            context = self._of_job(context)
        return self._mapped(self.sharding.for_strategy(context, training=training, is_alone=is_alone))

    def _mapped(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        for fn in self._maps:
            dataset = dataset.map(_keeping_rows(fn))
        return dataset


def _keeping_rows(fn):
    """Adds a check to `fn` that it keeps the number of a batch's rows, by which the sharding counts trained rows."""

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


def _check_strategy(model, strategy):
    if not hasattr(model.distribute_strategy, "shardings"):
        raise ScopeError(
            f"Model {model.name!r} must be made inside `with strategy.scope():` to train on a BalancedSharding, but "
            "was made outside. Move the lines that build and compile the model there."
        )
    if model.distribute_strategy is not strategy:
        raise ScopeError(
            f"A model must train on a BalancedSharding that its own strategy has distributed, but model {model.name!r} "
            "was made in the scope of another strategy, so no report of its steps would reach the sharding. Make one "
            "strategy, build the model in its scope, and call its `distribute_datasets_from_function`."
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
    """Raises a ValueError if `dataset` was made by a call of a sharding: its batches are not split among workers."""
    if any(map(_is_of_sharding, dataset_internals.datasets_read_by(dataset))):
        raise ValueError(
            "A strategy must read a BalancedSharding itself, but got a dataset that a call of the sharding made: each "
            "worker would read all of it. Give `fit`, `evaluate` and `predict` the result of "
            "strategy.distribute_datasets_from_function(sharding)."
        )
