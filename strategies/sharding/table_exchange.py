"""Exchanges rows of tables whose rows are divided among replicas: lookups, and gradients that travel to the owners."""

from collections.abc import Callable

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.row_routes import RowRoutes
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.repeated_rows import Detail, rows_with, squares_of_each


class TableExchange:
    """Looks rows up on the replicas that have them, and sums gradients of rows there.

    All replicas call the same methods in the same order, each with ids of its own. A call sends the rows of the unique
    ids of a replica only.

    Args:
      collectives: The strategy's collectives.
    """

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._options = tf_internals.CommunicationOptions()

    def look_up(
        self,
        rows_of_part: Callable[[tf.Tensor], tf.Tensor],
        ids: tf.Tensor,
        *,
        partition: Partition,
        replica: int,
        dtype: tf.DType,
    ) -> tf.Tensor:
        """Returns rows of a table: ids [n] -> [n, ...] of type `dtype`, in which the rows travel.

        Args:
          rows_of_part: Returns rows of the part of the table that `replica` has: numbers of rows [k] -> [k, ...].
          ids: Numbers of rows, which may repeat.
          partition: How the table is divided.
          replica: Number of the replica within its worker.
          dtype: The type of the result.

        Raises:
          tf.errors.InvalidArgumentError: On all replicas, if an id of any replica is no row of the table.
        """
        with tf.device(self._collectives.device(replica)):
            wrong = _first_outside(ids, partition.rows)
            unique, place = tf.unique(tf.clip_by_value(ids, 0, partition.rows - 1))
            routes = self._routes(unique, partition, replica, note=wrong)
            with tf.control_dependencies([_check_all_inside(routes.notes, partition.rows)]):
                asked = routes.send(_rows_in_part(unique, partition))
            answers = routes.answer(tf.cast(rows_of_part(asked), dtype))
            return tf.gather(answers, place)

    def to_owners(
        self, slices: tf.IndexedSlices, *, partition: Partition, replica: int, detail: Detail
    ) -> tf.IndexedSlices:
        """Sends the rows of a table's gradient to their owners. Returns the gradient of this replica's part.

        The rows of the result are in the order of the replicas that sent them. They stay apart for each replica, and
        with "squares" have the sum and the sum of squares of the rows that the replica had.
        """
        with tf.device(self._collectives.device(replica)):
            if detail == "rows":
                routes = self._routes(slices.indices, partition, replica)
                values, rows = routes.send(slices.values), routes.send(_rows_in_part(slices.indices, partition))
            else:
                values, rows = self._sums_at_owners(slices, partition, replica, detail)
            return tf.IndexedSlices(values, rows, tf.constant(partition.part_shape, rows.dtype))

    def _sums_at_owners(self, slices, partition, replica, detail):
        unique, place, counts = tf.unique_with_counts(slices.indices)
        sums = tf.math.unsorted_segment_sum(slices.values, place, tf.size(unique))
        sums = tf.ensure_shape(sums, [None, *slices.values.shape[1:]])
        is_repeated = counts > 1 if detail == "squares" else None
        routes = self._routes(unique, partition, replica, leading=is_repeated)
        values, rows = routes.send(sums), routes.send(_rows_in_part(unique, partition))
        if is_repeated is None:
            return values, rows
        squares = routes.send_leading(squares_of_each(slices.values, place, tf.size(unique)))
        was_repeated = routes.received_is_leading()
        made, of = rows_with(tf.boolean_mask(values, was_repeated), squares)
        alone = ~was_repeated
        return (
            tf.concat([tf.boolean_mask(values, alone), made], axis=0),
            tf.concat([tf.boolean_mask(rows, alone), tf.gather(tf.boolean_mask(rows, was_repeated), of)], axis=0),
        )

    def _routes(self, ids, partition, replica, **given):
        """Returns the routes of ids to the replicas that have their rows."""
        # Ranks count the replicas of a worker together, shards count the workers first.
        replicas, worker = self._collectives.replicas, self._collectives.worker
        workers = partition.shards // replicas
        shard = tf.cast(ids % partition.shards, tf.int32)
        owners = shard % workers * replicas + shard // workers
        transport = self._collectives.among_all(replica)
        return RowRoutes(transport, worker * replicas + replica, owners, self._options, **given)


def _rows_in_part(ids, partition):
    return tf.cast(ids // partition.shards, tf.int32 if partition.part_shape[0] < tf.int32.max else tf.int64)


def _first_outside(ids: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns 0 if all ids are rows of a table; else an id that is none, encoded as a number that is not 0."""
    outside = tf.boolean_mask(tf.cast(ids, tf.int64), (ids < 0) | (ids >= rows))[:1]
    return tf.reduce_sum(tf.where(outside < 0, outside, outside + 1))


def _check_all_inside(notes: tf.Tensor, rows: int) -> tf.Tensor:
    """Fails, as Keras does, if the notes of any rank tell of an id that is no row."""
    wrong = tf.reduce_sum(tf.boolean_mask(notes, tf.not_equal(notes, 0))[:1])
    # Not `tf.debugging.Assert`: TensorFlow runs stateful operations one after another, also those of two replicas,
    # which would then wait for each other.
    return tf.cond(
        tf.equal(wrong, 0),
        lambda: True,
        lambda: tf.gather(tf.zeros([rows], tf.bool), tf.where(wrong < 0, wrong, wrong - 1)),
    )
