"""Wraps step functions for replicas: counts rows, averages statistics and logs, and reports training steps."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals, tf_internals
from tfdist.errors import TfdistError
from tfdist.strategies import distributed_optimizer as optimizers
from tfdist.strategies import metrics, row_count
from tfdist.strategies import step as steps
from tfdist.strategies.collectives.buckets import Bucket, fill_buckets, join, separate
from tfdist.strategies.gradient_norms import GradientNorms
from tfdist.strategies.predict_outputs import of_shapes_in, only_rows, with_own_shapes
from tfdist.strategies.replica_context import StepContext
from tfdist.strategies.stand_in_rows import at_least_one_row
from tfdist.strategies.static_rows import trace_for_any_rows
from tfdist.strategies.step_clock import GRADIENTS

_KERAS_STEPS = ("train_step", "test_step")


class KerasStep(NamedTuple):
    """A `train_step` or `test_step` of a model, which a strategy is about to run on replicas."""

    name: str  # "train_step" or "test_step".
    model: keras.Model  # The model.
    function: Callable[[Any], Any]  # The Python function of the step, which takes a batch.
    is_plain: bool  # Whether the model overrides this step or `compute_loss`; see `Step.is_plain`.


@contextlib.contextmanager
def building(model: keras.Model, scope: Any) -> Iterator[None]:
    """The scope in which Keras builds a model before its first step, as far as possible.

    Keras calls the model, its metrics and its loss as its own `test_step` does, on tensors without values. This may
    fail if a model reads values (`run_eagerly=True`), behaves differently in training, or has a step of the user's.
    The first step then builds the model as on one device, or fails as on one device, on all workers alike.
    """
    unmatched = keras_internals.unmatched_compiled(model)
    with scope:
        try:
            yield
        except (TfdistError, tf.errors.OpError):
            raise
        except Exception as error:
            if not model.run_eagerly and all(steps.is_keras_own(model, name) for name in _KERAS_STEPS):
                logging.warning("Model %r is built in its first step, since it failed before: %s", model.name, error)
            keras_internals.match_anew(unmatched)


def keras_step_of(fn, args, kwargs, trainer):
    """The `KerasStep` of `fn`, which `trainer` calls or which is a method of a model; `None` for other functions."""
    model = getattr(fn, "__self__", trainer)
    if len(args) != 1 or kwargs or not isinstance(model, keras.Model) or not getattr(model, "compiled", False):
        return None
    name = next((name for name in _KERAS_STEPS if fn == getattr(model, name)), None)
    if name and isinstance(fn, tf_internals.Function):  # each replica traces the function separately
        fn = tf_internals.python_function_of(fn, model)
    if name is None:
        return None
    # Checked now, since the model has tfdist's `compute_loss` while the step is traced.
    is_plain = not all(steps.is_keras_own(model, each) for each in (name, "compute_loss"))
    return KerasStep(name, model, fn, is_plain)


def in_step(fn, args, kwargs, seed_generator):
    """Wraps `fn`, which replicas run, to run in a `Step`, unless it opens one. Distributed arguments may hold rows."""
    leaves = tf.nest.flatten((args, kwargs))
    parts = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.distribute.DistributedValues)]
    parts = [i for i in parts if not isinstance(leaves[i], tf.Variable)]

    @tf.autograph.experimental.do_not_convert
    def on_replica(*args, **kwargs):
        keras_internals.set_global_seed_generator(seed_generator)  # A replica may have a thread of its own.
        own = tf.nest.flatten((args, kwargs))
        with steps.running(row_count.any_rows([own[i] for i in parts])) as step:
            result = fn(*args, **kwargs)
            if step.trained is None:
                _average_statistics(step)
            else:
                step.trained.end_step(step, tf.zeros([]))
        return result

    return on_replica


def on_one_of_many(called, reports, example):
    """Wraps a `KerasStep` for several replicas: counts rows, averages statistics and logs, and reports training.

    The function `example` returns a stand-in row for a replica without rows.
    """
    name, model, fn, is_plain = called

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        around = tf.distribute.get_replica_context()
        with steps.running(row_count.count_rows(data), model, is_plain) as step, StepContext(around, step):
            local = step.replica
            if name != "train_step":
                reports.clock(local).evaluates(data)
                logs = fn(at_least_one_row(data, step.rows, example))
                reports.clock(local).has_evaluated(logs)
                return _average_statistics(step, metrics.global_results(model, logs, step))
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            step.clock = reports.clock(local)
            step.norms = GradientNorms() if model in reports.measured else None
            data = step.clock.begin(data)
            step.exchange_rows()
            data = at_least_one_row(data, step.rows, example)
            logs = trace_for_any_rows(step, fn, data) if is_plain else fn(data)
            step.mark(GRADIENTS, logs)  # In case no optimizer has marked its gradients.
            logs = metrics.global_results(model, logs, step)
            arrived = step.arrived
            # With several steps in one call, TensorFlow's iterator waits for the data of all workers.
            tells_before = bool(arrived) and model.steps_per_execution == 1
            rate = 0 if reports.rows_read is None else getattr(model.optimizer, "learning_rate", 0)
            norms = () if step.norms is None else step.norms.of_replica(replica)
            report = reports.of_replica(step.clock, replica, step.rows, tells_before, step.not_finite, rate, norms)
            logs, total = _average_statistics(step, logs, report)
            with tf.control_dependencies(arrived):  # Until then the step waits for other replicas.
                reports.tell(local, total, model)
            return logs

    return on_replica


def on_local_replica(called, reports, example, training):
    """Wraps a `train_step` for a replica that trains by local steps: counts rows, and synchronizes if it is due.

    Between two synchronizations replicas exchange nothing: logs are those of one replica, and reports of one worker.
    `training` is the strategy's `LocalTraining`.
    """
    _, model, fn, _ = called

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        around = tf.distribute.get_replica_context()
        # One replica is shown, so that losses are those of one device on the rows of this replica.
        with steps.running(row_count.count_rows(data), model, is_plain=True) as step, StepContext(around, step):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            step.clock = reports.clock(step.replica)
            data = step.clock.begin(data)
            logs = fn(at_least_one_row(data, step.rows, example))
            step.mark(GRADIENTS, logs)
            logs = tf.nest.map_structure(_as_tensor, logs)
            stops = training.of_step(step).end_step(step, reports.asks_to_stop())
            report = reports.of_replica(step.clock, replica, step.rows, not_finite=step.not_finite)
            if not reports.are_local:  # Replicas of one process exchange at no cost.
                report = step.all_reduce(tf.distribute.ReduceOp.SUM, report)
            reports.tell(step.replica, reports.agreed(report, stops), model)
            return logs

    return on_replica


def on_the_only(called, reports):
    """Wraps a `KerasStep` for the only replica: reports the step if it trains."""
    name, model, fn, _ = called

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        clock = reports.clock(0)
        if name != "train_step":
            clock.evaluates(data)
            return fn(data)
        data = clock.begin(data)
        with steps.running(None) as step, optimizers.viewed_optimizers(model, optimizers.noting):
            step.clock = clock
            logs = fn(data)
        noted = clock.trained(logs, model.trainable_variables)
        rows = row_count.count_rows(data)
        with tf.device(clock.host), tf.control_dependencies([noted]):  # A report on a GPU would be copied from there.
            reports.tell(0, reports.of_replica(clock, 0, rows), model)
        return logs

    return on_replica


def predict_step(fn, reports, example, spec):
    """Wraps Keras' step of `predict` for replicas that may have no rows, or outputs of different shapes.

    The function `example` returns a stand-in row. `spec` is the element spec of the dataset, if `predict` reads one.
    """

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        clock = reports.clock(tf_internals.get_current_replica_id_as_int())
        clock.evaluates(data)
        data = of_shapes_in(data, spec)
        rows = row_count.count_rows(data)
        outputs = only_rows(fn(at_least_one_row(data, rows, example)), rows)
        clock.has_evaluated(outputs)
        return with_own_shapes(outputs)

    return on_replica


def _average_statistics(step: steps.Step, logs: Any = None, report: tf.Tensor | None = None) -> Any:
    """Averages float logs and assigned layer statistics of a step by rows, and sums `report`, in one exchange.

    Returns the logs; with a report, the logs and the sum of all reports.
    """
    leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(logs)]
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    values = [statistic.read_value() for statistic in step.observed.statistics] + [leaves[i] for i in floats]
    averages, total = _averages(values, step, report)
    for statistic, average in zip(step.observed.statistics, averages, strict=False):
        statistic.values[step.replica].assign(average)
    for i, average in zip(floats, averages[len(step.observed.statistics) :], strict=True):
        leaves[i] = average
    logs = tf.nest.pack_sequence_as(logs, leaves)
    return logs if report is None else (logs, total)


def _averages(values: list[tf.Tensor], step: steps.Step, report: tf.Tensor | None) -> tuple[list[tf.Tensor], Any]:
    """Averages `values` over replicas, weighted by rows if the rows are known, and sums the reports."""
    if not values and report is None:
        return [], None
    weight = None if report is None else step.share
    if report is None and step.rows is not None:  # An evaluation has not exchanged rows before.
        weight = tf.cast(step.rows, tf.float32)
    # A sum of float16 may overflow. A replica without rows may compute an Inf or NaN from the row that stands in.
    wide = [tf.cast(value, tf.float32) if value.dtype.size < 4 else value for value in values]
    laid_out = _laid_out(wide)
    unweighted = vectors = [join(bucket, members) for _, members, buckets in laid_out for bucket in buckets]
    if weight is not None:
        vectors = [tf.math.multiply_no_nan(vector, tf.cast(weight, vector.dtype)) for vector in vectors]
    reports = [] if report is None else [report]
    weights = [weight] if report is None and weight is not None else []
    averages = list(step.all_reduce(tf.distribute.ReduceOp.MEAN, [*vectors, *reports, *weights]))
    if weights:
        mean = averages.pop()
        # If no replica has rows, all values stay unchanged.
        averages = [
            tf.where(mean > 0, tf.math.divide_no_nan(average, tf.cast(mean, average.dtype)), own)
            for average, own in zip(averages, unweighted, strict=True)
        ]
    total = averages.pop() * steps.replicas() if reports else None
    apart = list(wide)
    for group, members, buckets in laid_out:
        joined, averages = averages[: len(buckets)], averages[len(buckets) :]
        for i, average in zip(group, separate(buckets, joined, members), strict=True):
            apart[i] = average
    return [tf.cast(average, value.dtype) for average, value in zip(apart, values, strict=True)], total


def _laid_out(values: list[tf.Tensor]) -> list[tuple[list[int], list[tf.Tensor], list[Bucket]]]:
    """Groups logs and statistics by dtype: indices, values and their buckets, since many small operations are slow."""
    groups: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(value.dtype, []).append(i)
    members = [[values[i] for i in group] for group in groups.values()]
    return [
        (group, each, fill_buckets(each, sys.maxsize)) for group, each in zip(groups.values(), members, strict=True)
    ]


def _as_tensor(leaf: Any) -> Any:
    """Converts a log to a tensor: a variable to its value, a boolean to 1 or 0."""
    if isinstance(leaf, tf.Variable | keras.Variable):
        leaf = tf.convert_to_tensor(leaf)
    return tf.cast(leaf, tf.float32) if isinstance(leaf, tf.Tensor) and leaf.dtype == tf.bool else leaf


def is_float(leaf: Any) -> bool:
    """Whether a log is a tensor of floats, which replicas average."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
