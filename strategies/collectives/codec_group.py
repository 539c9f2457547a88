"""The gradients of one codec: their arrangement in buckets, the all-reduce of encoded buckets, and residuals."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.buckets import BUCKET_BYTES, Bucket, fill_buckets, join, part_bytes, separate
from tfdist.strategies.collectives.finite_sums import DecodedSum, all_finite, decoded_are_finite
from tfdist.strategies.collectives.ordered_sums import sum_in_order
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.collectives.transport import Gradient, Transport
from tfdist.strategies.compression import WordCodec

State = tuple[tf.Tensor, ...]

# Compiling takes about a tenth of a second per shape and device. For smaller buckets faster steps do not pay it back.
_COMPILED_ELEMENTS = 1 << 14


class CodecGroup:
    """The gradients of an optimizer that share one `WordCodec`, in buckets, and their exchange in each step."""

    def __init__(self, codec: WordCodec, positions: list[int], gradients: Sequence[Gradient], collectives: Collectives):
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

    @property
    def num_buckets(self) -> int:
        """Number of buckets, each of which takes up to four collectives."""
        return len(self._buckets)

    def initial_states(self):
        """The codec states before the first step; None stands for zeros."""
        return [None] * self.num_states

    def sent_bytes(self, collectives: Collectives) -> float:
        """Bytes that a replica sends per step for these gradients, for counts of traffic."""
        parts = [elements // collectives.spread for elements in self._elements]
        return sum(4 * sent_words(self.codec, part, collectives.ranks, collectives.relay) for part in parts)

    def exchange(self, gradients, states, replica: int, collectives: Collectives, options: Any, watch: Stopwatch):
        """Returns the sums of the gradients, the new codec states, and whether the sums are finite; `watch` times it.

        If a worker has several devices, they first sum each bucket in full precision, each device one part: [elements]
        -> [elements / devices]. Each device exchanges its part with the matching devices of the other workers, and the
        worker's devices gather the sums. All devices of a worker thus send the same number of bytes.
        """
        across, within = watch.timed(collectives.across_workers(replica)), collectives.within_worker(replica)
        within = None if within is None else watch.timed(within)
        totals, kept, decoded = [], [], []
        members = [tf.cast(gradient, tf.float32) for gradient in gradients]
        rest = list(states)
        for bucket, (first, second) in zip(self._buckets, self._splits, strict=True):
            own, rest = rest[: first + second], rest[first + second :]
            # If the codec averages magnitudes, zeros as padding would shrink the scale of the last block.
            repeats = not self.codec.keeps_zeros
            joined = watch.begin(join(bucket, members, self._granule, self._multiple, repeats=repeats))
            part = joined if within is None else _sum_of_own_part(within, joined, options)
            summed, new_first, new_second = all_reduce_encoded(
                self.codec, part, tuple(own[:first]), tuple(own[first:]), across, options
            )
            total = summed.total
            if within is not None:
                total = tf.ensure_shape(within.all_gather(total, options), joined.shape)
            if not self.codec.keeps_zeros:
                new_first, new_second = self._without_padding(bucket, new_first, new_second, replica, collectives)
            total, new_first, new_second = watch.end([total, new_first, new_second])
            totals.append(total)
            kept += [*new_first, *new_second]
            decoded.append(summed)
        sums = separate(self._buckets, totals, gradients, self._granule)
        # With several devices per worker, the words of a device show only its own part of a bucket.
        finite = decoded_are_finite(self.codec, decoded) if collectives.spread == 1 else all_finite(totals)
        return sums, kept, finite

    def uncompressed(self, gradients, replica: int, collectives: Collectives, options: Any):
        """Returns the sums of the gradients, before the first step of the codec."""
        return collectives._all_reduce(tf.distribute.ReduceOp.SUM, list(gradients), replica, options)

    def residuals(self, states):
        """The residuals among the codec states of a replica, without the momenta before them."""
        return [state for state, kind in zip(states, self._kinds, strict=True) if kind == self.kinds - 1]

    def _without_padding(self, bucket, first, second, replica, collectives):
        """Sets codec states to zero where the bucket is padded, since copied values there must leave no residual."""
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

    def pending(self, states, replica: int, collectives: Collectives):
        """Returns a replica's codec states (momenta, residuals), shaped like the gradients: [kind of state][gradient].

        The states of the optimizer as a whole are their sum over replicas; `spread` divides such a sum again.
        """
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

    def spread(self, kinds, replica: int, collectives: Collectives):
        """Inverse of `pending`. Returns flat codec states such that `pending` of all replicas sums to `kinds`."""
        states = []
        for bucket, elements, (_, second) in zip(self._buckets, self._elements, self._splits, strict=True):
            shard = collectives.shard(replica, elements)
            for pending in kinds:
                states.append(join(bucket, pending, self._granule, self._multiple)[shard] / collectives.ranks)
            states += [tf.zeros([elements // collectives.spread // collectives.ranks])] * second
        return states


def _sum_of_own_part(within: Transport, bucket: tf.Tensor, options: Any) -> tf.Tensor:
    """Sums this device's part of a bucket over the devices of the worker: [elements] -> [elements / devices]."""
    return sum_in_order(within.all_to_all(tf.reshape(bucket, [within.ranks, -1]), options))


def in_two_shots(codec: WordCodec, ranks: int) -> bool:
    """Whether encoded sums are exchanged too. Two ranks send whole buckets: as many bytes, half the coding."""
    return codec.two_shot and ranks > 2


