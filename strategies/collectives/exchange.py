"""The compressed exchange of one optimizer's gradients: what travels how, and what is kept from step to step."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.collectives.parts import Gradient, Matrices, Words
from tfdist.strategies.collectives.sparse import sparse_row_bytes
from tfdist.strategies.compression import Codec, PowerSGD, WordCodec

# Of a replica, since the strategy was made: exchanges, bytes as float32 would send them, bytes sent. All across the
# network only, if workers have several devices.
STEPS, RAW_BYTES, SENT_BYTES = range(3)


class Exchange(tf.Module):
    """Sums a list of gradients over all replicas, as one optimizer hands them over, step after step.

    Args:
      gradients: The first such list; later ones have the same shapes and dtypes.
      codecs: For each gradient how it travels, or `None` for uncompressed.
      collectives: Of the strategy.
      position: How many exchanges the strategy has made before; seeds what codecs draw.
    """

    def __init__(self, gradients: Sequence[Gradient], codecs: Sequence[Codec | None], collectives: Any, position: int):
        super().__init__(name=f"exchange_{position}")
        self._collectives = collectives
        self._parts = _parts(gradients, codecs, collectives, position)
        raw = [i for i, codec in enumerate(codecs) if codec is None]
        self._raw, self._sparse = raw, [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        self._sparse_codecs = {i: codec.for_rows() for i in self._sparse if (codec := codecs[i]) is not None}
        self._static_bytes = self._count_bytes(gradients)
        # Of each replica of this worker: what its parts keep, and its counts.
        self.states: list[list[tf.Variable]] = []
        self.counts: list[tf.Variable] = []
        # Not in the thread of a replica, whose strategy would make variables of all replicas, nor in its graph.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._make_variables).result()

    def __call__(self, replica: int, gradients: Sequence[Gradient], options=None) -> list[Gradient]:
        """Builds the exchange of one replica of this worker.

        If any replica has an Inf or NaN anywhere, all get a sum that is not finite, and nothing that is kept changes.
        """
        collectives = self._collectives
        options = options or _tf.CommunicationOptions()
        totals: list[Any] = list(gradients)
        old = list(self.states[replica])
        new: list[tf.Tensor] = []
        finite: list[tf.Tensor] = []
        with tf.device(collectives.device(replica)):
            steps = self.counts[replica][STEPS]
            for part in self._parts:
                members = [gradients[i] for i in part.positions]
                states = [tf.convert_to_tensor(variable) for variable in old[len(new) : len(new) + part.num_states]]
                sums, states, is_finite = _from_step(part, steps, members, states, replica, collectives, options)
                new += states
                finite.append(is_finite)
                for i, total in zip(part.positions, sums, strict=True):
                    totals[i] = total
            raw = collectives._all_reduce(
                tf.distribute.ReduceOp.SUM, [gradients[i] for i in self._raw], replica, options
            )
            for i, total in zip(self._raw, raw, strict=True):
                totals[i] = total
            for i, codec in self._sparse_codecs.items():
                totals[i] = collectives.all_reduce_rows(gradients[i], replica, options, codec)
            if new:
                finite += [_is_finite(totals[i]) for i in [*self._raw, *self._sparse_codecs]]
                tf.cond(tf.reduce_all(finite), lambda: _assign(old, new), lambda: tf.constant(False))
            self._count(replica, gradients, totals)
        return totals

    def eagerly(self, gradients: list[list[Gradient]]) -> list[list[Gradient]]:
        """The same for all replicas of this worker at once, outside of a graph: [replica][gradient]."""
        if not hasattr(self, "_function"):
            self._function = tf.function(
                lambda everyone: [self(replica, own) for replica, own in enumerate(everyone)],
                autograph=False,
                reduce_retracing=True,
            )
        return self._function(gradients)

    def residuals(self) -> list[tf.Variable]:
        """What all replicas of this worker have left behind."""
        kinds = [is_residual for part in self._parts for is_residual in part.is_residual]
        return [state for states in self.states for state, kind in zip(states, kinds, strict=True) if kind]

    def pending(self) -> list[np.ndarray]:
        """What the replicas of this worker have left behind: their part of the sum over all, whatever the layout."""
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

    def spread(self, pending: Sequence[np.ndarray], steps: int) -> None:
        """Sets what is kept such that all replicas together have left `pending` behind.

        Raises:
          ValueError: If `pending` is of other gradients or codecs.
        """
        expected = [array.shape for array in self.pending()]
        if [array.shape for array in pending] != expected:
            raise ValueError(f"Expected arrays of shapes {expected}, got {[array.shape for array in pending]}.")
        for replica, states in enumerate(self.states):
            rest = list(pending)
            for part, own in self._by_part(states):
                size = len(part.positions)
                kinds = [rest[kind * size : (kind + 1) * size] for kind in range(part.kinds)]
                rest = rest[part.kinds * size :]
                for variable, value in zip(own, part.spread(kinds, replica, self._collectives), strict=True):
                    variable.assign(tf.reshape(value, variable.shape))
            counts = self.counts[replica]
            counts.assign(tf.tensor_scatter_nd_update(counts, [[STEPS]], [steps]))

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
            host = tf.DeviceSpec.from_string(self._collectives.device(replica)).replace(
                device_type="CPU", device_index=0
            )
            with tf.device(host.to_string()):
                self.counts.append(tf.Variable(tf.zeros([3], tf.int64), trainable=False, name="counts"))

    def _count_bytes(self, gradients):
        """What each step sends whatever the rows: raw and sent bytes of a replica."""
        collectives = self._collectives
        replicas = collectives.ranks * collectives.spread
        # Of several devices of a worker, one stands at its border in a ring.
        ring = 2 * (replicas - 1) / replicas / collectives.spread
        dense = [i for i in range(len(gradients)) if i not in self._sparse]
        uncompressed = ring * sum(_bytes(gradients[i]) for i in dense if i in self._raw)
        sent = uncompressed + sum(part.sent_bytes(collectives, ring) for part in self._parts)
        return round(ring * sum(_bytes(gradients[i]) for i in dense)), round(sent)

    def _count(self, replica, gradients, totals):
        raw, sent = (tf.constant(count, tf.int64) for count in self._static_bytes)
        replicas = self._collectives.ranks * self._collectives.spread
        for i in self._sparse:
            # Close to what is sent: each replica pads to the longest.
            rows = tf.cast(tf.shape(totals[i].indices)[0], tf.int64) * (replicas - 1) // replicas
            raw += rows * sparse_row_bytes(gradients[i])
            sent += rows * sparse_row_bytes(gradients[i], self._sparse_codecs.get(i))
        self.counts[replica].assign_add(tf.stack([tf.constant(1, tf.int64), raw, sent]))


def _parts(gradients, codecs, collectives, position) -> list[Any]:
    """Dense gradients by codec, the last first."""
    groups: dict[Codec, list[int]] = {}
    for i in reversed(range(len(gradients))):
        if codecs[i] is not None and not isinstance(gradients[i], tf.IndexedSlices):
            groups.setdefault(codecs[i], []).insert(0, i)
    return [
        Matrices(codec, positions, gradients, codec.seed + 1000 * position)
        if isinstance(codec, PowerSGD)
        else Words(cast(WordCodec, codec), positions, gradients, collectives)
        for codec, positions in groups.items()
    ]


def _from_step(part, steps, gradients, states, replica, collectives, options):
    """The exchange of one part, uncompressed until its codec's `start_step`."""

    def encoded():
        return part.exchange(gradients, states, replica, collectives, options)

    def raw():
        sums = collectives._all_reduce(tf.distribute.ReduceOp.SUM, list(gradients), replica, options)
        return sums, list(states), tf.reduce_all([_is_finite(total) for total in sums])

    return encoded() if part.codec.start_step == 0 else tf.cond(steps >= part.codec.start_step, encoded, raw)


def _bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _is_finite(total: Gradient) -> tf.Tensor:
    """The same on all replicas, as the totals are."""
    values = total.values if isinstance(total, tf.IndexedSlices) else total
    return tf.reduce_all(tf.math.is_finite(values)) if values.dtype.is_floating else tf.constant(True)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return tf.constant(True)
