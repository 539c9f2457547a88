"""Sums the gradients of one optimizer over all replicas, encoded by codecs; holds their states and traffic."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.codec_group import CodecGroup
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.power_sgd_group import PowerSGDGroup
from tfdist.strategies.collectives.sparse import all_reduce_sparse, sparse_row_bytes
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.compression import Codec, PowerSGD, WordCodec
from tfdist.strategies.sharding.part_codec_group import PartCodecGroup
from tfdist.strategies.sharding.part_reducer import PartReducer
from tfdist.strategies.sharding.partition import Partition

# Counts of a replica since the strategy was made: exchanges, bytes that would be sent uncompressed, bytes sent. If
# workers have several devices, only bytes across the network count.
STEPS, RAW_BYTES, SENT_BYTES = range(3)
_NO_TIME = np.zeros([2])


class Times:
    """Total seconds of coding and exchange, by replica of this worker, in an object that checkpoints do not track."""

    def __init__(self):
        self.of_replicas: list[tf.Variable] = []


class Layout(tf.train.experimental.PythonState):
    """Saves in checkpoints which codec states an `EncodedReducer` has, and refuses checkpoints of other states.

    TensorFlow would restore the variables that fit and ignore the rest, without a message.
    """

    refusal: str | None = None  # The error message for the last restored checkpoint, unless it was accepted.

    def __init__(self, replicas: int, worker: int, shapes: Any):
        self._own = {"replicas": replicas, "worker": worker, "shapes": shapes}

    def serialize(self) -> str:
        """Returns the layout of the codec states (replicas, worker, shapes) as JSON, for the checkpoint."""
        return json.dumps(self._own)

    def deserialize(self, saved: Any) -> None:
        """Raises a ValueError if the layout of codec states in a checkpoint differs from that in this process."""
        there, here = json.loads(saved), json.loads(self.serialize())
        self.refusal = None if there == here else self._refusal_of(there, here)
        self.check()

    def check(self) -> None:
        """Raises a ValueError if the last restored checkpoint was refused, for callers that caught the first error."""
        if self.refusal is not None:
            raise ValueError(self.refusal)

    def _refusal_of(self, there: dict[str, Any], here: dict[str, Any]) -> str:
        unlike = [
            f"{there[key]} {name}" if key != "worker" else f"worker {there[key]}"
            for key, name in (("replicas", "replicas"), ("worker", ""))
            if there[key] != here[key]
        ]
        return (
            "A checkpoint of `strategy.communication` holds the residuals of each replica, so only the same worker can "
            "restore it, with as many replicas and the same compression. This checkpoint is of "
            f"{' and '.join(unlike) or 'other gradients or codecs'}; this process is worker {here['worker']} of a job "
            f"with {here['replicas']} replicas. Save `communication.state()` of every worker and pass all of them to "
            "`communication.redistribute(states)`, which takes any number of replicas; or leave `communication` out of "
            "the checkpoint, and lose the residuals."
        )


class EncodedReducer(tf.Module):
    """Sums the gradients of one optimizer over all replicas, in each step.

    Args:
      gradients: The gradients of the first step. Gradients of later steps have the same shapes and dtypes.
      codecs: The codec of each gradient, or None to leave it uncompressed.
      collectives: The strategy's collectives.
      seed: Seed of the codecs' random numbers, equal on all workers and in each run of a program.
      timed: Whether to measure the time of each step; see `Stopwatch`.
      partitions: How each gradient is divided among the replicas, which get their part of the sum; `None` for a whole
        sum. Empty if none is divided.

    Attributes:
      in_parts: Positions of the gradients of which a replica gets its part. The sums of the others are whole.
      is_timed: Whether the time of each step is measured.
      encodes: Whether any gradient travels encoded.
      dense_codecs: The codecs of the encoded dense gradients.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        codecs: Sequence[Codec | None],
        collectives: Collectives,
        seed: int,
        timed: bool = False,
        partitions: Sequence[Any] = (),
    ):
        super().__init__(name="exchange")
        self._collectives, self.is_timed = collectives, timed
        self._partitions = list(partitions) or [None] * len(gradients)
        parts = _parts(gradients, codecs, collectives, seed, self._partitions)
        # Leave out codecs that save nothing because of the padding to whole blocks per rank.
        self._parts = [
            part
            for part in parts
            if part.sent_bytes(collectives) < collectives.uncompressed_bytes([gradients[i] for i in part.positions])
        ]
        encoded = {i for part in self._parts for i in part.positions}
        self._sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
        rows = {i: codec.for_rows() for i in self._sparse if (codec := codecs[i]) is not None}
        # Likewise leave out codecs that save nothing because of the padding of each row.
        self._sparse_codecs = {
            i: codec
            for i, codec in rows.items()
            if sparse_row_bytes(gradients[i], codec) < sparse_row_bytes(gradients[i])
        }
        self.dense_codecs = [part.codec for part in self._parts]
        self.encodes = bool(self._parts or self._sparse_codecs)
        shapes = [[part.positions, part.state_shapes] for part in self._parts]
        self.layout = Layout(collectives.ranks * collectives.spread, collectives.worker, shapes)
        raw = [i for i in range(len(gradients)) if i not in encoded and i not in self._sparse_codecs]
        self._raw_parts = [i for i in raw if self._partitions[i] is not None and i not in self._sparse]
        self._raw = [i for i in raw if i not in set(self._raw_parts)]
        coded_parts = {i for part in self._parts if isinstance(part, PartCodecGroup) for i in part.positions}
        self.in_parts = frozenset({*self._raw_parts, *coded_parts})
        # For each replica of this worker: the states of its parts, and its counts.
        self.states: list[list[tf.Variable]] = []
        self.counts: list[tf.Variable] = []
        self._restored = np.zeros(
            [self._collectives.replicas, 3], np.int64
        )  # Parts of the counts of earlier processes.
        self.times = Times()
        # In another thread, since in a replica's thread the strategy would mirror the variables in its graph.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._make_variables).result()

    def __call__(
        self, replica: int, gradients: Sequence[Gradient], done: tf.Tensor, options: Any = None
    ) -> list[Gradient]:
        """Adds the exchange of one replica of this worker to the graph, and returns the sums of the gradients.

        If any replica has an Inf or NaN in any gradient, the sum is not finite on all replicas, and no state changes.
        `done` is the number of steps that the optimizer has taken, equal on all workers: codecs begin at their
        `start_step`.
        """
        collectives = self._collectives
        options = options or tf_internals.CommunicationOptions()
        totals: list[Any] = list(gradients)
        old = list(self.states[replica])
        new: list[tf.Tensor] = []
        finite: list[tf.Tensor] = []
        seconds: list[tf.Tensor] = []
        with tf.device(collectives.device(replica)):
            for part in self._parts:
                members = [gradients[i] for i in part.positions]
                states = [tf.convert_to_tensor(variable) for variable in old[len(new) : len(new) + part.num_states]]
                sums, states, is_finite, spent = _from_step(
                    part, done, members, states, replica, collectives, options, self.is_timed
                )
                new += states
                finite.append(is_finite)
                seconds.append(spent)
                for i, total in zip(part.positions, sums, strict=True):
                    totals[i] = total
            raw = collectives._all_reduce(
                tf.distribute.ReduceOp.SUM, [gradients[i] for i in self._raw], replica, options
            )
            for i, total in zip(self._raw, raw, strict=True):
                totals[i] = total
            own = PartReducer(collectives).reduce_scatter_tensors(
                [gradients[i] for i in self._raw_parts],
                partitions=[self._partitions[i] for i in self._raw_parts],
                replica=replica,
                options=options,
            )
            for i, total in zip(self._raw_parts, own, strict=True):
                totals[i] = total
            for i, codec in self._sparse_codecs.items():
                totals[i], spent = _rows_from_step(
                    codec, done, gradients[i], replica, collectives, options, self.is_timed
                )
                seconds.append(spent)
            if new:
                # Check sums that no codec has checked, and float16 ones, which may overflow when cast from float32.
                raw = {*self._raw, *self._raw_parts, *self._sparse}
                unseen = [i for i, gradient in enumerate(gradients) if i in raw or gradient.dtype == tf.float16]
                finite += [_is_finite(totals[i]) for i in unseen]
                all_finite = tf.reduce_all(finite)
                if self.in_parts:  # No replica sees the whole sums.
                    all_finite = self._on_all_replicas(all_finite, replica, options)
                tf.cond(all_finite, lambda: _assign(old, new), lambda: tf.constant(False))
            self._count(replica, gradients, totals, done, options)
            self.times.of_replicas[replica].assign_add(tf.add_n(seconds) if seconds else _NO_TIME)
        return totals

    def _on_all_replicas(self, condition: tf.Tensor, replica: int, options: Any) -> tf.Tensor:
        """Returns whether a condition, bool [], holds on all replicas. Costs an exchange of one number."""
        number = tf.cast(condition, tf.float32)
        count = self._collectives._all_reduce(tf.distribute.ReduceOp.SUM, number, replica, options)
        return count > self._collectives.ranks * self._collectives.spread - 0.5

    def eagerly(self, gradients: list[list[Gradient]], done: tf.Tensor) -> list[list[Gradient]]:
        """Sums the gradients outside of a graph, for all replicas of this worker: [replica][gradient] in and out."""
        if not hasattr(self, "_function"):
            self._function = tf.function(
                lambda everyone, done: [self(replica, own, done) for replica, own in enumerate(everyone)],
                autograph=False,
                reduce_retracing=True,
            )
        function = self._function
        if tf.config.functions_run_eagerly():  # Run one after another, the first replica would wait for the second.
            function = function.get_concrete_function(gradients, done)
        return function(gradients, done)

    def release(self) -> None:
        """Frees the codec states of a deleted optimizer. This object cannot be used afterwards."""
        self.states = []
        if hasattr(self, "_function"):
            del self._function  # Its graphs refer to this object.

    def residuals(self) -> list[tf.Tensor]:
        """Returns the residuals of all replicas of this worker. For `PowerSGD`, costs one pass over the matrices."""
        return [
            residual
            for states in self.states
            for part, own in self._by_part(states)
            for residual in part.residuals(own)
        ]

    def pending(self) -> list[np.ndarray]:
        """Codec states (momenta, residuals) summed over this worker's replicas, in the shapes of the gradients.

        `spread` sets them again, on any number of replicas.
        """
        replicas = [
            [
                array
                for part, own in self._by_part(states)
                for kind in part.pending(own, i, self._collectives)
                for array in kind
            ]
            for i, states in enumerate(self.states)
        ]
        return [np.sum(arrays, axis=0) for arrays in zip(*replicas, strict=True)]

    def spread(self, pending: Sequence[np.ndarray]) -> None:
        """Sets the codec states such that `pending()` of all workers sums to `pending`, for any number of replicas.

        Raises:
          ValueError: If `pending` is of other gradients or codecs.
        """
        expected = [array.shape for array in self.pending()]
        if [array.shape for array in pending] != expected:
            raise ValueError(f"States must have shapes {expected}, got {[array.shape for array in pending]}.")
        for replica, states in enumerate(self.states):
            rest = list(pending)
            for part, own in self._by_part(states):
                size = len(part.positions)
                kinds = [rest[kind * size : (kind + 1) * size] for kind in range(part.kinds)]
                rest = rest[part.kinds * size :]
                for variable, value in zip(own, part.spread(kinds, replica, self._collectives), strict=True):
                    variable.assign(tf.reshape(value, variable.shape))
        self.layout.refusal = None

    def _by_part(self, states):
        rest = list(states)
        for part in self._parts:
            yield part, rest[: part.num_states]
            rest = rest[part.num_states :]

    def _make_variables(self):
        shapes = [shape for part in self._parts for shape in part.state_shapes]
        initial = [value for part in self._parts for value in part.initial_states()]
        for replica in range(self._collectives.replicas):
            with tf.device(self._collectives.device(replica)):
                self.states.append(
                    [
                        tf.Variable(tf.zeros(shape) if value is None else value, trainable=False, name=f"state_{i}")
                        for i, (shape, value) in enumerate(zip(shapes, initial, strict=True))
                    ]
                )
            with tf.device(host_of(self._collectives.device(replica))):
                self.counts.append(tf.Variable(tf.zeros([3], tf.int64), trainable=False, name="counts"))
                self.times.of_replicas.append(tf.Variable(_NO_TIME, trainable=False, name="times"))

    def own_counts(self) -> np.ndarray:
        """Returns the counts of this process: steps, bytes before compression and bytes sent, int64 [replicas, 3]."""
        return np.stack([count.numpy() for count in self.counts]) - self._restored

    def keep_own_counts(self, own: np.ndarray) -> None:
        """Notes that a backup has set the counts, after they were `own` for this process."""
        self._restored += self.own_counts() - own

    def _count(self, replica, gradients, totals, done, options):
        """Counts a step and its bytes for a replica. Sparse rows count without the padding to the longest replica."""
        collectives = self._collectives
        dense = [gradients[i] for i in [*self._raw, *self._raw_parts] if i not in self._sparse]
        raw = sent = tf.constant(round(collectives.uncompressed_bytes(dense, options)), tf.int64)
        for part in self._parts:
            uncompressed = round(collectives.uncompressed_bytes([gradients[i] for i in part.positions], options))
            raw += uncompressed
            sent += _from(part.codec.start_step, done, round(part.sent_bytes(collectives)), uncompressed)
        others = collectives.ranks * collectives.spread - 1
        for i in self._sparse:
            rows = tf.cast(tf.shape(totals[i].indices)[0], tf.int64) * others // (others + 1)
            codec = self._sparse_codecs.get(i)
            uncompressed, encoded = sparse_row_bytes(gradients[i]), sparse_row_bytes(gradients[i], codec)
            raw += rows * uncompressed
            sent += rows * _from(0 if codec is None else codec.start_step, done, encoded, uncompressed)
        self.counts[replica].assign_add(tf.stack([tf.constant(1, tf.int64), raw, sent]))


