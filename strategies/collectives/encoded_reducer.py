"""Sums the gradients of one optimizer over all replicas, encoded by codecs; holds their states and traffic."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.codec_trials import Alternatives
from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.buckets import bucket_bytes
from tfdist.strategies.collectives.choice_control import ChoiceControl
from tfdist.strategies.collectives.chosen_codecs import ChosenCodecs, CodecsToChoose
from tfdist.strategies.collectives.codec_choice import Choices, choices_among
from tfdist.strategies.collectives.codec_parts import part_of_codec, parts_by_codec
from tfdist.strategies.collectives.codec_state_layout import CodecStateLayout
from tfdist.strategies.collectives.finite_sums import all_true, check_if, is_finite
from tfdist.strategies.collectives.host_device import host_of
from tfdist.strategies.collectives.packed_tensors import PackedTensors
from tfdist.strategies.collectives.replica_exchange import ReplicaExchange
from tfdist.strategies.collectives.sparse import sparse_row_bytes
from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.collectives.warm_up import NO_TIME, bytes_from_step, sum_from_step, sum_rows_from_step
from tfdist.strategies.compression import Codec
from tfdist.strategies.sharding.part_codec_group import PartCodecGroup
from tfdist.strategies.sharding.part_reducer import PartReducer

# Counts of a replica since the strategy was made: exchanges, bytes that would be sent uncompressed, bytes sent. If
# workers have several devices, only bytes across the network count.
STEPS, RAW_BYTES, SENT_BYTES = range(3)


class Times:
    """Total seconds of coding and exchange, by replica of this worker, in an object that checkpoints do not track."""

    def __init__(self):
        self.of_replicas: list[tf.Variable] = []


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
      to_choose: The codecs to choose from; `codecs` then has none.

    Attributes:
      controls: For each replica of this worker, the control of its choice; empty without codecs to choose from.
      in_parts: Positions of the gradients of which a replica gets its part. The sums of the others are whole.
      is_timed: Whether the time of each step is measured.
      encodes: Whether any gradient travels encoded.
      dense_codecs: The codecs of the encoded dense gradients.
      paths: The paths of the variables of the gradients, or texts in their place.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        codecs: Sequence[Codec | None],
        collectives: Collectives,
        seed: int,
        timed: bool = False,
        partitions: Sequence[Any] = (),
        to_choose: CodecsToChoose | None = None,
    ):
        super().__init__(name="exchange")
        self._collectives, self.is_timed = collectives, timed
        self.paths: tuple[str, ...] = tuple(f"gradient_{i}" for i in range(len(gradients)))
        self._partitions = list(partitions) or [None] * len(gradients)
        parts = parts_by_codec(gradients, codecs, collectives, seed, self._partitions)
        # Leave out codecs that save nothing because of the padding to whole blocks per rank.
        self._parts = [
            part
            for part in parts
            if part.sent_bytes(collectives) < collectives.uncompressed_bytes([gradients[i] for i in part.positions])
        ]
        self._choices = Choices([], [], [])
        if to_choose is not None:
            self._choose_among(to_choose, gradients, seed)
        encoded = {i for part in self._parts for i in part.positions}
        encoded |= {i for choice in self._choices.rows for i in choice.positions}
        self._sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
        rows = {i: codec.for_rows() for i in self._sparse if (codec := codecs[i]) is not None}
        # Likewise leave out codecs that save nothing because of the padding of each row.
        self._sparse_codecs = {
            i: codec
            for i, codec in rows.items()
            if sparse_row_bytes(gradients[i], codec) < sparse_row_bytes(gradients[i])
        }
        self.dense_codecs = [part.codec for part in self._parts]
        self.encodes = bool(self._parts or self._sparse_codecs or self._choices.rows)
        shapes: list[Any] = [[part.positions, part.state_shapes] for part in self._parts]
        if to_choose is not None and self._choices.codecs_of_groups:
            shapes.append([[codec.name for codec in to_choose.codecs], self._choices.codecs_of_groups])
        self.layout = CodecStateLayout(collectives.ranks * collectives.spread, collectives.worker, shapes)
        raw = [i for i in range(len(gradients)) if i not in encoded and i not in self._sparse_codecs]
        self._raw_parts = [i for i in raw if self._partitions[i] is not None and i not in self._sparse]
        self._raw = [i for i in raw if i not in set(self._raw_parts)]
        # Beside units to choose for, the rest takes no more buckets than it takes of those of all gradients.
        dense = [each for each in gradients if not isinstance(each, tf.IndexedSlices)]
        self._raw_bucket_bytes = bucket_bytes(dense) if self._choices.dense else None
        coded_parts = {i for part in self._parts if isinstance(part, PartCodecGroup) for i in part.positions}
        self.in_parts = frozenset({*self._raw_parts, *coded_parts})
        # For each replica of this worker: the states of its parts, and its counts.
        self.states: list[list[tf.Variable]] = []
        self.counts: list[tf.Variable] = []
        self._restored = np.zeros(
            [self._collectives.replicas, 3], np.int64
        )  # Parts of the counts of earlier processes.
        self.times = Times()
        self._to_choose = to_choose if self._choices.codecs_of_groups else None
        self._unit_bytes = self._choices.unit_bytes(gradients, collectives)
        self.controls: list[ChoiceControl] = []
        # In another thread, since in a replica's thread the strategy would mirror the variables in its graph.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._make_variables).result()

    def _choose_among(self, to_choose: CodecsToChoose, gradients: Sequence[Gradient], seed: int) -> None:
        """Makes the choices, and the parts that they choose from."""

        def make_part(codec: Codec, positions: list[int], is_divided: bool) -> Any:
            partitions = [self._partitions[i] for i in positions]
            return part_of_codec(codec, positions, is_divided, gradients, partitions, self._collectives, seed)

        self._choices = choices_among(
            to_choose.codecs, to_choose.fits, gradients, self._partitions, make_part, self._collectives
        )
        self._parts = [part for choice in self._choices.dense for part in choice.parts]

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
        control = self.controls[replica] if self.controls else None
        choice: Any = None if control is None else control.choice()
        numbers = [] if control is None else [control.own_numbers(choice)]
        exchange = ReplicaExchange(replica, gradients, done, options, choice, list(self.states[replica]))
        with tf.device(collectives.device(replica)):
            self._sum_by_choice(exchange)
            self._sum_encoded(exchange)
            of_all = self._sum_uncompressed(exchange, numbers)
            self._sum_encoded_rows(exchange)
            if exchange.new:
                self._keep_states(exchange)
            self._count(exchange)
            if control is not None:
                control.end_step(gradients, exchange.totals, of_all[0], collectives.untouched(replica).handle)
            if self.is_timed:
                self.times.of_replicas[replica].assign_add(tf.add_n(exchange.seconds) if exchange.seconds else NO_TIME)
        return exchange.totals

    def _sum_by_choice(self, exchange: ReplicaExchange) -> None:
        """Sums the gradients whose codec is chosen while the graph runs."""
        of_units = [unit.own_choice(exchange.choice) for unit in self._choices.dense]
        exchange.choices_of_units = of_units
        for unit, own_choice in zip(self._choices.dense, of_units, strict=True):
            states = exchange.next_states(unit.num_states)
            *summed, joined = unit.sum(
                own_choice,
                exchange.gradients,
                states,
                exchange.replica,
                self._collectives,
                exchange.options,
                self.is_timed,
            )
            exchange.put_encoded(unit.positions, *summed)
            exchange.joined_of_units.append(joined)
        for rows in self._choices.rows:
            choice = exchange.choice[rows.group]
            sums = rows.sum(choice, exchange.gradients, exchange.replica, self._collectives, exchange.options)
            exchange.put(rows.positions, sums)

    def _sum_encoded(self, exchange: ReplicaExchange) -> None:
        """Sums the dense gradients that have a codec of their own."""
        for part in self._fixed_parts:
            members = exchange.members(part.positions)
            states = exchange.next_states(part.num_states)
            summed = sum_from_step(
                part,
                exchange.done,
                members,
                states,
                exchange.replica,
                self._collectives,
                exchange.options,
                self.is_timed,
            )
            exchange.put_encoded(part.positions, *summed)

    def _sum_uncompressed(self, exchange: ReplicaExchange, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums the gradients without a codec, whole or in parts. Returns the sums of `numbers`, which go with them."""
        replica, options = exchange.replica, exchange.options
        rows = [i for i in self._raw if i in self._sparse]
        dense = [i for i in self._raw if i not in self._sparse]
        members = [*numbers, *exchange.members(dense)]
        # With a choice, few operations look for an Inf or NaN in the sums, in a branch that is seldom taken.
        packing = PackedTensors(members) if numbers else None
        given = [*exchange.members(rows), *(members if packing is None else packing.pack(members))]
        summed = self._collectives.sum_in_buckets(given, replica, options, self._raw_bucket_bytes)
        exchange.unchecked += summed
        exchange.put(rows, summed[: len(rows)])
        raw = summed[len(rows) :] if packing is None else packing.unpack(summed[len(rows) :])
        exchange.put(dense, raw[len(numbers) :])
        own = PartReducer(self._collectives).reduce_scatter_tensors(
            exchange.members(self._raw_parts),
            partitions=[self._partitions[i] for i in self._raw_parts],
            replica=replica,
            options=options,
        )
        exchange.unchecked += own
        exchange.put(self._raw_parts, own)
        return raw[: len(numbers)]

    def _sum_encoded_rows(self, exchange: ReplicaExchange) -> None:
        """Sums the sparse gradients that have a codec of their own."""
        for i, codec in self._sparse_codecs.items():
            exchange.totals[i], spent = sum_rows_from_step(
                codec,
                exchange.done,
                exchange.gradients[i],
                exchange.replica,
                self._collectives,
                exchange.options,
                self.is_timed,
            )
            exchange.seconds.append(spent)

    def _keep_states(self, exchange: ReplicaExchange) -> None:
        """Assigns the new codec states if the sums of all gradients are finite."""
        choice, totals = exchange.choice, exchange.totals
        # Check sums that no codec has checked, and float16 ones, which may overflow when cast from float32.
        also = {i for i in self._sparse if i not in self._raw}
        also |= {i for i, each in enumerate(exchange.gradients) if each.dtype == tf.float16}
        unseen = [*exchange.unchecked, *(totals[i] for i in sorted(also))]
        units = zip(exchange.joined_of_units, exchange.choices_of_units, strict=True)
        groups = [(joined, own_choice == 0) for joined, own_choice in units]
        branch = self._collectives.reserve(exchange.replica, 1) if choice is not None and self.in_parts else None

        def assign_if_finite():
            unseen_groups = [tf.cond(*check_if(*group)) for group in groups]
            all_finite = all_true([*exchange.finite, *map(is_finite, unseen), *unseen_groups])
            if self.in_parts:  # No replica sees the whole sums.
                with contextlib.nullcontext() if branch is None else branch():
                    all_finite = self._on_all_replicas(all_finite, exchange.replica, exchange.options)
            return tf.cond(all_finite, exchange.assign_states, lambda: tf.constant(False))

        if choice is None:
            assign_if_finite()
        else:  # Without a codec no state changes.
            is_encoded = tf.reduce_any(tf.stack(exchange.choices_of_units) > 0)
            tf.cond(is_encoded, assign_if_finite, lambda: tf.constant(False))

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

    @property
    def _fixed_parts(self) -> list[Any]:
        """The parts that do not depend on a choice."""
        return [] if self._choices.dense else self._parts

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
                self.times.of_replicas.append(tf.Variable(NO_TIME, trainable=False, name="times"))
        if self._to_choose is not None:
            replicas = range(self._collectives.replicas)
            self.controls = [self._make_control(replica, self._to_choose) for replica in replicas]
            self.chosen = [control.chosen for control in self.controls]  # A part of checkpoints.

    def _make_control(self, replica: int, to_choose: CodecsToChoose) -> ChoiceControl:
        collectives = self._collectives
        ranks = collectives.ranks * collectives.spread
        names = [codec.name for codec in to_choose.codecs]
        return ChoiceControl(
            Alternatives(names, self._choices.codecs_of_groups, self._unit_bytes, ranks),
            collectives.device(replica),
            collectives.worker * collectives.replicas + replica,
            ranks,
            to_choose.tell if collectives.is_first(replica) else None,
        )

    def chosen_codecs(self) -> ChosenCodecs:
        """Returns the present codecs."""
        found: dict[int, Codec | None] = {i: part.codec for part in self._fixed_parts for i in part.positions}
        found |= self._sparse_codecs
        is_final, reason = True, ""
        if self._to_choose is not None:
            *choice, final = map(int, self.chosen[0].numpy())
            is_final, reason = bool(final), self.controls[0].decider.reason
            codecs, units = self._to_choose.codecs, self._choices
            for each in units.dense:
                found |= each.codecs_of(choice[each.group], codecs)
            for rows in units.rows:
                found |= rows.codecs_of(choice[rows.group], codecs)
        return ChosenCodecs({path: found.get(i) for i, path in enumerate(self.paths)}, is_final, reason)

    def own_counts(self) -> np.ndarray:
        """Returns the counts of this process: steps, bytes before compression and bytes sent, int64 [replicas, 3]."""
        return np.stack([count.numpy() for count in self.counts]) - self._restored

    def keep_own_counts(self, own: np.ndarray) -> None:
        """Notes that a backup has set the counts, after they were `own` for this process."""
        self._restored += self.own_counts() - own

    def _count(self, exchange: ReplicaExchange) -> None:
        """Counts a step and its bytes for a replica. Sparse rows count without the padding to the longest replica."""
        collectives, gradients, done, choice = self._collectives, exchange.gradients, exchange.done, exchange.choice
        options = exchange.options
        dense = [gradients[i] for i in [*self._raw, *self._raw_parts] if i not in self._sparse]
        raw = sent = round(collectives.uncompressed_bytes(dense, options))
        for unit in self._choices.dense:
            bytes_of = unit.bytes_of(gradients, collectives, options)
            raw += bytes_of[0]
            sent += tf.gather(tf.constant(np.take(bytes_of, unit.places), tf.int64), choice[unit.group])
        for part in self._fixed_parts:
            uncompressed = round(collectives.uncompressed_bytes([gradients[i] for i in part.positions], options))
            raw += uncompressed
            sent += bytes_from_step(part.codec.start_step, done, round(part.sent_bytes(collectives)), uncompressed)
        others = collectives.ranks * collectives.spread - 1
        of_rows = {
            i: tf.gather(tf.constant(each.row_bytes(i, gradients), tf.int64), choice[each.group])
            for each in self._choices.rows
            for i in each.positions
        }
        for i in self._sparse:
            rows = tf.cast(tf.shape(exchange.totals[i].indices)[0], tf.int64) * others // (others + 1)
            codec = self._sparse_codecs.get(i)
            uncompressed, encoded = sparse_row_bytes(gradients[i]), sparse_row_bytes(gradients[i], codec)
            raw += rows * uncompressed
            sent += (
                rows * of_rows[i]
                if i in of_rows
                else rows * bytes_from_step(0 if codec is None else codec.start_step, done, encoded, uncompressed)
            )
        self.counts[exchange.replica].assign_add(tf.convert_to_tensor([1, raw, sent], tf.int64))
