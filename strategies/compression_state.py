"""The compressed gradient exchanges of a strategy, their traffic, and the states of their codecs."""

import dataclasses
import gc
import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals
from tfdist.strategies.auto_compression import AUTO, AutoPolicy
from tfdist.strategies.codec_trials import TrialOrder
from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.chosen_codecs import ChosenCodecs, CodecsToChoose
from tfdist.strategies.collectives.collective_launcher import is_added_up
from tfdist.strategies.collectives.encoded_reducer import (
    RAW_BYTES,
    SENT_BYTES,
    STEPS,
    EncodedReducer,
)
from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.compression import Codec, TopK, from_name
from tfdist.strategies.compression_policy import OneCodec, Policy, unfit


@dataclasses.dataclass(frozen=True)
class TrafficTotals:
    """Traffic of this worker's compressed exchanges: the payload of collectives, without headers.

    Attributes:
      steps: Number of exchanges, without those inside of `uncompressed()`.
      raw_bytes: Bytes that uncompressed exchanges would have sent. With a codec, a replica first adds up the rows of a
        sparse gradient that have the same index. Such rows count once, though an uncompressed exchange sends each.
      sent_bytes: Bytes sent: values, scales, indices and padding.
      encode_seconds: Seconds spent on encoding, decoding, sums and residuals: the mean over this worker's replicas, and
        the sum over buckets. Several buckets may run at once. Counts encoded buckets only, from each codec's
        `start_step` on. None unless the strategy was made with `time_exchanges=True`.
      exchange_seconds: Seconds spent in collectives, from launch to arrival, which includes the time spent waiting for
        other replicas. Counted like `encode_seconds`.
    """

    steps: int
    raw_bytes: int
    sent_bytes: int
    encode_seconds: float | None
    exchange_seconds: float | None

    def __sub__(self, before: "TrafficTotals") -> "TrafficTotals":
        """The traffic since `before`, an earlier total."""
        own, other = dataclasses.astuple(self), dataclasses.astuple(before)
        since: Any = (None if now is None else now - (then or 0) for now, then in zip(own, other, strict=True))
        return TrafficTotals(*since)

    def __add__(self, more: "TrafficTotals") -> "TrafficTotals":
        """The sum of two totals of traffic. A time that only one of them has is kept."""
        own, other = dataclasses.astuple(self), dataclasses.astuple(more)
        both: Any = (b if a is None else a + (b or 0) for a, b in zip(own, other, strict=True))
        return TrafficTotals(*both)

    @property
    def ratio(self) -> float:
        """Bytes of uncompressed exchanges divided by bytes sent; 1 if nothing was sent."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def sent_bytes_per_step(self) -> float:
        """Mean of the bytes sent per step by all replicas of this worker."""
        return self.sent_bytes / max(self.steps, 1)


class CompressionState(tf.Module):
    """The gradient exchanges of a strategy with `compression`, available as `strategy.communication`.

    Holds the states of the codecs (residuals, momenta, low-rank factors) and counts of traffic, for one worker. Each
    worker saves and restores them under its own path, before or after the first step:

        tf.train.Checkpoint(communication=strategy.communication).write(f"state-{worker}")

    Memory: see `memory_bytes`. Error feedback keeps a float32 copy of the compressed gradients per replica and, from
    three workers on, one more copy divided by the number of workers, unless `model_sharding` divides the gradients.
    Both are freed with the optimizer. If an optimizer gets other variables, as after freezing layers, they get a new
    exchange. The residuals of the old exchange stay, and are sent once the optimizer gets the old variables again.

    A checkpoint only fits the same worker, the same number of workers and devices, and the same compressed gradients.
    Otherwise `restore` or the first step raises a ValueError, since residuals would be lost. To continue with another
    number of workers use `state` and `redistribute`.
    """

    def __init__(self, policy: Policy, collectives: Collectives, time_exchanges: bool):
        super().__init__(name="communication")
        self._policy, self._time_exchanges = policy, time_exchanges
        self._collectives = collectives
        self._known = _Known()
        self._has_warned = False

    @property
    def exchanges(self) -> list[EncodedReducer]:
        """The `EncodedReducer`s of all optimizers, deleted ones too, in the order in which they were made."""
        return self._known.made

    def exchange_of(
        self,
        optimizer: Any,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        partitions: Sequence[Any] = (),
        fragment: str = "",
    ) -> EncodedReducer:
        """Returns the `EncodedReducer` that sums these gradients of an optimizer, and makes it at the first call.

        `variables` are the variables of the gradients; empty if they are not known. `partitions` say how the sums are
        divided among replicas; see `EncodedReducer`. `fragment` is that of a `ReductionRequest`.

        Raises:
          ValueError: If collectives cannot sum gradients of this type, if the policy chooses a codec that cannot encode
            a gradient, or if the checkpoint restored before does not fit this worker.
        """
        anchor = keras_internals.counter_of(optimizer)
        places = keras_internals.places_in_optimizer(optimizer, variables)
        signature = _signature(gradients, places)
        key = (id(anchor), signature)
        if key not in self._known.exchanges and signature in self._known.signatures():
            gc.collect()  # Free the names of deleted optimizers. Not under the lock, which `_forget` may need.
        with self._known.lock:
            if key not in self._known.exchanges:
                self._known.exchanges[key] = self._make(gradients, key, optimizer, places, partitions, fragment)
                weakref.finalize(anchor, _forget, weakref.ref(self), key).atexit = False
            self._known.exchanges[key].layout.check()
            return self._known.exchanges[key]

    def _make(
        self,
        gradients: Sequence[Gradient],
        key: "_Key",
        optimizer: Any,
        places: list[int],
        partitions: Sequence[Any],
        fragment: str,
    ) -> EncodedReducer:
        _check_summed(gradients)
        paths = keras_internals.paths_in_optimizer(optimizer, places) or [""] * len(gradients)
        codecs = list(map(self._codec_of, gradients, paths, itertools.count()))
        seed = int(key[1][:6], 16)
        to_choose = self._to_choose(gradients, optimizer)
        made = EncodedReducer(gradients, codecs, self._collectives, seed, self._time_exchanges, partitions, to_choose)
        made.paths = tuple(paths)
        _warn_of_unfit(made.dense_codecs, optimizer)
        if not made.encodes:
            self._warn_of_none(gradients, codecs, fragment)
        name = self._known.free_name(key)
        try:
            setattr(self, name, made)  # Makes the exchange part of checkpoints.
        except ValueError:
            if made.layout.refusal is None:
                raise
            setattr(self, name, made)  # TensorFlow restores only once. `CodecStateLayout.check` raises.
        with ThreadPoolExecutor(1) as pool:  # Another thread, to run outside of the graph being traced.
            pool.submit(self._fill, made, key, name).result()
        self._known.names[key] = name
        self._known.made.append(made)
        return made

    def _to_choose(self, gradients: Sequence[Gradient], optimizer: Any) -> CodecsToChoose | None:
        """Returns the codecs to choose from while a program trains; `None` unless the policy is `Auto`."""
        if not isinstance(self._policy, AutoPolicy):
            return None

        # The exchange keeps `fits`, so this may not hold the gradients: they would keep the graph and the variables.
        kinds = [(gradient.shape, gradient.dtype) for gradient in gradients]

        def fits(codec: Codec, position: int) -> bool:
            return OneCodec(codec)(*kinds[position], "") is not None

        return CodecsToChoose(self._policy.safe_for(optimizer), fits, _ChoiceLog())

    def choices(self) -> list[ChosenCodecs]:
        """The present codecs of the gradients of each optimizer, in the order of their first steps.

        With `compression="auto"` they change while a program trains; `is_final` tells whether the trials are over.
        """
        return [exchange.chosen_codecs() for exchange in self._known.exchanges.copy().values()]

    def _forget(self, key: "_Key") -> None:
        """Frees the codec states of a deleted optimizer. Its counts of traffic stay."""
        delattr(self, self._known.names[key])
        del self._known.names[key]  # After the attribute is gone, since another exchange may take the name now.
        self._known.exchanges.pop(key).release()

    def exchanges_of(self, optimizer: Any) -> dict[str, EncodedReducer]:
        """The `EncodedReducer`s of an optimizer, by names that are equal in each run of the program."""
        anchor = id(keras_internals.counter_of(optimizer))
        exchanges = self._known.exchanges.copy()  # See `named`.
        return {name: exchange for (owner, name), exchange in exchanges.items() if owner == anchor}

    def hand_over(self, optimizer: Any, name: str, fill: Callable[[EncodedReducer], None]) -> None:
        """Calls `fill`, which sets codec states, with an `EncodedReducer`, now or once the first step has made it.

        Its name is one of `exchanges_of`.
        """
        exchange = self.exchanges_of(optimizer).get(name)
        if exchange is None:
            anchor = keras_internals.counter_of(optimizer)
            self._known.awaited[id(anchor), name] = (fill, anchor)  # Holding the anchor keeps its id unique.
        else:
            fill(exchange)

    def drop_awaited(self) -> int:
        """Drops the `hand_over` calls for `EncodedReducer`s that no step has made, and returns their number."""
        dropped, self._known.awaited = len(self._known.awaited), {}
        return dropped

    def state(self) -> dict[str, np.ndarray]:
        """Residuals and other states of this worker's codecs, in a form for any number of workers.

        Costs a copy of the states. For the same number of workers, `tf.train.Checkpoint` restores the same bits.
        """
        own = {
            f"{name}/{i}": array
            for name, exchange in self._known.named().items()
            for i, array in enumerate(exchange.pending())
        }
        return {**self._known.inherited, **own}

    def redistribute(self, states: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the codec states that a run with any number of workers has saved by `state`.

        The sum over all workers is preserved, up to rounding, and divided equally among the replicas. Call it on all
        workers with the same `states`, at any time. States of gradients that no step exchanges, as on one replica, are
        kept and returned by `state`. An exchange under another codec keeps its own states and logs a warning.

        Args:
          states: The results of `state` on all workers of the earlier run.

        Raises:
          ValueError: If `states` is empty, or its entries are not of the same run.
        """
        self._known.inherited = sum_of(states)
        for name, exchange in self._known.named().items():
            self._inherit(exchange, name)

    def _fill(self, made: EncodedReducer, key: Any, name: str) -> None:
        """Sets the codec states of a new `EncodedReducer` from an earlier `redistribute` or `hand_over`."""
        self._inherit(made, name)
        fill, _ = self._known.awaited.pop(key, (None, None))
        if fill is not None:
            fill(made)

    def _inherit(self, exchange: EncodedReducer, name: str) -> None:
        kinds = [kind for kind in self._known.inherited if kind.startswith(f"{name}/")]
        own = {kind: self._known.inherited.pop(kind) for kind in kinds}
        if not own:
            return
        try:
            exchange.spread([own[f"{name}/{i}"] for i in range(len(own))])
        except ValueError as error:
            logging.warning("Residuals of %s were not restored, because they are of another codec. %s", name, error)

    def traffic(self) -> TrafficTotals:
        """The traffic of this worker's replicas since the strategy was made, without that before a restored backup."""
        counts = [exchange.own_counts() for exchange in self.exchanges]
        steps = sum(int(count[0, STEPS]) for count in counts)
        raw, sent = (sum(int(count[:, which].sum()) for count in counts) for which in (RAW_BYTES, SENT_BYTES))
        timed = [exchange.times for exchange in self.exchanges if exchange.is_timed]
        if not timed:
            return TrafficTotals(steps, raw, sent, None, None)
        times = [replica.numpy() for each in timed for replica in each.of_replicas]
        encoding, exchanging = np.sum(times, axis=0) / self._collectives.replicas
        return TrafficTotals(steps, raw, sent, float(encoding), float(exchanging))

    def residual_norm(self) -> float:
        """The Euclidean norm of all residuals of this worker's replicas."""
        squares = [tf.reduce_sum(tf.square(value)) for exchange in self.exchanges for value in exchange.residuals()]
        return float(tf.sqrt(tf.add_n(squares))) if squares else 0.0

    def memory_bytes(self) -> int:
        """Bytes of memory that the codecs' states take on this worker."""
        states = [state for exchange in self.exchanges for replica in exchange.states for state in replica]
        return sum(state.shape.num_elements() * state.dtype.size for state in states)

    def _warn_of_none(self, gradients: Sequence[Gradient], codecs: Sequence[Codec | None], fragment: str) -> None:
        """Warns if no gradient of an optimizer is compressed, with the reason for the largest gradient.

        Warns once for all optimizers, and once for each fragment.
        """
        if (self._has_warned and not fragment) or not self._collectives.is_first(0):
            return
        self._has_warned = True
        largest = max(range(len(gradients)), key=lambda i: gradients[i].shape.num_elements() or 0)
        gradient, codec = gradients[largest], codecs[largest]
        reason = "the policy returns None"
        if codec is not None:
            reason = f"padded to whole blocks, {codec!r} sends no fewer bytes"
        elif isinstance(self._policy, AutoPolicy):
            reason = "none of the codecs that are safe for the optimizer makes it smaller"
        elif isinstance(self._policy, OneCodec):
            reason = self._policy.objection(gradient.shape, gradient.dtype) or reason
        logging.warning(
            "`compression` does nothing for %s whose largest gradient is of shape %s, %s: %s. All its gradients travel "
            "uncompressed.%s",
            f"{fragment} of DiLoCo," if fragment else "an optimizer",
            gradient.shape,
            gradient.dtype.name,
            reason,
            " To join them with larger ones, give fewer `fragments`." if fragment else "",
        )

    def described_codecs(self, model: keras.Model) -> list[str]:
        """The codecs that a user's function chooses for a model's variables, to compare workers. Paths may differ."""
        if isinstance(self._policy, OneCodec | AutoPolicy):
            return []
        variables = [each for each in model.trainable_variables if each.value.shape.num_elements()]
        choices = [self._policy(each.value.shape, each.value.dtype, each.path) for each in variables]
        return [f"{choice!r} as the codec of trainable variable {number}" for number, choice in enumerate(choices)]

    def _codec_of(self, gradient: Gradient, path: str, position: int) -> Codec | None:
        shape, dtype = gradient.shape, gradient.dtype
        chosen = self._policy(shape, dtype, path) if shape.is_fully_defined() and shape.num_elements() else None
        if not isinstance(chosen, Codec | str | None):
            raise TypeError(
                "A `compression` function must return a codec of tfdist.compression, its name, or None for each "
                f"gradient, got {chosen!r}. Change its result."
            )
        if chosen == AUTO:
            raise ValueError(
                "A `compression` function must return a codec of tfdist.compression, its name, or None for each "
                "gradient, got 'auto', which chooses for all gradients. Pass compression='auto' to the strategy."
            )
        codec = from_name(chosen)
        if codec is None:
            return None
        if why_not := unfit(codec, shape, dtype):
            raise ValueError(
                f"The `compression` function returns {codec!r} for gradient {position} of dtype {dtype.name}, shape "
                f"{shape} and path {path!r}, but {why_not}. Return None for this gradient."
            )
        return codec


