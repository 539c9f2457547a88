"""Looks up rows of sharded tables, and sums gradients of rows on their owners: in steps, eager or not, and outside."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.eager_exchange import merged
from tfdist.strategies.sharding.repeated_rows import Detail
from tfdist.strategies.sharding.sharded_table import ShardedTable
from tfdist.strategies.sharding.table_exchange import TableExchange
from tfdist.strategies.step import Step


class TableReducer:
    """Exchanges rows of `ShardedTable`s between the replicas of a strategy.

    Args:
      collectives: The strategy's collectives.
    """

    def __init__(self, collectives: Collectives):
        self._exchange = TableExchange(collectives)

    def look_up(self, table: ShardedTable, ids: tf.Tensor, dtype: tf.DType, step: Step) -> tf.Tensor:
        """Returns rows of a table in a step: ids [n] -> [n, ...]. The gradient is that of a lookup in a whole table.

        Raises:
          ValueError: In a loop or a branch within the step, which may run unequally often on the replicas.
        """
        if step.in_loop or step.in_branch:
            raise ValueError(
                f"A ShardedEmbedding exchanges rows, so all replicas must call it equally often, but {table.path!r} is "
                "looked up in a tf.while_loop, a recurrent layer or a branch of tf.cond. Look up all ids before it."
            )
        shape = tf.constant(table.partition.shape, tf.int64 if ids.dtype == tf.int64 else tf.int32)
        look_up = functools.partial(self._look_up, table=table, dtype=dtype)

        @tf.custom_gradient
        def looked_up(handle):
            del handle  # Has the gradient.
            if tf.executing_eagerly():
                what = f"look up rows of {table.path!r}"
                rows = merged(step, what, functools.partial(_on_all_replicas, look_up), ids)
            else:
                rows = look_up(ids, replica=step.replica)

            def gradient(upstream):
                return tf.IndexedSlices(tf.cast(upstream, table.dtype), ids, shape)

            return rows, gradient

        part = table.values[step.replica]
        tf.gather(part, tf.zeros([0], tf.int32))  # So that gradient tapes watch the variable.
        rows = looked_up(part.handle)
        if tf.is_symbolic_tensor(rows):
            step.exchanges.results.add(rows.ref())
        return rows

    def to_owners(
        self, table: ShardedTable, gradient: tf.IndexedSlices, detail: Detail, step: Step
    ) -> tf.IndexedSlices:
        """Sums a table's gradient over all replicas, as far as `detail` allows. Returns that of this replica's part."""
        to_owners = functools.partial(self._exchange.to_owners, partition=table.partition, detail=detail)
        if not tf.executing_eagerly():
            return to_owners(gradient, replica=step.replica)

        def of_tensors(values, indices, replica):
            own = to_owners(tf.IndexedSlices(values, indices), replica=replica)
            return own.values, own.indices, own.dense_shape

        everywhere = functools.partial(_on_all_replicas, of_tensors)
        what = f"sum gradients of rows of {table.path!r}"
        return tf.IndexedSlices(*merged(step, what, everywhere, gradient.values, gradient.indices))

    def look_up_outside(self, table: ShardedTable, ids: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns rows of a table, eagerly and outside of a step. All workers must call this method, with any ids."""
        look_up = functools.partial(self._look_up, table=table, dtype=dtype)
        return _run_all(look_up, [(ids[:0] if i else ids,) for i in range(len(table.values))])[0]

    def _look_up(self, ids: tf.Tensor, *, table: ShardedTable, dtype: tf.DType, replica: int) -> tf.Tensor:
        def rows_of_part(rows: tf.Tensor) -> tf.Tensor:
            # Reads only these rows. A read of the variable would copy it after the first assignment of rows.
            handle = table.values[replica].handle
            return tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=table.dtype)

        return self._exchange.look_up(rows_of_part, ids, partition=table.partition, replica=replica, dtype=dtype)


def _on_all_replicas(function: Callable[..., Any], strategy: Any, *values: Any) -> Any:
    """Calls a function of tensors and a replica for all replicas of this worker, which have come together."""
    local = [strategy.experimental_local_results(strategy.extended.of_each_replica(value)) for value in values]
    return tf_internals.regroup(_run_all(function, list(zip(*local, strict=True))))


def _run_all(function: Callable[..., Any], everyone: list[Any]) -> Any:
    @tf.function(autograph=False)
    def run(everyone):
        return [function(*own, replica=replica) for replica, own in enumerate(everyone)]

    return run([list(own) for own in everyone])
