"""The public methods that tfdist changes in TensorFlow's synchronous strategies, for one worker and for many."""

import dataclasses
import functools
import itertools
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import call_stack, dataset_internals, keras_internals, keras_stack, tf_internals
from tfdist.errors import CompiledCollectivesError, ScopeError
from tfdist.strategies import auto_shard_policy, keras_calls, keras_steps, losses, metrics, predict_outputs
from tfdist.strategies import distributed_optimizer as optimizers
from tfdist.strategies.balanced_dataset import BalancedDataset, check_reads_no_sharding, made_by
from tfdist.strategies.compression_policy import check_opted_out_inside
from tfdist.strategies.compression_state import CompressionState
from tfdist.strategies.datasets import (
    DatasetOfEachWorker,
    FirstPass,
    NotedDataset,
    NotedDatasetsFromFunction,
    PeekableDataset,
    are_kept_on_host,
    owning_memory,
    untuned,
)
from tfdist.strategies.distributed_variables import optimizer_variables, variables_of
from tfdist.strategies.gradient_reducer import is_compiled
from tfdist.strategies.memory_report import MemoryReport
from tfdist.strategies.outside_scope import keep_watching, note_training
from tfdist.strategies.stand_in_rows import ExampleRow, ExampleRows, note_row, row_of
from tfdist.strategies.step import current_step
from tfdist.strategies.step_report import StepReports

_KERAS_PREDICT_STEP = "one_step_on_data"

_strategies_made = itertools.count()
_KEYS_PER_STRATEGY = 1 << 16


@dataclasses.dataclass
class StrategyUse:
    """Record of how the program has used a strategy. It outlives the strategy, so that it can be read afterwards."""

    began: bool = False  # Whether the program has entered the strategy's scope or reduced a value.