def _signature(gradients: Sequence[Gradient], places: Sequence[int]) -> str:
    described = [(str(g.shape), g.dtype.name, isinstance(g, tf.IndexedSlices)) for g in gradients]
    return hashlib.sha256(repr((described, list(places))).encode()).hexdigest()[:16]


class _ChoiceLog:
    """Logs the codecs that an exchange has chosen: a change as a warning, since absl hides lower levels by default."""

    def __init__(self) -> None:
        self._logged: tuple[int, ...] | None = None

    def __call__(self, names: str, order: TrialOrder) -> None:
        """Logs a choice with its reason. A first choice without any codec is no change."""
        is_change = any(order.choice) if self._logged is None else order.choice != self._logged
        self._logged = order.choice
        level = logging.WARNING if is_change else logging.INFO
        logging.log(level, "compression='auto' uses %s: %s.", names, order.reason)


def _check_summed(gradients: Sequence[Gradient]) -> None:
    for position, gradient in enumerate(gradients):
        if not is_added_up(gradient.dtype):
            raise ValueError(
                f"Gradients must have a numeric type, so that replicas can sum them, but gradient {position}, of shape "
                f"{gradient.shape}, has type {gradient.dtype.name}. Use a float type for its variable."
            )


def _warn_of_unfit(codecs: Sequence[Codec], optimizer: keras.optimizers.Optimizer) -> None:
    """Warns of codecs that do not suit an optimizer. Sparse gradients use other codecs, which suit all optimizers."""
    names = sorted({codec.name for codec in codecs if codec.for_sgd})
    kind = type(optimizer).__name__.removeprefix("Distributed")
    if names and not isinstance(optimizer, keras.optimizers.SGD):
        logging.warning(
            "compression=%s delays most of each gradient, so that %s underestimates its size. Training may be worse or "
            "diverge. Train with keras.optimizers.SGD, choose 'int8', or set a start_step.",
            "/".join(repr(name) for name in names),
            kind,
        )
    own = getattr(optimizer, "momentum", 0)
    twice = [codec for codec in codecs if isinstance(codec, TopK) and codec.momentum]
    if twice and own:
        logging.warning(
            "%r applies momentum, and so does %s, with momentum=%s. Both together make the updates too large, and "
            "training may diverge. Set one of them to 0.",
            twice[0],
            kind,
            own,
        )


