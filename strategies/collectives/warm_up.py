"""The warm-up of a codec: gradients travel uncompressed until its `start_step`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.codec_parts import CodecPart
from tfdist.strategies.collectives.finite_sums import is_finite
from tfdist.strategies.collectives.sparse import all_reduce_sparse
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.compression import Codec

NO_TIME = np.zeros([2])  # Seconds of coding and of exchange.


def bytes_from_step(start_step: int, done: tf.Tensor, then: int, before: int) -> int | tf.Tensor:
    """Returns the bytes of a step: `then` from step `start_step` on, and `before` in earlier steps, int64 []."""
    if start_step == 0:
        return then
    return tf.where(done >= start_step, tf.constant(then, tf.int64), tf.constant(before, tf.int64))


def sum_from_step(
    part: CodecPart,
    done: tf.Tensor,
    gradients: Sequence[Gradient],
    states: Sequence[tf.Tensor],
    replica: int,
    collectives: Collectives,
    options: Any,
    timed: bool,
) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Sums the gradients of one codec over all replicas, uncompressed until the codec's `start_step`."""

    def encoded():
        watch = Stopwatch(collectives.device(replica), collectives.untouched(replica), timed)
        return *part.exchange(gradients, states, replica, collectives, options, watch), watch.seconds()

    def raw():
        sums = part.uncompressed(gradients, replica, collectives, options)
        return sums, list(states), tf.reduce_all([is_finite(total) for total in sums]), tf.constant(NO_TIME)

    return encoded() if part.codec.start_step == 0 else tf.cond(done >= part.codec.start_step, encoded, raw)


def sum_rows_from_step(
    codec: Codec,
    done: tf.Tensor,
    slices: tf.IndexedSlices,
    replica: int,
    collectives: Collectives,
    options: Any,
    timed: bool,
) -> tuple[tf.IndexedSlices, tf.Tensor]:
    """Exchanges the rows of a sparse gradient, uncompressed until the codec's `start_step`."""
    transport = collectives.among_all(replica)

    def encoded():
        watch = Stopwatch(collectives.device(replica), collectives.untouched(replica), timed)
        values = watch.timed(transport)
        joined = all_reduce_sparse(watch.begin(slices), values, options, codec, beside=transport)
        return tf.IndexedSlices(watch.end(joined.values), joined.indices, joined.dense_shape), watch.seconds()

    def raw():
        return all_reduce_sparse(slices, transport, options), tf.constant(NO_TIME)

    return encoded() if codec.start_step == 0 else tf.cond(done >= codec.start_step, encoded, raw)
