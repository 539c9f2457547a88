"""Sends rows of tensors to the ranks that own them, and sends answers back; ranks may have unequal numbers of rows."""

from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.transport import Transport


class RowRoutes:
    """The ways of a rank's rows to their owners and of the answers back, over any transport.

    The ranks first tell each other how many rows each sends to each. All messages are then as long as the longest
    between two ranks, since transports exchange tensors of equal shape.

    Args:
      transport: The transport of this rank.
      rank: The number of this rank.
      owners: The rank to which each row goes, int32 [rows].
      options: TensorFlow's `CommunicationOptions`.
      leading: Which rows come first in the message to their owner, bool [rows]; by default none. They can also be sent
        alone.
      note: A number for all ranks, int64 [].

    Attributes:
      notes: The notes of all ranks, int64 [ranks].
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        owners: tf.Tensor,
        options: Any,
        *,
        leading: tf.Tensor | None = None,
        note: Any = 0,
    ):
        self._transport, self._options, ranks = transport, options, transport.ranks
        behind = tf.ones_like(owners) if leading is None else 1 - tf.cast(leading, tf.int32)
        kinds = owners * 2 + behind
        # In linear time, unlike a sort.
        self._order = tf.concat(tf.dynamic_partition(tf.range(tf.size(kinds)), kinds, 2 * ranks), axis=0)
        counts = tf.math.bincount(kinds, minlength=2 * ranks, maxlength=2 * ranks, dtype=tf.int64)
        told = tf.concat([counts, tf.reshape(tf.cast(note, tf.int64), [1])], axis=0)
        everyone = transport.all_gather(told[None], options)  # [ranks, 2 * ranks + 1]
        self.notes = everyone[:, -1]
        table = tf.cast(tf.reshape(everyone[:, :-1], [ranks, ranks, 2]), tf.int32)  # [sender, owner, leading or not]
        totals = tf.reduce_sum(table, axis=2)
        self._totals = _Counts(totals[rank], totals[:, rank], tf.reduce_max(totals))
        first = table[:, :, 0]
        self._leading = _Counts(first[rank], first[:, rank], tf.reduce_max(first))
        self._is_leading = None if leading is None else tf.gather(leading, self._order)

    def send(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends each row to its owner: [rows, ...] -> rows for this rank, by senders in order, leading ones first."""
        totals = self._totals
        return self._exchange(tf.gather(rows, self._order), totals.sent, totals.received, totals.longest)

    def send_leading(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends the leading of all `rows` only, [rows, ...]; returns those for this rank, in the order of senders."""
        own, leading = tf.gather(rows, self._order), self._leading
        return self._exchange(tf.boolean_mask(own, self._is_leading), leading.sent, leading.received, leading.longest)

    def answer(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends a row back for each row that `send` returned; returns the answers in the order of this rank's rows."""
        totals = self._totals
        own = self._exchange(rows, totals.received, totals.sent, totals.longest)
        return tf.gather(own, tf.math.invert_permutation(self._order))

    def received_is_leading(self) -> tf.Tensor:
        """Returns which of the rows that `send` returns are leading rows of their sender, bool [received]."""
        totals = self._totals
        first = tf.sequence_mask(self._leading.received, totals.longest)
        return tf.boolean_mask(first, tf.sequence_mask(totals.received, totals.longest))

    def _exchange(self, rows, sent, received, longest):
        """Sends consecutive rows, `sent[j]` of them to rank j; `received[i]` rows come from rank i."""
        ranks = self._transport.ranks
        owner = tf.repeat(tf.range(ranks), sent)
        places = owner * longest + tf.range(tf.size(owner)) - tf.gather(tf.cumsum(sent, exclusive=True), owner)
        shape = tf.concat([[ranks * longest], tf.shape(rows)[1:]], axis=0)
        padded = tf.reshape(tf.scatter_nd(places[:, None], rows, shape), [ranks, longest, *rows.shape[1:]])
        arrived = self._transport.all_to_all(padded, self._options)
        return tf.ensure_shape(tf.boolean_mask(arrived, tf.sequence_mask(received, longest)), [None, *rows.shape[1:]])


class _Counts:
    """Numbers of rows that a rank sends to each rank, that it receives from each, and the largest between any two."""

    def __init__(self, sent, received, longest):
        # Not zero, since collectives cannot send nothing.
        self.sent, self.received, self.longest = sent, received, tf.maximum(longest, 1)