def sum_of(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The sum of the codec states that several workers have saved, by name.

    Raises:
      ValueError: If `states` is empty, or its entries have different names.
    """
    if not states:
        raise ValueError("`states` must hold the result of `state` of each worker of a run, at least one, got none.")
    names = list(dict.fromkeys(name for state in states for name in state))
    for worker, state in enumerate(states):
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"`states` must hold the results of `state` of all workers at the same step of one run, but entry "
                f"{worker} lacks {', '.join(missing)}, unlike others. Save all of them after the same step."
            )
    return {name: np.sum([state[name] for state in states], axis=0) for name in names}


def _forget(communication: "weakref.ref[CompressionState]", key: "_Key") -> None:
    known = communication()
    if known is not None:
        known._forget(key)


_Key = tuple[int, str]  # The `id` of an optimizer's step counter, and the signature of its gradients.


class _Known:
    """The `EncodedReducer` of each optimizer. A separate object: checkpoints cannot track dicts with such keys."""

    def __init__(self):
        self.lock = threading.Lock()
        self.exchanges: dict[_Key, EncodedReducer] = {}
        self.names: dict[_Key, str] = {}
        self.made: list[EncodedReducer] = []
        self.inherited: dict[str, np.ndarray] = {}
        self.awaited: dict[Any, tuple[Callable[[EncodedReducer], None], Any]] = {}

    def named(self) -> dict[str, EncodedReducer]:
        """The exchanges by name. From copies, since the garbage collector may call `_forget` at any time."""
        exchanges, names = self.exchanges.copy(), self.names.copy()
        return {names[key]: exchange for key, exchange in exchanges.items() if key in names}

    def signatures(self) -> set[str]:
        """Checksums of the shapes and types of the gradients that optimizers have exchanged so far."""
        return {signature for _, signature in list(self.names)}

    def free_name(self, key: _Key) -> str:
        """An unused name of an `EncodedReducer`, by its gradients' checksum, so that it is equal in each run."""
        taken = set(self.names.values())
        return next(name for number in itertools.count() if (name := f"exchange_{key[1]}_{number}") not in taken)