def state_shapes(codec: WordCodec, elements: int, ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the shapes of a bucket's codec states, float32, for the first encoding and for that of the sum."""
    if not in_two_shots(codec, ranks):
        return [(1, elements)] * codec.states, []
    chunk = elements // ranks
    return [(ranks, chunk)] * codec.states, [(1, chunk)] * codec.states


def sent_words(codec: WordCodec, elements: int, ranks: int, relay: float = 1) -> float:
    """Returns the number of int32 words that one rank sends for a bucket of `elements`; see `Collectives.relay`."""
    if not in_two_shots(codec, ranks):
        return (ranks - 1) * codec.words(elements)
    return (1 + relay) * (ranks - 1) * codec.words(elements // ranks)


def all_reduce_encoded(
    codec: WordCodec, bucket: tf.Tensor, first: State, second: State, transport: Transport, options: Any
) -> tuple[DecodedSum, State, State]:
    """Sums a bucket of gradients over all ranks, which exchange it encoded.

    Each rank owns one chunk of the bucket. It receives this chunk from all ranks, encoded, sums in float32 in the order
    of ranks, encodes the sum and sends it to all. The owner decodes its own message too, so all ranks hold the same
    bits. Both encodings keep their error as a residual. Each rank sends 2 (ranks - 1) / ranks encoded buckets.

    With two ranks, or a (sparse) codec that is not `two_shot`, each rank sends its bucket to all other ranks instead.

    Args:
      codec: The codec of the rows.
      bucket: float [elements], elements a multiple of ranks * granule.
      first: The codec's state for the first encoding; see `state_shapes`.
      second: The codec's state for the second encoding.
      transport: This rank's transport.
      options: TensorFlow's `CommunicationOptions` for collectives.

    Returns:
      The sum, with `total` float32 [elements], and the new `first` and `second`. An Inf or NaN on any rank makes the
      sum non-finite on all ranks.

    References:
      Seide et al., 1-bit SGD, 2014, for residuals in both directions.
      Tang et al., DoubleSqueeze, 2019, https://arxiv.org/abs/1905.05957, for the two shots.
    """
    two_shots = in_two_shots(codec, transport.ranks)
    rows = transport.ranks if two_shots else 1
    compiled = _is_compiled(bucket)
    words, first = _compress(codec, tf.reshape(bucket, [rows, -1]), first, compiled)
    chunk = bucket.shape[0] // rows
    if not two_shots:
        received = transport.all_gather(words, options)
        total = _sum(codec, compiled)(received, chunk)
    else:
        received = transport.all_to_all(words, options)
        words, second = _sum_and_encode(codec, compiled)(received, second, chunk)
        received = transport.all_gather(words, options)
        total = _decode(codec, compiled)(received, chunk)
    return DecodedSum(tf.reshape(total, [-1]), received, chunk), first, second


def encode(codec: WordCodec, rows: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
    """Encodes rows of gradients plus their residuals: float32 [rows, elements] -> int32 [rows, words], new state."""
    return _compress(codec, rows, state, _is_compiled(rows))


def sum_encoded(codec: WordCodec, rows: tf.Tensor, elements: int) -> DecodedSum:
    """Decodes the rows of all ranks and sums them in the order of ranks: [ranks, words] -> [1, elements]."""
    total = _sum(codec, elements * rows.shape[0] >= _COMPILED_ELEMENTS)(rows, elements)
    return DecodedSum(total, rows, elements)


def _is_compiled(bucket: tf.Tensor) -> bool:
    return bucket.shape.num_elements() >= _COMPILED_ELEMENTS


# When compiled, a large bucket takes one pass over memory instead of one per operation. Encoding and decoding are
# functions of their own, which the larger compiled functions call, so TensorFlow traces each of them once.


@functools.cache
def _sum_and_encode(codec: WordCodec, compiled: bool):
    def sum_and_encode(rows, state, elements):
        return _compress(codec, _total(codec, rows, elements, compiled), state, compiled)

    return _function(sum_and_encode, compiled)


@functools.cache
def _sum(codec: WordCodec, compiled: bool):
    return _function(lambda rows, elements: _total(codec, rows, elements, compiled), compiled)


@functools.cache
def _decode(codec: WordCodec, compiled: bool):
    return _function(codec.decode, compiled)


def _function(function, compiled):
    return tf.function(function, jit_compile=True, autograph=False) if compiled else function


def _total(codec: WordCodec, rows: tf.Tensor, elements: int, compiled: bool) -> tf.Tensor:
    """Decodes the messages of all ranks and sums in the order of ranks: [ranks, words] -> float32 [1, elements]."""
    return sum_in_order(_decode(codec, compiled)(rows, elements), keepdims=True)


def _compress(codec: WordCodec, values: tf.Tensor, state: State, compiled: bool) -> tuple[tf.Tensor, State]:
    """Encodes rows plus their residuals; see `WordCodec.compress`."""
    if not compiled:
        return codec.compress(values, state)
    count, elements = values.shape
    words, new = _compress_any_rows(codec, elements)(values, state)
    words.set_shape([count, codec.words(elements)])
    for each in new:
        each.set_shape(values.shape)
    return words, new


@functools.cache
def _compress_any_rows(codec: WordCodec, elements: int):
    """The codec's `compress` for any number of rows: the gradients of a rank have many, the sum of all has one."""
    rows = tf.TensorSpec([None, elements], tf.float32)
    signature = [rows, (rows,) * codec.states]
    return tf.function(codec.compress, input_signature=signature, jit_compile=True, autograph=False)
