"""Groups of gradients with one codec: their arrangement in buckets, their exchange, and their residuals."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.buckets import BUCKET_BYTES, Bucket, fill_buckets, join, part_bytes, separate
from tfdist.strategies.collectives.low_rank import all_reduce_low_rank
from tfdist.strategies.collectives.two_shot import all_reduce_encoded, in_two_shots, sent_words, state_shapes
from tfdist.strategies.compression import PowerSGD, WordCodec

Gradient: TypeAlias = Any  # tf.Tensor | tf.IndexedSlices; TensorFlow ships no types for a type checker.


class CodecGroup:
    """The gradients of one `WordCodec`, in buckets."""

    def __init__(self, codec: WordCodec, positions: list[int], gradients: Sequence[Gradient], collectives: Any):
        self.codec, self.positions = codec, positions
        self._like = like = [tf.TensorSpec(gradients[i].shape, tf.float32) for i in positions]
        self._granule = codec.granule
        spread, ranks = collectives.spread, collectives.ranks
        self._multiple = codec.granule * spread * (ranks if in_two_shots(codec, ranks) else 1)
        self._buckets: list[Bucket] = fill_buckets(like, BUCKET_BYTES, codec.granule, part_bytes(ranks))
        padded = [sum(segment.padded(codec.granule) for segment in bucket) for bucket in self._buckets]
        self._elements = [-(-size // self._multiple) * self._multiple for size in padded]
        shapes = [state_shapes(codec, elements // spread, ranks) for elements in self._elements]
        self._splits = [(len(first), len(second)) for first, second in shapes]
        self.state_shapes = [shape for first, second in shapes for shape in [*first, *second]]
        self.num_states = len(self.state_shapes)
        self.kinds = codec.states
        self._kinds = [
            kind for first, second in shapes for encoding in (first, second) for kind in range(len(encoding))
        ]

    def initial_states(self):
        """The states before the first step; None stands for zeros."""
        return [None] * self.num_states

    def sent_bytes(self, collectives):
        """Bytes a replica sends per step."""
        parts = [elements // collectives.spread for elements in self._elements]
        return sum(4 * sent_words(self.codec, part, collectives.ranks) for part in parts)

    def exchange(self, gradients, states, replica, collectives, options, watch):
        """Returns the sums of the gradients, the new states, and whether the sums are finite; `watch` times it."""
        totals, kept, finite = [], [], []
        members = [tf.cast(gradient, tf.float32) for gradient in gradients]
        rest = list(states)
        for bucket, (first, second) in zip(self._buckets, self._splits, strict=True):
            own, rest = rest[: first + second], rest[first + second :]
            # If the codec averages magnitudes, zeros as padding would shrink the scale of the last block.
            repeats = not self.codec.keeps_zeros
            joined = watch.begin(join(bucket, members, self._granule, self._multiple, repeats=repeats))
            total, new_first, new_second, is_finite = collectives.across_workers(
                joined,
                replica,
                options,
                lambda shard, launcher, ranks, own=own, first=first: all_reduce_encoded(
                    self.codec, shard, tuple(own[:first]), tuple(own[first:]), launcher, ranks, options
                ),
                watch,
            )
            if not self.codec.keeps_zeros:
                new_first, new_second = self._without_padding(bucket, new_first, new_second, replica, collectives)
            total, new_first, new_second = watch.end([total, new_first, new_second])
            totals.append(total)
            kept += [*new_first, *new_second]
            # With several devices per worker, each device has checked only its own part of the bucket.
            finite.append(is_finite if collectives.spread == 1 else tf.reduce_all(tf.math.is_finite(total)))
        sums = separate(self._buckets, totals, gradients, self._granule)
        return sums, kept, tf.reduce_all(finite)

    def residuals(self, states):
        """The residuals among `states`; the momentum states before them are left out."""
        return [state for state, kind in zip(states, self._kinds, strict=True) if kind == self.kinds - 1]

    def _without_padding(self, bucket, first, second, replica, collectives):
        """Sets states to zero where the bucket is padded."""
        ones = [tf.ones([segment.stop - segment.start]) for segment in bucket]
        alone = [
            segment._replace(tensor=i, start=0, stop=one.shape[0])
            for i, (segment, one) in enumerate(zip(bucket, ones, strict=True))
        ]
        mask = join(alone, ones, self._granule, self._multiple)
        shard, owned = collectives.shard(replica, mask.shape[0]), collectives.owned(replica, mask.shape[0])
        return (
            [state * tf.reshape(mask[shard], state.shape) for state in first],
            [state * tf.reshape(mask[owned], state.shape) for state in second],
        )

    def pending(self, states, replica, collectives):
        """Returns the replica's part of the summed states, shaped like the gradients: [kind of state][gradient]."""
        kinds: list[list[Any]] = [[] for _ in range(self.codec.states)]
        rest = list(states)
        for elements, (first, second) in zip(self._elements, self._splits, strict=True):
            own, rest = rest[: first + second], rest[first + second :]
            shard, owned = collectives.shard(replica, elements), collectives.owned(replica, elements)
            for kind, buckets in enumerate(kinds):
                bucket = np.zeros([elements], np.float32)
                bucket[shard] += own[kind].numpy().reshape(-1)
                if second:
                    bucket[owned] += own[first + kind].numpy().reshape(-1)
                buckets.append(tf.constant(bucket))
        return [
            [total.numpy() for total in separate(self._buckets, buckets, self._like, self._granule)]
            for buckets in kinds
        ]

    def spread(self, kinds, replica, collectives):
        """Inverse of `pending`. Returns flat states such that `pending` of all replicas sums to `kinds`."""
        states = []
        for bucket, elements, (_, second) in zip(self._buckets, self._elements, self._splits, strict=True):
            shard = collectives.shard(replica, elements)
            for pending in kinds:
                states.append(join(bucket, pending, self._granule, self._multiple)[shard] / collectives.ranks)
            states += [tf.zeros([elements // collectives.spread // collectives.ranks])] * second
        return states


# Matrices exchanged together. Their factors have a hundredth of the bytes, and an exchange takes about a millisecond.
_MATRICES_BYTES = 64 << 20


class PowerSGDGroup:
    """The gradients of one `PowerSGD` codec, as matrices.

    With error feedback the states are three per matrix: the matrix of the last step, its basis and this replica's back
    projection. The factors of all matrices, which are equal on all replicas, follow.
    """

    def __init__(self, codec: PowerSGD, positions: list[int], gradients: Sequence[Gradient], seed: int):
        self.codec, self.positions = codec, positions
        self._shapes = [_matrix(gradients[i].shape) for i in positions]
        self._seed = seed
        like = [tf.TensorSpec(shape, tf.float32) for shape in self._shapes]
        buckets = fill_buckets(like, _MATRICES_BYTES)
        self._groups = list(dict.fromkeys(tuple(segment.tensor for segment in bucket) for bucket in buckets))
        self._factors = [(columns, codec.rank) for _, columns in self._shapes]
        before = [((rows, cols), (rows, codec.rank), (cols, codec.rank)) for rows, cols in self._shapes]
        kept = [shape for shapes in before for shape in shapes] if codec.error_feedback else []
        self.state_shapes = [*kept, *self._factors]
        self.num_states = len(self.state_shapes)
        self.kinds = 1 + codec.error_feedback

    def initial_states(self):
        """The states before the first step; None stands for zeros."""
        codec = self.codec
        factors = [
            codec.start(rows, columns, self._seed + position)
            for position, (rows, columns) in zip(self.positions, self._shapes, strict=True)
        ]
        return [None] * (self.num_states - len(factors)) + factors

    def sent_bytes(self, collectives):
        """Bytes a replica sends per step."""
        sides = [[self._shapes[i][side] for i in group] for group in self._groups for side in range(2)]
        return sum(collectives.sum_bytes(4 * self.codec.rank * sum(side)) for side in sides)

    def exchange(self, gradients, states, replica, collectives, options, watch):
        """See `CodecGroup.exchange`."""
        before, factors = self._apart(states)
        totals: list[Any] = [None] * len(self._shapes)
        finite = []
        launcher = watch.of_collectives(collectives.launcher(replica))
        for group in self._groups:
            matrices = watch.begin([tf.reshape(tf.cast(gradients[i], tf.float32), self._shapes[i]) for i in group])
            sums, after, new_factors, is_finite = all_reduce_low_rank(
                self.codec,
                matrices,
                [before[i] for i in group] if before else [],
                [factors[i] for i in group],
                launcher,
                options,
            )
            sums, after, new_factors = watch.end([sums, after, new_factors])
            finite.append(is_finite)
            for place, i in enumerate(group):
                totals[i] = tf.cast(tf.reshape(sums[place], gradients[i].shape), gradients[i].dtype)
                factors[i] = new_factors[place]
                if before:
                    before[i] = after[place]
        return totals, [*(state for then in before for state in then), *factors], tf.reduce_all(finite)

    def residuals(self, states):
        """See `CodecGroup.residuals`. Costs one pass over the matrices."""
        return [self.codec.rest(*then) for then in self._apart(states)[0]]

    def pending(self, states, replica, collectives):
        """See `CodecGroup.pending`. Factors are equal on all replicas, so only the first replica counts them."""
        residuals, factors = self.residuals(states), self._apart(states)[1]
        first = collectives.is_first(replica)
        kinds = [[residual.numpy() for residual in residuals]] if residuals else []
        return [*kinds, [factor.numpy() if first else np.zeros_like(factor.numpy()) for factor in factors]]

    def spread(self, kinds, replica, collectives):
        """See `CodecGroup.spread`."""
        replicas, rank = collectives.ranks * collectives.spread, self.codec.rank
        states = []
        for matrix in (matrix for residuals in kinds[:-1] for matrix in residuals):
            # With zeros as basis and back projection, the residual is the matrix itself.
            states += [matrix / replicas, *(tf.zeros([axis, rank]) for axis in matrix.shape)]
        return [*states, *kinds[-1]]

    def _apart(self, states):
        """Splits the states: `[matrix, basis, back projection]` per matrix, if any; and the factors of all."""
        own, factors = list(states[: -len(self._factors)]), list(states[-len(self._factors) :])
        return [own[i : i + 3] for i in range(0, len(own), 3)], factors


def _matrix(shape: tf.TensorShape) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix: the last axis gives the columns, the other axes the rows."""
    columns = shape[-1]
    return shape.num_elements() // columns, columns
