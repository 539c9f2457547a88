"""The table of an embedding, of which each replica has some of the rows."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.sharded_state import ShardedState, options_of_parts
from tfdist.strategies.sharding.table_initializer import TableInitializer
from tfdist.strategies.step import current_step

_REFUSAL = (
    "The rows of a ShardedEmbedding are divided among all replicas, so a step can look up rows by a call of the layer, "
    "but cannot {verb} the whole table {name!r}. {remedy}"
)


class ShardedTable(ShardedState):
    """The table of an embedding, whose rows are dealt out in turn to all replicas.

    Outside of steps it has the shape of the whole table: a read gathers the rows, which needs all workers, and an
    assignment gives each replica its rows. In a step only lookups and optimizers use the part of a replica.

    Attributes:
      partition: How the table is divided.
      path: Path of the table in Keras, for error messages.
    """

    partition: Partition
    path: str

    @classmethod
    def make_table(
        cls, next_creator: Any, kwargs: Mapping[str, Any], made: keras.Variable, initializer: TableInitializer
    ) -> "ShardedTable":
        """Makes a table and its initial values, a part on each replica of this worker, for a Keras variable."""
        strategy = tf.distribute.get_strategy()
        parts = strategy.extended.parts_of_all
        partition, dtype = Partition.of_table(tuple(made.shape), parts.shards), tf.as_dtype(kwargs["dtype"])
        given = options_of_parts(kwargs)
        values = []
        for replica, device in enumerate(strategy.extended.worker_devices):
            name = f"{kwargs.get('name')}/replica_{replica}/" if replica else kwargs.get("name")
            with tf.device(device):
                zeros = {"initial_value": lambda: tf.zeros(partition.part_shape, dtype), "name": name}
                values.append(next_creator(**{**given, **zeros}))
                initializer.fill(values[-1], partition, parts.shard_of(replica))
        table = cls(strategy, values, tf.VariableAggregation.NONE)
        table.weight, table.partition, table.path = None, partition, made.path
        return table

    def _get(self):
        self._check_outside("read", "To use all rows, as for tied weights or a penalty, take keras.layers.Embedding.")
        return super()._get()

    def _update_replica(self, update_fn, value, **kwargs):
        self._check_outside("assign", "Assign it outside of the step.")
        return super()._update_replica(update_fn, value, **kwargs)

    def _check_outside(self, verb: str, remedy: str) -> None:
        if current_step() is not None and tf.distribute.get_replica_context() is not None:
            raise ValueError(_REFUSAL.format(verb=verb, name=self.path, remedy=remedy))
