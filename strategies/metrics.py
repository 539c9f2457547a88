"""Metrics over the global batch in logs that Keras takes as a step returns them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.step import Step, current_step


@contextmanager
def noted_results(model: keras.Model) -> Iterator[None]:
    """Notes in each `Step` which metric of `model` gave which result, while a step is traced or run."""
    metrics = list(model.metrics)
    for metric in metrics:
        object.__setattr__(metric, "result", _noted(metric))
    try:
        yield
    finally:
        for metric in metrics:
            object.__delattr__(metric, "result")


def global_results(model: keras.Model, logs: Any, step: Step) -> Any:
    """`logs`, but results of metrics are those of all replicas' rows.

    At the end of an epoch Keras asks the metrics themselves, unless the step's logs have other keys than they: then it
    takes the last step's. Costs nothing in the first case, else an exchange of the metrics' variables.
    """
    if not isinstance(logs, dict) or logs.keys() == model.get_metrics_result().keys():
        return logs
    of_metrics: dict[int, dict[str, Any]] = {}

    def merged(leaf: Any) -> Any:
        found = next(((metric, path) for tensor, metric, path in step.results if tensor is leaf), None)
        if found is None:
            return leaf
        metric, path = found
        if id(metric) not in of_metrics:
            of_metrics[id(metric)] = _leaves(_merged_result(metric, step))
        return of_metrics[id(metric)][path]

    return keras.tree.map_structure(merged, logs)


def _noted(metric: keras.Metric) -> Any:
    result = metric.result

    def noted_result(*args: Any, **kwargs: Any) -> Any:
        value, step = result(*args, **kwargs), current_step()
        if step is not None:
            step.results += [(leaf, metric, path) for path, leaf in _leaves(value).items()]
        return value

    return noted_result


def _leaves(value: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf for path, leaf in keras.tree.flatten_with_path(value)}


def _merged_result(metric: keras.Metric, step: Step) -> Any:
    """The result of a metric whose variables are those of all replicas together."""
    values = [tf.convert_to_tensor(variable) for variable in metric.variables]
    sums = [i for i, variable in enumerate(metric.variables) if variable.aggregation == "sum"]
    totals = step.all_reduce(tf.distribute.ReduceOp.SUM, [values[i] for i in sums]) if sums else []
    for i, total in zip(sums, totals, strict=True):
        values[i] = total
    return metric.stateless_result(values)
