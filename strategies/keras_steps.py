"""Keras' own step functions, and any other, as replicas run them: rows counted, statistics and logs averaged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import _tf
from tfdist.strategies import metrics
from tfdist.strategies import optimizer as optimizers
from tfdist.strategies import step as steps
from tfdist.strategies.report import GRADIENTS

_KERAS_STEPS = ("train_step", "test_step")


class KerasStep(NamedTuple):
    """A step function of a model.

    Attributes:
      name: "train_step" or "test_step".
      model: Whose it is.
      function: What it does with a batch, in Python.
    """

    name: str
    model: keras.Model
    function: Callable[[Any], Any]


def keras_step_of(fn, args, kwargs, trainer):
    """What step `fn` is, whatever its own name, if Keras' `trainer` calls it, or it is a method; `None` if none."""
    model = getattr(fn, "__self__", trainer)
    if len(args) != 1 or kwargs or not isinstance(model, keras.Model) or not getattr(model, "compiled", False):
        return None
    name = next((name for name in _KERAS_STEPS if fn == getattr(model, name)), None)
    if name and isinstance(fn, _tf.Function):  # replicas trace it, each by itself
        fn = _tf.python_function_of(fn, model)
    return KerasStep(name, model, fn) if name else None


def in_step(fn, seed_generator):
    """`fn`, run in a `Step` of its own unless it has opened one."""

    @tf.autograph.experimental.do_not_convert
    def on_replica(*args, **kwargs):
        _tf.set_global_seed_generator(seed_generator)  # A replica may have a thread of its own.
        with steps.running(None) as step:
            result = fn(*args, **kwargs)
            _average_statistics(step)
        return result

    return on_replica


def on_one_of_many(called, reports):
    """A `KerasStep`, with rows counted, statistics and logs averaged, and reported if it trains."""
    name, model, fn = called

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        with steps.running(steps.count_rows(data), model) as step:
            if name != "train_step":
                logs = fn(steps.at_least_one_row(data, step.rows))
                return _average_statistics(step, metrics.global_results(model, logs, step))
            context = tf.distribute.get_replica_context()
            replica, local = context.replica_id_in_sync_group, _tf.get_current_replica_id_as_int()
            step.clock = reports.clock(local)
            data = step.clock.begin(data)
            step.exchange_rows()
            logs = fn(steps.at_least_one_row(data, step.rows))
            step.mark(GRADIENTS, logs)  # Where no optimizer has taken any.
            logs = metrics.global_results(model, logs, step)
            own = reports.of_replica(step.clock, replica, step.rows)
            logs, total = _average_statistics(step, (logs, own * reports.num_replicas))
            reports.tell(local, total, model)
            return logs

    return on_replica


def on_the_only(called, reports):
    """A `KerasStep` of the only replica, reported if it trains."""
    name, model, fn = called

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        if name != "train_step":
            return fn(data)
        clock = reports.clock(0)
        data = clock.begin(data)
        with steps.running(None) as step, optimizers.viewed_optimizers(model, optimizers.noting):
            step.clock = clock
            logs = fn(data)
        clock.mark(GRADIENTS, logs)  # Again: what is noted of one clock is noted in order.
        reports.tell(0, reports.of_replica(clock, 0, steps.count_rows(data)), model)
        return logs

    return on_replica


def predict_step(fn):
    """`fn`, Keras' step of `predict`, on replicas that may be left without rows."""

    @tf.autograph.experimental.do_not_convert
    def on_replica(data):
        rows = steps.count_rows(data)
        return steps.only_rows(fn(steps.at_least_one_row(data, rows)), rows)

    return on_replica


def _average_statistics(step: steps.Step, logs: Any = None) -> Any:
    """Averages the statistics that a step has assigned, weighted by rows, and float logs, in one exchange."""
    leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(logs)]
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    values = [_weighted(statistic.read_value(), step) for statistic in step.statistics]
    if not values and not floats:
        return tf.nest.pack_sequence_as(logs, leaves)
    values += [leaves[i] for i in floats]
    averages = step.all_reduce(tf.distribute.ReduceOp.MEAN, values)
    for statistic, average in zip(step.statistics, averages, strict=False):
        statistic.values[_tf.get_current_replica_id_as_int()].assign(average)
    for i, average in zip(floats, averages[len(step.statistics) :], strict=True):
        leaves[i] = average
    return tf.nest.pack_sequence_as(logs, leaves)


def _weighted(value: tf.Tensor, step: steps.Step) -> tf.Tensor:
    return value if step.share is None else value * tf.cast(step.share, value.dtype)


def _as_tensor(leaf: Any) -> Any:
    """What a log is worth: of a variable its value, of a truth 1 or 0."""
    if isinstance(leaf, tf.Variable | keras.Variable):
        leaf = tf.convert_to_tensor(leaf)
    return tf.cast(leaf, tf.float32) if isinstance(leaf, tf.Tensor) and leaf.dtype == tf.bool else leaf


def is_float(leaf: Any) -> bool:
    """Whether a log is a tensor of floats, which replicas average."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