class ReplicatedStrategy:
    """The public methods of both strategies, as a mixin for TensorFlow's strategies."""

    extended: Any
    reports: StepReports
    elastic: Any = None
    """The `ElasticTraining` of a strategy that goes on without lost workers; else `None`."""
    _shardings: list[weakref.ref[Any]]
    _examples: ExampleRows
    _use: "StrategyUse"

    @tf_internals.unconverted
    def scope(self):
        """Returns the context in which models are made for this strategy; see `tf.distribute.Strategy.scope`."""
        self._use.began = True
        self._check_opted_out_inside()
        keep_watching()
        model = keras_stack.model_to_build()
        if model is None:
            return super().scope()
        keras_calls.note_call(self.reports.activity)
        self._compare_model(model)
        fit = keras_stack.beginning_fit()
        if fit is not None:
            if self.extended.local_training is not None:
                self.extended.local_training.check_model(model)
            self._begin_fit(model, fit)
        scope = keras_steps.building(model, super().scope())
        return keras_calls.building(self.reports.activity, model, scope, begins_fit=fit is not None)

    @tf_internals.unconverted
    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on each replica; see `tf.distribute.Strategy.run`.

        The `train_step` or `test_step` of a Keras model gives the result of one device. It sums gradients before it
        clips them, weights unequal shares by their rows, and averages logs over all replicas.

        Raises:
          CompiledCollectivesError: If XLA compiles the call or a collective in `fn`, and there are several replicas.
          ClusterError: If the chief alone calls `run`, in a `ChiefOnly` callback, and the cluster has other workers.
          RuntimeError: If the strategy compresses, and `run` is called inside `tfdist.compression.uncompressed`.
        """
        self._check_opted_out_inside()
        self.extended.check_in_company()
        self.extended.reducer.check_compiled()
        if not keras_stack.called_by_trainer():
            self.reports.activity.loops()
            if self.elastic is not None and not keras_stack.fitting_models():
                self.elastic.refuse_loop()
        args = () if args is None else args
        trainer, whole = keras_stack.calling_trainer(), args
        step = keras_steps.keras_step_of(fn, args, kwargs, trainer)
        if step is None:
            self._check_nobody_waits_for_steps(fn)
        elif self.num_replicas_in_sync == 1:
            if step.name == "train_step":
                self._check_owned(step.model, optimizer_variables(step.model))  # Weights may be made in any scope.
                self.reports.tells = not is_compiled()
            if is_compiled():
                self._check_nobody_waits_for_reports(step)
            else:
                fn = keras_steps.on_the_only(step, self.reports)
        else:
            self._check_scope(step)
            if step.name == "train_step":
                self.reports.tells = True
                note_training()
            if keras_stack.called_by_trainer():
                args = self._split_plain_batch(args, _among_devices)
            example = self._stand_in(step.model, whole, args)
            training = self.extended.local_training
            if training is not None and step.name == "train_step":
                with optimizers.viewed_optimizers(step.model, optimizers.distributed):
                    fn = keras_steps.on_local_replica(step, self.reports, example, training)
                    return super().run(fn, args, kwargs, options)
            views = optimizers.viewed_optimizers(step.model, optimizers.distributed)
            with views, losses.global_losses(step.model, step.is_plain), metrics.noted_results(step.model):
                return super().run(keras_steps.on_one_of_many(step, self.reports, example), args, kwargs, options)
        if self.num_replicas_in_sync > 1 and keras_stack.called_by_trainer() and fn.__name__ == _KERAS_PREDICT_STEP:
            args = self._split_plain_batch(args, _as_outputs_are_joined)
            example = self._stand_in(trainer, whole, args)
            fn = keras_steps.predict_step(fn, self.reports, example, keras_stack.spec_to_predict())
            keras_calls.note_functions(self.reports.activity, trainer)
        return super().run(fn, args, kwargs, options)

    def experimental_distribute_dataset(self, dataset, options=None):
        """Splits `dataset` among the replicas; see `tf.distribute.Strategy.experimental_distribute_dataset`.

        Raises:
          ValueError: If `dataset` reads from a called `tfdist.data.BalancedSharding`, and there are several workers; or
            if each worker reads its own rows (AutoShardPolicy.OFF, FILE or HINT) of a dataset for `predict`.
        """
        self.extended.check_in_company()
        if self.extended._num_workers > 1:
            check_reads_no_sharding(dataset)
        is_own = self.extended._num_workers > 1 and auto_shard_policy.is_own_of_each(dataset)
        if self.num_replicas_in_sync > 1:
            dataset = owning_memory(dataset)
        if self.elastic is not None:
            check_reads_no_sharding(dataset)
        if not keras_stack.called_by_trainer():
            return self._distributed_for_loop(dataset, options, is_own=is_own)
        if is_own and keras_stack.loop_to_distribute() == "predict":
            raise auto_shard_policy.unordered(dataset)
        comparison = None
        keras_calls.note_call(self.reports.activity)
        if keras_stack.made_dataset():
            dataset = untuned(dataset)
        if self.elastic is not None and keras_stack.purpose() == "fit":
            dataset = self.elastic.own_rows(dataset)
        if self.extended._num_workers > 1 and auto_shard_policy.is_read_by_all(dataset):
            epochs = keras_stack.epochs_to_distribute()
            self._compare_model(keras_stack.reader())
            self._check_batches(epochs, dataset)
            dataset = auto_shard_policy.alike_on_workers(dataset)
            comparison = self._compare_rows(dataset, epochs)
            row = ExampleRow()
            dataset = comparison.watch(dataset, functools.partial(note_row, row=row))
            self._examples.put(keras_stack.reader(), row)
        if is_own:
            dataset = auto_shard_policy.divided_one_by_one(dataset)
        if options is None and self.num_replicas_in_sync == 1 and are_kept_on_host(dataset):
            options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
        distributed = super().experimental_distribute_dataset(dataset, options)
        if self.reports.are_local and comparison is not None and auto_shard_policy.gives_all_replicas_a_part(dataset):
            dataset_internals.end_together(distributed)  # Otherwise workers would ask each other in each step.
        if is_own:
            batches = self._longest(auto_shard_policy.batches_of_own(dataset, self.extended._num_workers))
            auto_shard_policy.end_for_all(distributed, dataset, batches)
            keras_internals.count_steps_of(keras_stack.epochs_to_distribute(), distributed)
        if not keras_stack.is_evaluating():
            self.reports.feed(keras_stack.fitting_models(), None)
        return PeekableDataset(distributed, comparison, self._first_pass() if is_own else None)

    def _distributed_for_loop(self, dataset, options, *, is_own):
        """Splits `dataset` for a loop of the user. `is_own` tells whether each worker reads its own rows."""
        row = None
        if self.extended._num_workers > 1 and auto_shard_policy.is_split_by_rows(dataset):
            row = ExampleRow()
            dataset = self._compare_rows(dataset, None).watch(dataset, functools.partial(note_row, row=row))
        distributed = super().experimental_distribute_dataset(dataset, options)
        first_pass = self._first_pass(row)
        if is_own:
            return DatasetOfEachWorker(distributed, dataset, first_pass)
        return NotedDataset(distributed, first_pass)

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """Makes each worker's own dataset; see `tf.distribute.Strategy.distribute_datasets_from_function`.

        All workers must call this method, since they compare their numbers of batches. If these are unequal, all
        workers take as many steps as the longest dataset has batches. Workers without data left take part without rows.

        Args:
          dataset_fn: A function of a `tf.distribute.InputContext`, or a `tfdist.data.BalancedSharding`. A function may
            compose the datasets of several shardings, if it calls each with its own context. The workers' shares then
            stay as they are, the sharding's position counts epochs that were read, and `predict` reads in the order of
            training unless the function calls the shardings with `training=False`.
          options: As in TensorFlow.

        Raises:
          ValueError: If the function only calls a `BalancedSharding`, which should be passed itself, or calls a
            sharding without its context.
        """
        if not hasattr(dataset_fn, "attach"):
            if self.elastic is not None:
                dataset_fn = self.elastic.of_own_context(dataset_fn)
            dataset_fn = functools.partial(made_by, dataset_fn)
            made = super().distribute_datasets_from_function(dataset_fn, options)
            return NotedDatasetsFromFunction(made, self._first_pass())
        dataset_fn.attach(self.reports)
        of_job = None
        if self.elastic is not None:
            self.elastic.check_sharding(dataset_fn)
            of_job = self.elastic.input_context
        if not any(known is dataset_fn for known in self.shardings):
            self._shardings = [weakref.ref(sharding) for sharding in [*self.shardings, dataset_fn]]
        make = super().distribute_datasets_from_function
        return BalancedDataset(lambda function: make(function, options), dataset_fn, self._examples, of_job=of_job)

    @tf_internals.unconverted
    def reduce(self, reduce_op, value, axis):
        """Reduces `value` over all replicas; see `tf.distribute.Strategy.reduce`.

        Keras' `fit` also calls this method for two values that need no reduction: the shapes of the first batch, and
        logs that `run` has already averaged. For both it returns this worker's value, without traffic.
        """
        if axis is None and self.reports.is_reading and tf_internals.called_by_iterator():
            self.reports.agrees(value)
        if keras_stack.called_by_trainer():
            if axis is None:
                return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], value)
            local = self.experimental_local_results(value)[0]
            if keras_steps.is_float(local):
                return local
            axis = None
        self._use.began = True
        self.extended.check_in_company()
        with keras_calls.exchanging(self.reports.activity):
            return super().reduce(reduce_op, value, axis)

    @tf_internals.unconverted
    def gather(self, value, axis):
        """Gathers `value` from all replicas; see `tf.distribute.Strategy.gather`.

        Outputs of `predict` with another shape in each batch are gathered together with the shape of each row.
        """
        local = self.experimental_local_results(value)
        if isinstance(local[0], predict_outputs.PaddedRows):
            return predict_outputs.gathered(local, super().gather)
        with keras_calls.exchanging(self.reports.activity):
            return super().gather(value, axis)

    @property
    def num_replicas_in_sync(self):
        """The number of replicas; see `tf.distribute.Strategy.num_replicas_in_sync`.

        In a `train_step` or `test_step` of your own it is 1. Each loss there is the loss of one device on the rows of
        one replica, and tfdist weights its gradients by rows.
        """
        step = current_step()
        if step is None:
            return self.extended.replicas
        return step.shown_replicas(self, by_user=not call_stack.is_called_by_library())

    @property
    def shardings(self) -> list[Any]:
        """The distributed `BalancedSharding`s that the program still holds, in the order of their distribution."""
        return [sharding for known in self._shardings if (sharding := known()) is not None]

    @property
    def communication(self) -> CompressionState | None:
        """The states of codecs and the traffic of a strategy with `compression`; `None` for a strategy without."""
        return self.extended.communication

    def memory_report(self) -> MemoryReport:
        """Returns the bytes of memory that weights, gradients and optimizer state take on each replica.

        Counts the variables that were made in the scope and that the program still holds. `print` shows a table.
        """
        residuals = 0 if self.communication is None else self.communication.memory_bytes()
        training = self.extended.local_training
        copies = 0 if training is None else training.copied_bytes()
        return self.extended.made_variables.report(residuals // len(self.extended.worker_devices), copies)

    @tf_internals.unconverted
    def distributed_optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Returns a view of `optimizer` for custom loops that clip gradients or scale the loss.

        Keras clips each replica's gradients before they are summed, and `LossScaleOptimizer` checks the gradients of
        one replica only. In `strategy.run`, `strategy.distributed_optimizer(optimizer).apply(...)` sums first. Clipping
        then equals one device, and an Inf on one replica skips the step on all. `fit` uses such a view by itself.
        """
        return optimizers.distributed(optimizer)

    def synchronize(self):
        """Synchronizes all replicas now, if the strategy has `synchronization` and a step was run since the last time.

        `fit` calls it at the end of each epoch, and `evaluate` and `predict` begin with it. Custom loops call it before
        they save or evaluate. All workers must call it after the same step. It counts as a synchronization: the next
        one follows `every` steps later.

        Raises:
          ClusterError: If the chief alone calls it, in a `ChiefOnly` callback, and the cluster has other workers.
        """
        if self.elastic is not None:
            self.elastic.synchronize()
        training = self.extended.local_training
        if training is None:
            return
        self.extended.check_in_company()
        with self.extended.waiting_for_synchronization():
            self.reports.note_agreed(training.synchronize(super().run, self.reports.asks_to_stop()))

    def _check_opted_out_inside(self):
        if self.communication is not None:
            check_opted_out_inside()

    def _check_scope(self, step):
        of_metrics = [variable for metric in step.model.metrics for variable in metric.variables]
        self._check_owned(step.model, [*variables_of(step.model), *of_metrics])
        metrics.check_states(step.model)

    def _begin_fit(self, model, fit):
        """Compares the start of a `fit` on all workers: arguments, a model trained before, the position in the data."""

    def _compare_model(self, model):
        """Compares a model on all workers before its first use: layers, optimizer, losses, options."""

    def _longest(self, batches):
        """Returns the largest number of batches of any worker; negative if a worker's number is unknown or infinite."""
        return batches

    def _check_batches(self, epochs, dataset):
        """Compares the size of the data that all workers read, for epochs that Keras is about to begin."""

    def _compare_rows(self, dataset, epochs):
        """Returns a `RowComparison` of a dataset that all workers read, in `epochs` of Keras or in a custom loop."""

    def _check_owned(self, model, variables):
        for variable in variables:
            if getattr(variable.value, "distribute_strategy", None) is not self:
                raise ScopeError(
                    f"Model {model.name!r}, its optimizer and its metrics must be made inside `with "
                    f"strategy.scope():`, but the variable {variable.path!r} was not. Move the lines that build and "
                    "compile the model there."
                )

    def _split_plain_batch(self, args, place):
        """Splits a batch that Keras passes whole, as for `train_on_batch`.

        `place` maps (replica, number of replicas, replicas per worker) to a replica's (part, number of parts).
        """
        whole = tf.distribute.DistributedValues | tf.RaggedTensor | tf.SparseTensor
        replicas, devices = self.num_replicas_in_sync, len(self.extended.worker_devices)
        if place(0, replicas, devices)[1] == 1 or any(isinstance(leaf, whole) for leaf in tf.nest.flatten(args)):
            return args

        def part(leaf, context):
            number, parts = place(context.replica_id_in_sync_group, replicas, devices)
            rows = tf.shape(leaf)[0]
            return leaf[rows * number // parts : rows * (number + 1) // parts]

        def split(leaf):
            if leaf is None or tf.convert_to_tensor(leaf).shape.rank == 0:
                return leaf
            leaf = tf.convert_to_tensor(leaf)
            return self.experimental_distribute_values_from_function(lambda context: part(leaf, context))

        return tf.nest.map_structure(split, args)

    def _stand_in(self, model, whole, args):
        """Returns a function that gives a stand-in row to a replica without rows.

        `whole` are the arguments of the step as given, in `args` the batch of a `train_on_batch` and the like is split.
        """
        if args is not whole:
            return row_of(whole[0])
        noted = self._examples.of(model)
        if len(self.extended.worker_devices) == 1 or not args:
            return noted
        # If any replica of a worker has rows, its first replica has.
        first = tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], args[0])
        return row_of(first, noted)

    def _first_pass(self, row=None):
        """Returns a `FirstPass`, which stores a stand-in row as Keras reads a dataset; `None` without other workers."""
        return FirstPass(self._examples, row) if self.extended._num_workers > 1 else None

    def _make_reports(self):
        devices = self.extended.worker_devices
        self.reports = StepReports(devices, self.num_replicas_in_sync)
        self._shardings = []
        self._examples = ExampleRows()
        self._use = StrategyUse()

    def _take_collective_keys(self):
        """Takes keys for this strategy's collectives alone. All workers make their strategies in the same order."""
        self._collective_key_base = next(_strategies_made) * _KEYS_PER_STRATEGY

    def _check_nobody_waits_for_steps(self, fn):
        model = keras_stack.model_in_step()
        self.reports.tells &= model is None
        waits = None if model is None else self._waits_for_reports(model)
        if waits is not None:
            raise ValueError(
                f"{waits} needs a report of each training step, and only `model.train_step` makes reports, but "
                f"the strategy runs {getattr(fn, '__name__', fn)!r}. Override `train_step`, or let "
                "`make_train_function` call `strategy.run(self.train_step, args=(data,))`."
            )

    def _check_nobody_waits_for_reports(self, step):
        waits = self._waits_for_reports(step.model) if step.name == "train_step" else None
        if waits is not None:
            raise CompiledCollectivesError(
                f"{waits} needs a report of each training step, but jit_compile=True compiles the whole step, which "
                "then cannot report. Pass jit_compile=False to `compile`."
            )

    def _waits_for_reports(self, model):
        """The name of the feature that needs a report of each training step of a model, if any."""
        if model in self.reports.feeders:
            return "BalancedSharding"
        return None if self.elastic is None else "tolerate_lost_workers"


def _among_devices(replica, replicas, devices):
    """Returns a replica's (part, number of parts) of a batch that only its worker has."""
    del replicas
    return replica % devices, devices


def _as_outputs_are_joined(replica, replicas, devices):
    """Returns a replica's (part, number of parts) of a batch of all workers; outputs are joined by device first."""
    worker, device = divmod(replica, devices)
    return device * (replicas // devices) + worker, replicas