def _parts(gradients, codecs, collectives, seed, partitions) -> list[Any]:
    """Groups dense gradients by codec, and those that are divided apart, starting with the last gradient."""
    groups: dict[tuple[Codec, bool], list[int]] = {}
    for i in reversed(range(len(gradients))):
        if codecs[i] is not None and not isinstance(gradients[i], tf.IndexedSlices):
            is_divided = isinstance(codecs[i], WordCodec) and isinstance(partitions[i], Partition)
            groups.setdefault((codecs[i], is_divided), []).insert(0, i)
    return [
        PowerSGDGroup(codec, positions, gradients, codec.seed + seed)
        if isinstance(codec, PowerSGD)
        else PartCodecGroup(cast(WordCodec, codec), positions, [partitions[i] for i in positions], collectives)
        if is_divided
        else CodecGroup(cast(WordCodec, codec), positions, gradients, collectives)
        for (codec, is_divided), positions in groups.items()
    ]


def _from(start_step: int, done: tf.Tensor, then: int, before: int) -> tf.Tensor:
    """Returns the bytes of a step: `then` from step `start_step` on, and `before` in earlier steps, int64 []."""
    return tf.where(done >= start_step, tf.constant(then, tf.int64), tf.constant(before, tf.int64))


def _from_step(part, done, gradients, states, replica, collectives, options, timed):
    """Sums the gradients of one codec over all replicas, uncompressed until the codec's `start_step`."""

    def encoded():
        watch = Stopwatch(collectives.device(replica), collectives.untouched(replica), timed)
        return *part.exchange(gradients, states, replica, collectives, options, watch), watch.seconds()

    def raw():
        sums = part.uncompressed(gradients, replica, collectives, options)
        return sums, list(states), tf.reduce_all([_is_finite(total) for total in sums]), tf.constant(_NO_TIME)

    return encoded() if part.codec.start_step == 0 else tf.cond(done >= part.codec.start_step, encoded, raw)


def _rows_from_step(codec, done, slices, replica, collectives, options, timed):
    """Exchanges the rows of a sparse gradient, uncompressed until the codec's `start_step`."""
    transport = collectives.among_all(replica)

    def encoded():
        watch = Stopwatch(collectives.device(replica), collectives.untouched(replica), timed)
        values = watch.timed(transport)
        joined = all_reduce_sparse(watch.begin(slices), values, options, codec, beside=transport)
        return tf.IndexedSlices(watch.end(joined.values), joined.indices, joined.dense_shape), watch.seconds()

    def raw():
        return all_reduce_sparse(slices, transport, options), tf.constant(_NO_TIME)

    return encoded() if codec.start_step == 0 else tf.cond(done >= codec.start_step, encoded, raw)


def _is_finite(total: Gradient) -> tf.Tensor:
    """Whether a summed gradient is finite, bool []; equal on all replicas because the sums are."""
    values = total.values if isinstance(total, tf.IndexedSlices) else total
    values = tf.abs(values) if values.dtype.is_complex else values
    return tf.reduce_all(tf.math.is_finite(values)) if values.dtype.is_floating else tf.constant(True)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return tf.constant(True)
