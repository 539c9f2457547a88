"""Gradients of sharded tables on their way to an optimizer: they travel to the replicas that have the rows."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.elementwise import is_elementwise
from tfdist.strategies.sharding.repeated_rows import Detail
from tfdist.strategies.sharding.sharded_state import ShardedState
from tfdist.strategies.sharding.sharded_table import ShardedTable
from tfdist.strategies.sharding.weight_part import tensorflow_variable

_OPTIMIZERS = keras.optimizers
# Optimizers whose updates depend on the sum of the rows of an id only, and those that also square each row.
_SUMMING = {_OPTIMIZERS.SGD.update_step, _OPTIMIZERS.Lion.update_step}
_SQUARING = {
    getattr(_OPTIMIZERS, name).update_step
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Ftrl", "Nadam", "RMSprop", "ScheduleFreeAdamW")
    if hasattr(_OPTIMIZERS, name)
}


def table_of(variable: Any) -> ShardedTable | None:
    """Returns the sharded table that a variable of Keras or TensorFlow is; else `None`."""
    value = tensorflow_variable(variable)
    return value if isinstance(value, ShardedTable) else None


def detail_for(optimizer: Any) -> Detail:
    """Returns what an optimizer must know of the rows of a sparse gradient with equal indices to update as in Keras."""
    update = type(optimizer).update_step
    if optimizer.gradient_accumulation_steps:  # Keras adds them to dense accumulators.
        return "sums"
    if optimizer.clipvalue:
        return "rows"
    if optimizer.clipnorm or optimizer.global_clipnorm:
        return "squares" if update in _SUMMING | _SQUARING else "rows"
    return "sums" if update in _SUMMING else "squares" if update in _SQUARING else "rows"


def at_owners(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], step: Any) -> list[Any]:
    """Replaces gradients of sharded tables, of this replica's rows of the batch, by those of its part of the tables."""
    results, tables = list(gradients), [table_of(each) for each in variables]
    for place, (gradient, table) in enumerate(zip(gradients, tables, strict=True)):
        if table is None:
            continue
        check_can_update_tables(optimizer, table)  # `fit` goes on if the optimizer's state could not be made before.
        if not isinstance(gradient, tf.IndexedSlices):
            raise ValueError(
                f"The gradient of the ShardedEmbedding {table.name!r} must come from lookups only, so that it is "
                f"sparse, but got {type(gradient).__name__}."
            )
        step.exchanges.count += 1
        detail = detail_for(optimizer)
        results[place] = tf.distribute.get_strategy().extended.tables.to_owners(table, gradient, detail, step)
        step.observed.summed_gradients.append(results[place])
    return results


def update_parts(table: ShardedTable, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Calls a function for each part of a table in this process, outside of a step, with parts of the arguments."""
    given = [tensorflow_variable(each) for each in arguments]
    results = []
    for replica, part in enumerate(table.values):
        with tf.device(part.device):
            own = [each.values[replica] if isinstance(each, ShardedState) else each for each in given]
            results.append(function(part, *own))
    return results


def check_can_update_tables(optimizer: Any, table: ShardedTable) -> None:
    """Refuses an optimizer that needs whole weights."""
    if not is_elementwise(optimizer):
        raise ValueError(
            f"An optimizer of a ShardedEmbedding must update each element by itself, but {optimizer.name!r} "
            f"needs the whole of {table.name!r}. Use another optimizer, such as Adam, or "
            "keras.optimizers.MultiOptimizer with another one for the embedding. A class of your own that updates each "
            "element by itself says so by the attribute `updates_elementwise = True`."
        )
