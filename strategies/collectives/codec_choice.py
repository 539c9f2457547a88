"""Gradients that travel uncompressed or by one of several codecs, which a number in the graph chooses."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.codec_mixtures import UnitBytes
from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.buckets import BUCKET_BYTES, known_bytes
from tfdist.strategies.collectives.codec_parts import CodecPart
from tfdist.strategies.collectives.finite_sums import all_true
from tfdist.strategies.collectives.finite_sums import is_finite as is_finite_sum
from tfdist.strategies.collectives.packed_tensors import PackedTensors
from tfdist.strategies.collectives.sparse import all_reduce_sparse, sparse_row_bytes
from tfdist.strategies.collectives.stopwatch import Stopwatch
from tfdist.strategies.compression import Codec, WordCodec
from tfdist.strategies.sharding.part_reducer import PartReducer
from tfdist.strategies.sharding.partition import Partition

NO_TIME = (0.0, 0.0)  # Seconds of coding and of exchange.
# Most groups of dense gradients with one choice, and the bytes that a group needs.
_MOST_GROUPS, _GROUP_BYTES = 3, 8 << 20
_MOST_UNITS = 16  # Each adds some operations to the graph.
# Units with a smaller part of the bytes travel with the gradients that have no codec, so as not to be messages of their
# own. If the rest is sent by `int8`, a replica sends up to 1.2 % more bytes for each of them.
_LEAST_PART = 1 / 256
_KEYS = 4  # Most collectives of a bucket or sparse gradient on one transport.


class CodecChoice:
    """A unit of dense gradients that travel alike: uncompressed, or by one of several codecs.

    Each branch of the graph keeps the states of the other codecs. So a residual is not lost when the choice changes: it
    waits until its codec is chosen again.

    Args:
      codecs: Positions of the codecs in the list of all allowed codecs.
      parts: For each of these codecs, the gradients that it encodes. The rest of the gradients travels uncompressed.
      partitions: How each gradient of the optimizer is divided among the replicas, `None` for whole sums. Either all
        gradients of `parts` are divided, or none is.

    Attributes:
      codecs, parts: As given.
      positions: Positions of the gradients among those of the optimizer.
      is_divided: Whether a replica gets its parts of the sums.
      num_states: Number of the codec states of all `parts`.
      group: Number of its group, which has one choice.
      places: For each choice of the group, that of this unit: 0 for no codec, or 1 plus the place of a codec.
    """

    group: int
    places: list[int]

    def __init__(self, codecs: Sequence[int], parts: Sequence[CodecPart], partitions: Sequence[Any]):
        self.codecs, self.parts = list(codecs), list(parts)
        self.positions = sorted({i for part in parts for i in part.positions})
        self._partitions = {i: partitions[i] for i in self.positions}
        self.is_divided = self._partitions[self.positions[0]] is not None
        self.num_states = sum(part.num_states for part in parts)

    def join_group(self, group: int, codecs: Sequence[int]) -> None:
        """Sets the group, which chooses among `codecs`. A codec that this unit cannot use counts as no codec."""
        self.group = group
        self.places = [0, *(1 + self.codecs.index(each) if each in self.codecs else 0 for each in codecs)]

    def own_choice(self, choice: tf.Tensor) -> tf.Tensor:
        """Returns the choice of this unit, int32 [], from those of all groups."""
        return tf.gather(tf.constant(self.places), choice[self.group])

    def sum(self, choice, gradients, states, replica: int, collectives: Collectives, options: Any, timed: bool):
        """Sums the gradients over all replicas.

        Args:
          choice: int32 [], see `own_choice`; equal on all replicas.
          gradients: All gradients of the optimizer.
          states: The states of all `parts`.
          replica: Number of this worker's replica.
          collectives: The strategy's collectives.
          options: TensorFlow's `CommunicationOptions` for collectives.
          timed: Whether to measure the time.

        Returns:
          The sums in the order of `positions`, the new states, whether the sums are finite (True if none is encoded),
          and the seconds of coding and exchange; and the sums again, whole ones joined to few tensors.
        """
        members = [gradients[i] for i in self.positions]
        packing = None if self.is_divided else PackedTensors(members)
        given = members if packing is None else packing.pack(members)
        buckets = [part.num_buckets for part in self.parts]
        # A unit has about the size of a bucket. Smaller buckets would be more messages than without a choice.
        buckets.append(collectives.buckets_of(given, options, BUCKET_BYTES))
        branch = collectives.reserve(replica, _KEYS * 2 * max(buckets))

        def uncompressed(tensors, positions):
            if not tensors:
                return []
            if not self.is_divided:
                return collectives.sum_in_buckets(tensors, replica, options, BUCKET_BYTES)
            return PartReducer(collectives).reduce_scatter_tensors(
                tensors, partitions=[self._partitions[i] for i in positions], replica=replica, options=options
            )

        def raw():
            with branch():
                return uncompressed(given, self.positions), list(states), tf.constant(True), _seconds(NO_TIME)

        def encoded(place):
            own_gradients = dict(zip(self.positions, given if packing is None else packing.unpack(given), strict=True))
            part, watch = (
                self.parts[place],
                Stopwatch(collectives.device(replica), collectives.untouched(replica), timed),
            )
            first = sum(each.num_states for each in self.parts[:place])
            own = slice(first, first + part.num_states)
            rest = [i for i in self.positions if i not in set(part.positions)]
            with branch():
                sums, new, is_finite = part.exchange(
                    [own_gradients[i] for i in part.positions], states[own], replica, collectives, options, watch
                )
                beside = uncompressed([own_gradients[i] for i in rest], rest)
                is_finite = all_true([is_finite, *map(is_finite_sum, beside)])
                sums = dict(zip([*part.positions, *rest], [*sums, *beside], strict=True))
                spent = watch.seconds()
            kept = [*states[: own.start], *new, *states[own.stop :]]
            totals = [sums[i] for i in self.positions]
            return totals if packing is None else packing.pack(totals), kept, is_finite, spent

        branches = [raw, *(_called(functools.partial(encoded, place)) for place in range(len(self.parts)))]
        joined, *others = tf.switch_case(choice, branches)
        return joined if packing is None else packing.unpack(joined), *others, joined

    def codecs_of(self, choice: int, codecs: Sequence[Codec]) -> dict[int, Codec]:
        """Returns the codecs of encoded gradients, by position, with a choice of the group, from the list of all."""
        place = self.places[choice]
        return dict.fromkeys(self.parts[place - 1].positions, codecs[self.codecs[place - 1]]) if place else {}

    def bytes_of(self, gradients: Sequence[Any], collectives: Collectives, options: Any) -> list[int]:
        """Bytes that a replica sends per step with each own choice, for counts of traffic."""
        count = functools.partial(collectives.uncompressed_bytes, options=options)
        found = [count([gradients[i] for i in self.positions])]
        for part in self.parts:
            rest = [gradients[i] for i in self.positions if i not in set(part.positions)]
            found.append(part.sent_bytes(collectives) + count(rest))
        return [round(each) for each in found]


class RowCodecChoice:
    """Sparse gradients of an optimizer. Their rows travel as they are, or encoded by one of several codecs.

    Args:
      codecs: Positions of the codecs in the list of all allowed codecs.
      of_codecs: For each of these codecs, the codec for rows of each gradient that it encodes, by position.
      group: Number of its group, which has one choice.

    Attributes:
      codecs, group: As given.
      positions: Positions of the gradients among those of the optimizer.
    """

    def __init__(self, codecs: Sequence[int], of_codecs: Sequence[dict[int, WordCodec]], group: int):
        self.codecs, self._of_codecs, self.group = list(codecs), list(of_codecs), group
        self.positions = sorted({i for each in of_codecs for i in each})

    def sum(self, choice, gradients, replica: int, collectives: Collectives, options: Any):
        """Joins the rows of all replicas, in the order of `positions`; `choice` as in `CodecChoice.sum`."""
        transport = collectives.among_all(replica)
        branch = collectives.reserve(replica, _KEYS * len(self.positions))

        def joined(codecs):
            with branch():
                return [
                    all_reduce_sparse(gradients[i], transport, options, codecs.get(i), beside=transport)
                    for i in self.positions
                ]

        return tf.switch_case(choice, [functools.partial(joined, codecs) for codecs in ({}, *self._of_codecs)])

    def codecs_of(self, choice: int, codecs: Sequence[Codec]) -> dict[int, Codec]:
        """Returns the codecs of encoded gradients, by position; see `CodecChoice.codecs_of`."""
        return dict.fromkeys(self._of_codecs[choice - 1], codecs[self.codecs[choice - 1]]) if choice else {}

    def row_bytes(self, position: int, gradients: Sequence[Any]) -> list[int]:
        """Bytes that one row of the gradient at `position` takes to send with each choice."""
        return [sparse_row_bytes(gradients[position], codecs.get(position)) for codecs in ({}, *self._of_codecs)]


@dataclasses.dataclass(frozen=True)
class Choices:
    """The gradients of an optimizer for which codecs may be chosen.

    Attributes:
      dense: Dense gradients, in units of about a bucket, since the sums of a unit arrive together.
      rows: Sparse gradients.
      codecs_of_groups: For each group of units with one choice, the positions of its codecs in the list of all.
    """

    dense: list[CodecChoice]
    rows: list[RowCodecChoice]
    codecs_of_groups: list[list[int]]

    def unit_bytes(self, gradients: Sequence[Any], collectives: Collectives) -> list[UnitBytes]:
        """Returns the bytes of the units of dense gradients, for the cost model, which does not know those of rows."""
        found = []
        for unit in self.dense:
            raw = float(sum(known_bytes(gradients[i]) for i in unit.positions))
            sent = np.take(unit.bytes_of(gradients, collectives, None), unit.places)
            found.append(UnitBytes(unit.group, raw, [raw * float(each / sent[0]) for each in sent]))
        return found


def choices_among(
    codecs: Sequence[Codec],
    fits: Callable[[Codec, int], bool],
    gradients: Sequence[Any],
    partitions: Sequence[Any],
    make_part: Callable[[Codec, list[int], bool], CodecPart],
    collectives: Collectives,
) -> Choices:
    """Groups gradients for which codecs may be chosen. Leaves out codecs that save nothing because of padding.

    Args:
      codecs: The codecs.
      fits: Tells whether a codec can encode the gradient at a position.
      gradients: The gradients of an optimizer.
      partitions: How each gradient is divided among replicas; `None` for whole sums.
      make_part: Makes the part of a codec, of the gradients at some positions, which are all divided or all whole.
      collectives: The strategy's collectives.
    """
    sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    choices = Choices([], [], [])
    for is_divided in (False, True):
        alike = [i for i, each in enumerate(partitions) if i not in sparse and _is_divided(each) is is_divided]
        alike = [i for i in alike if any(fits(codec, i) for codec in codecs)]
        units = []
        # A codec such as `powersgd` sends so little that a tiny unit would be a large part of it.
        least = _LEAST_PART if all(isinstance(codec, WordCodec) for codec in codecs) else 0.0
        for positions in _units(alike, gradients, least):
            found: dict[int, CodecPart] = {}
            for place, codec in enumerate(codecs):
                own = [i for i in positions if fits(codec, i) and (isinstance(codec, WordCodec) or not is_divided)]
                part = make_part(codec, own, is_divided) if own else None
                if part and part.sent_bytes(collectives) < collectives.uncompressed_bytes([gradients[i] for i in own]):
                    found[place] = part
            if found:
                units.append(CodecChoice(list(found), list(found.values()), partitions))
        _add_groups(choices, units, gradients)
    of_codecs = {place: _row_codecs(codec, sparse, fits, gradients) for place, codec in enumerate(codecs)}
    if found_rows := {place: each for place, each in of_codecs.items() if each}:
        choices.rows.append(RowCodecChoice(list(found_rows), list(found_rows.values()), len(choices.codecs_of_groups)))
        choices.codecs_of_groups.append(list(found_rows))
    return choices


def _called(branch: Callable[[], Any]) -> Callable[[], Any]:
    """Makes a branch one operation, the call of a function that TensorFlow does not inline.

    Otherwise TensorFlow visits each operation of the branches that were not taken, in each step. With ten million
    weights and four workers on two cores, steps without a codec took about 5 % longer.
    """
    return lambda: tf_internals.not_inlined(branch)()


def _units(positions: Sequence[int], gradients: Sequence[Any], least_part: float) -> list[list[int]]:
    """Divides gradients, in the order of the layers, into units of about a bucket each.

    Leaves out units with less than `least_part` of the bytes. A small model is one unit, so it is sent after the
    backward pass: a second unit costs more, with branches and messages of its own.
    """
    sizes = [known_bytes(gradients[i]) for i in positions]
    limit = max(BUCKET_BYTES, sum(sizes) / _MOST_UNITS)
    units: list[list[int]] = []
    held = limit
    for position, size in zip(reversed(positions), reversed(sizes), strict=True):
        if held + size > limit:
            units.insert(0, [])
            held = 0
        units[0].insert(0, position)
        held += size
    least = least_part * sum(sizes)
    return [unit for unit in units if sum(known_bytes(gradients[i]) for i in unit) >= least]


def _add_groups(choices: Choices, units: Sequence[CodecChoice], gradients: Sequence[Any]) -> None:
    """Adds units, divided into groups of about equal bytes with one choice each; into one group if all are small."""
    sizes = [sum(known_bytes(gradients[i]) for i in unit.positions) for unit in units]
    number = max(1, min(_MOST_GROUPS, sum(sizes) // _GROUP_BYTES))
    groups: dict[int, list[CodecChoice]] = {}
    for unit, size, end in zip(units, sizes, itertools.accumulate(sizes), strict=True):
        groups.setdefault(int(number * (end - size / 2) / sum(sizes)), []).append(unit)
    for members in groups.values():
        codecs = sorted({codec for unit in members for codec in unit.codecs})
        for unit in members:
            unit.join_group(len(choices.codecs_of_groups), codecs)
        choices.codecs_of_groups.append(codecs)
        choices.dense.extend(members)


def _is_divided(partition: Any) -> bool | None:
    """Whether replicas get their parts of a sum, encoded too; `None` for divisions in which no codec travels."""
    return False if partition is None else True if isinstance(partition, Partition) else None


def _row_codecs(codec: Codec, sparse: Sequence[int], fits: Callable[[Codec, int], bool], gradients: Sequence[Any]):
    known = {i: codec.for_rows() for i in sparse if fits(codec, i)}
    return {
        i: each for i, each in known.items() if sparse_row_bytes(gradients[i], each) < sparse_row_bytes(gradients[i])
    }


def _seconds(values: Sequence[float]) -> tf.Tensor:
    return tf.constant(values, tf.float64)
