"""An embedding whose rows are divided among all replicas, so that its table may be larger than a worker's memory."""

from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.strategies.sharding.sharded_table import ShardedTable
from tfdist.strategies.sharding.table_initializer import TableInitializer
from tfdist.strategies.sharding.table_update import table_of
from tfdist.strategies.step import current_step


@keras.saving.register_keras_serializable("tfdist")
class ShardedEmbedding(keras.layers.Embedding):
    """`keras.layers.Embedding` with a table whose rows, and their optimizer state, are divided among all replicas.

    Each of R replicas has every R-th row. In a step it gets the rows of its ids from their owners, each row once, and
    sends their gradients back. So a step takes memory and traffic for the ids of the batch, not for the table. The
    results are those of `keras.layers.Embedding` on one device. Without a strategy, and on one replica, it is a plain
    `keras.layers.Embedding`.

    A lookup takes an exchange of counts, one of ids and one of rows; an update takes three or four exchanges for each
    table.

    Works in `fit`, `evaluate`, `predict`, custom steps and custom loops, if the optimizer is one of those that update
    each element by itself, such as SGD, Adam or Adagrad. A custom loop applies gradients by
    `strategy.distributed_optimizer(optimizer)`. All workers must take part when a model with this layer is saved, or is
    called outside of a step. Files have the form of a plain `Embedding`.

    Args:
      input_dim: Number of rows.
      output_dim: Length of a row.
      embeddings_initializer: As in Keras. Tables of more than 64 MiB are drawn in blocks of rows, with a seed for each
        block. So values do not depend on the number of replicas, but differ from those of a plain `Embedding`.
      embeddings_regularizer: On several replicas, must be `None`.
      embeddings_constraint: On several replicas, must be `None`.
      mask_zero: As in Keras.
      weights: As in Keras.
      **kwargs: Other arguments of `keras.layers.Embedding`, and of layers. `lora_rank` and quantization are for one
        replica.

    Raises:
      ValueError: If several replicas are given an argument that needs the whole table, or sparse ids, or if
        `cross_device_ops` of their strategy do not reduce by collectives.
      tf.errors.InvalidArgumentError: In a step, on all replicas, if an id is no row of the table.

    References:
      Ivchenko et al., TorchRec: a PyTorch Domain Library for Recommendation Systems, 2022.
    """

    divides_rows = True
    """Tells `tfdist.estimate_memory` that a replica has a part of the rows only."""

    def build(self, input_shape: Any = None) -> None:
        """Makes the table."""
        extended = tf.distribute.get_strategy().extended
        if getattr(extended, "tables", None) is not None:
            self._check_arguments()
        elif getattr(extended, "replicas", 1) > 1:
            raise ValueError(
                f"The ShardedEmbedding {self.name!r} exchanges rows by collectives, but cross_device_ops is "
                f"{extended.cross_device_ops_name}. Leave cross_device_ops out, or use keras.layers.Embedding."
            )
        super().build(input_shape)

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a weight. The table gets its initial values in blocks of rows."""
        if kwargs.get("name") == "embeddings" and "initializer" in kwargs:
            kwargs["initializer"] = TableInitializer(kwargs["initializer"])
        return super().add_weight(*args, **kwargs)

    def call(self, inputs: Any) -> Any:
        """Looks up ids: [...] -> [..., output_dim]."""
        if keras_internals.in_stateless_scope() and self._is_sharded_or_unmade():
            return self._zeros(inputs)
        table = table_of(keras_internals.table_variable(self))
        if table is None:
            return super().call(inputs)
        self._check_arguments()
        if isinstance(inputs, tf.SparseTensor):
            raise ValueError(
                f"The ids of a ShardedEmbedding on several replicas must be dense or ragged, but {self.name!r} got a "
                "SparseTensor. Convert it by `tf.sparse.to_dense`, which Keras does as well: missing ids are 0."
            )
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._rows(table, inputs.flat_values))
        return self._rows(table, tf.convert_to_tensor(inputs))

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """As in Keras, on one replica.

        Raises:
          ValueError: On several replicas.
        """
        if self.built and table_of(keras_internals.table_variable(self)) is not None:
            self._refuse("lora_rank", "has")
        super().enable_lora(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """As in Keras, on one replica.

        Raises:
          ValueError: On several replicas.
        """
        if self.built and table_of(keras_internals.table_variable(self)) is not None:
            self._refuse("quantization", "has")
        super().quantize(*args, **kwargs)

    def _rows(self, table: ShardedTable, ids: tf.Tensor) -> tf.Tensor:
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int32)
        flat = tf.reshape(ids, [-1])
        flat = tf.where(flat < 0, flat + self.input_dim, flat)  # As Keras does.
        dtype, step = tf.as_dtype(self.compute_dtype), current_step()
        extended = table.distribute_strategy.extended
        if step is not None and tf.distribute.get_replica_context() is not None:
            rows = extended.tables.look_up(table, flat, dtype, step)
        elif tf.executing_eagerly():
            rows = extended.looked_up(table, flat, dtype)
        else:
            raise ValueError(
                "The rows of a ShardedEmbedding are divided among all replicas, so a graph can look them up in "
                f"`strategy.run` only, but {self.name!r} is called in another tf.function, as for `export`. Save the "
                "model, load it without a strategy, and call or export it there."
            )
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self.output_dim]], axis=0))
        return tf.ensure_shape(rows, [*ids.shape, self.output_dim])

    def _is_sharded_or_unmade(self) -> bool:
        made = keras_internals.made_value(keras_internals.table_variable(self))
        return made is None or isinstance(made, ShardedTable)

    def _zeros(self, inputs: Any) -> Any:
        """Returns the output for a model that is traced for its shapes only."""

        def of(ids: tf.Tensor) -> tf.Tensor:
            zeros = tf.zeros(tf.concat([tf.shape(ids), [self.output_dim]], axis=0), self.compute_dtype)
            return tf.ensure_shape(zeros, [*ids.shape, self.output_dim])

        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(of(inputs.flat_values))
        return of(inputs)

    def _check_arguments(self) -> None:
        """Refuses arguments that need the whole table."""
        for name in ("embeddings_regularizer", "embeddings_constraint", "lora_rank", "quantization_mode"):
            if getattr(self, name, None):
                self._refuse(name, "got")

    def _refuse(self, name: str, verb: str) -> None:
        raise ValueError(
            f"Each replica has some rows of the table of a ShardedEmbedding, but {self.name!r} {verb} {name}, which "
            "needs all of them. Leave it out, or use keras.layers.Embedding. `weight_decay` of an optimizer works."
        )
