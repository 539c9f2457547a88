"""Replaces metrics of a replica, in the logs that a step returns, by metrics of the global batch."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.step import Step, current_step


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A result that a metric returned on this replica during a step."""

    metric: keras.Metric  # The metric.
    values: list[tf.Tensor]  # The values of the metric's variables when it returned the result.
    leaves: dict[str, Any]  # The tensors of the result, by their paths in it.


def check_states(model: keras.Model) -> None:
    """Raises a ValueError if a metric's variable was not made by `add_variable`: each worker would log its own."""
    for metric in [one for each in model.metrics for one in (each, *_compiled(each))]:
        held = [value for value in vars(metric).values() if isinstance(value, tf.Variable)]
        for variable in [*(variable.value for variable in metric.variables), *held]:
            if variable.synchronization != tf.VariableSynchronization.ON_READ:
                raise ValueError(
                    f"The variables of a metric must be summed over replicas when they are read, but the variable "
                    f"{variable.name!r} of metric {metric.name!r} is not, so workers would log different results. "
                    "Make it by `self.add_variable(shape, initializer)`, or use a NumPy array for a constant."
                )


def _compiled(metric: keras.Metric) -> list[keras.Metric]:
    """The metrics passed to `compile`, if `metric` is Keras' container for them."""
    return [each for each in getattr(metric, "metrics", ()) if isinstance(each, keras.Metric)]


@contextmanager
def noted_results(model: keras.Model) -> Iterator[None]:
    """Records the results of `model`'s metrics in the current `Step`, while a step is traced or run."""
    metrics = list({id(metric): metric for metric in model.metrics}.values())  # Keras lists some metrics twice.
    before = [vars(metric).get("result") for metric in metrics]
    for metric in metrics:
        object.__setattr__(metric, "result", _noted(metric))
    try:
        yield
    finally:
        for metric, own in zip(metrics, before, strict=True):
            if own is None:
                object.__delattr__(metric, "result")
            else:
                object.__setattr__(metric, "result", own)


def global_results(model: keras.Model, logs: Any, step: Step) -> Any:
    """Replaces results of metrics in a step's `logs` by the results over the rows of all replicas.

    At the end of an epoch Keras reads the metrics, unless their keys differ from those of the step's logs. Only then it
    reports the logs of the last step, so only then this function costs an exchange of the metrics' variables.
    """
    if not isinstance(logs, dict) or not step.observed.results or logs.keys() == model.get_metrics_result().keys():
        return logs
    merged: dict[int, dict[str, Any]] = {}

    def of_all(leaf: Any) -> Any:
        for result in step.observed.results:
            for place, own in result.leaves.items():
                if own is leaf:
                    if id(result) not in merged:
                        merged[id(result)] = _leaves(_merged(result, step))
                    return merged[id(result)][place]
        return leaf

    return keras.tree.map_structure(of_all, logs)


def _noted(metric: keras.Metric) -> Any:
    result = metric.result

    def noted_result(*args: Any, **kwargs: Any) -> Any:
        value, step = result(*args, **kwargs), current_step()
        if step is not None:
            variables = [tf.convert_to_tensor(variable) for variable in metric.variables]
            step.observed.results.append(Result(metric, variables, _leaves(value)))
        return value

    return noted_result


def _leaves(value: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf for path, leaf in keras.tree.flatten_with_path(value)}


def _merged(result: Result, step: Step) -> Any:
    """The result of the metric when its variables are summed over all replicas."""
    values, variables = list(result.values), result.metric.variables
    sums = [i for i, variable in enumerate(variables) if variable.aggregation == "sum"]
    totals = step.all_reduce(tf.distribute.ReduceOp.SUM, [values[i] for i in sums]) if sums else []
    for i, total in zip(sums, totals, strict=True):
        values[i] = total
    return result.metric.stateless_result(values)
