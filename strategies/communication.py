"""What a strategy sends: which exchange carries which gradients, and the figures of it."""

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

from tfdist import _tf
from tfdist.strategies.collectives.exchange import RAW_BYTES, SENT_BYTES, STEPS, Exchange
from tfdist.strategies.collectives.launcher import is_added_up
from tfdist.strategies.collectives.parts import Gradient
from tfdist.strategies.compression import Codec, TopK, from_name
from tfdist.strategies.policy import OneCodec, Policy, unfit


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What this worker has sent in compressed exchanges, by a count of what collectives get, without headers.

    Attributes:
      steps: Exchanges; those that were opted out of do not count.
      raw_bytes: What uncompressed exchanges would have sent.
      sent_bytes: What was sent: values, scales, indices and padding.
      encode_seconds: What a replica has spent on encoding and decoding, with sums and residuals; a mean over the
        replicas of this worker, added up over buckets, of which several may be under way at once. Of what travels
        encoded only: buckets that do not, and steps before a codec's `start_step`, take no part. `None` unless
        `Communication.timed`.
      exchange_seconds: The same of the collectives between, from their launch to the arrival: sending, and waiting for
        others that are not as far.
    """

    steps: int
    raw_bytes: int
    sent_bytes: int
    encode_seconds: float | None
    exchange_seconds: float | None

    def __sub__(self, before: "Traffic") -> "Traffic":
        """What was sent since `before`."""
        own, other = dataclasses.astuple(self), dataclasses.astuple(before)
        since: Any = (None if now is None else now - (then or 0) for now, then in zip(own, other, strict=True))
        return Traffic(*since)

    @property
    def ratio(self) -> float:
        """How many times less was sent; 1 if nothing."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def sent_bytes_per_step(self) -> float:
        """Of all replicas of this worker."""
        return self.sent_bytes / max(self.steps, 1)


class Communication(tf.Module):
    """The gradient exchanges of a strategy with `compression`, as `strategy.communication`.

    Holds what codecs keep from step to step: residuals, momenta, low-rank factors and counts. It belongs to the worker.
    Each worker saves and restores its own, to a path of its own, before or after the first step:

        tf.train.Checkpoint(communication=strategy.communication).write(f"state-{worker}")

    Memory: what `memory_bytes` says. With error feedback that is a float32 copy of the compressed gradients for each
    replica and, from three workers on, one more divided by their number. It is freed with the optimizer. An optimizer
    that is given other variables, as after layers are frozen, exchanges these anew: what was left behind of the others
    stays, and is not sent before the same variables come again.

    A checkpoint is of one worker, of as many workers and devices, and of the same compressed gradients; restored under
    others it raises a ValueError, in `restore` or in the first step, since parts would be lost. To go on with others
    there are `state` and `redistribute`.
    """

    def __init__(self, policy: Policy, collectives: Callable[[], Any]):
        super().__init__(name="communication")
        self._timed = False
        self._policy = policy
        self._make_collectives = collectives
        self._known = _Known()
        self._has_warned = False

    @property
    def timed(self) -> bool:
        """Whether `traffic` tells what coding and exchanging took; set it before the first step.

        It slows steps down, those of quick codecs most: to look for where the time goes, not for every run.

        Raises:
          RuntimeError: If it is changed when steps have been traced, which stay as they are.
        """
        return self._timed

    @timed.setter
    def timed(self, timed: bool) -> None:
        if timed != self._timed and self._known.exchanges:
            raise RuntimeError("`timed` is set before the first step: steps that have been traced stay as they are.")
        self._timed = timed

    @property
    def exchanges(self) -> list[Exchange]:
        """All that were made, in that order, also those whose optimizer is gone."""
        return self._known.made

    def exchange_of(self, optimizer: Any, gradients: Sequence[Gradient], places: Sequence[int] = ()) -> Exchange:
        """The exchange of these gradients; made when they come for the first time.

        Args:
          optimizer: Whose they are.
          gradients: Of a replica.
          places: Of their variables among those of the optimizer, if known.

        Raises:
          ValueError: If no collective adds up such gradients, no codec takes what the policy gives it, or a checkpoint
            that was restored before has what other replicas kept.
        """
        anchor = _tf.counter_of(optimizer)
        signature = _signature(gradients, places)
        key = (id(anchor), signature)
        if key not in self._known.exchanges and signature in self._known.signatures():
            gc.collect()  # An optimizer that is gone but not collected would hold the name; not under the lock.
        with self._known.lock:
            if key not in self._known.exchanges:
                self._known.exchanges[key] = self._make(gradients, key, optimizer)
                weakref.finalize(anchor, _forget, weakref.ref(self), key).atexit = False
            self._known.exchanges[key].layout.check()
            return self._known.exchanges[key]

    def _make(self, gradients: Sequence[Gradient], key: "_Key", optimizer: Any) -> Exchange:
        _check_summed(gradients)
        codecs = [self._codec_of(gradient, position) for position, gradient in enumerate(gradients)]
        seed = int(key[1][:6], 16)
        made = Exchange(gradients, codecs, self._make_collectives(), seed, self.timed)
        _warn_of_unfit(made.dense_codecs, optimizer)
        if not made.encodes:
            self._warn_of_none(gradients, codecs)
        name = self._known.free_name(key)
        try:
            setattr(self, name, made)  # What checkpoints see.
        except ValueError:
            if made.layout.refusal is None:
                raise
            setattr(self, name, made)  # TensorFlow restores once, so that a second step would know of nothing.
        with ThreadPoolExecutor(1) as pool:  # Out of the graph that is being built.
            pool.submit(self._fill, made, key, name).result()
        self._known.names[key] = name
        self._known.made.append(made)
        return made

    def _forget(self, key: "_Key") -> None:
        """Frees what is kept for an optimizer that is gone; of its exchange only the counts stay."""
        delattr(self, self._known.names[key])
        del self._known.names[key]  # Only then may others have it.
        self._known.exchanges.pop(key).release()

    def exchanges_of(self, optimizer: Any) -> dict[str, Exchange]:
        """What carries the gradients of an optimizer, by names that are the same in another run of the program."""
        anchor = id(_tf.counter_of(optimizer))
        with self._known.lock:
            return {name: exchange for (owner, name), exchange in self._known.exchanges.items() if owner == anchor}

    def hand_over(self, optimizer: Any, name: str, fill: Callable[[Exchange], None]) -> None:
        """Has an exchange of `exchanges_of` filled, now or once the first step has made it."""
        exchange = self.exchanges_of(optimizer).get(name)
        if exchange is None:
            anchor = _tf.counter_of(optimizer)
            self._known.awaited[id(anchor), name] = (fill, anchor)  # Kept, so that nothing else gets its number.
        else:
            fill(exchange)

    def drop_awaited(self) -> int:
        """Forgets what was handed over for exchanges that no step has made; how many."""
        dropped, self._known.awaited = len(self._known.awaited), {}
        return dropped

    def state(self) -> dict[str, np.ndarray]:
        """What this worker's replicas have left behind, in a form for any number of workers.

        Costs a copy of it. For the same number of workers `tf.train.Checkpoint` is exact to the bit.
        """
        own = {
            f"{self._known.names[key]}/{i}": array
            for key, exchange in self._known.exchanges.items()
            for i, array in enumerate(exchange.pending())
        }
        return {**self._known.inherited, **own}

    def redistribute(self, states: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Takes over what earlier workers, as many as there were, have left behind.

        The sum over all is kept, up to rounding, and shared equally. Call it alike on all workers, before the first
        step or later. What is of gradients that no step exchanges, as on a single replica, waits, and `state` gives it
        on. An exchange under another codec keeps what it has, nothing if it is new, with a warning.

        Args:
          states: What `state` gave, on each of the earlier workers.

        Raises:
          ValueError: If there are none, or they are not of one run.
        """
        self._known.inherited = sum_of(states)
        for key, exchange in self._known.exchanges.items():
            self._inherit(exchange, self._known.names[key])

    def _fill(self, made: Exchange, key: Any, name: str) -> None:
        """Gives a new exchange what was kept for it."""
        self._inherit(made, name)
        fill, _ = self._known.awaited.pop(key, (None, None))
        if fill is not None:
            fill(made)

    def _inherit(self, exchange: Exchange, name: str) -> None:
        kinds = [kind for kind in self._known.inherited if kind.startswith(f"{name}/")]
        own = {kind: self._known.inherited.pop(kind) for kind in kinds}
        if not own:
            return
        try:
            exchange.spread([own[f"{name}/{i}"] for i in range(len(own))])
        except ValueError as error:
            logging.warning("Residuals of %s are left as they were: these are of another codec. %s", name, error)

    def traffic(self) -> Traffic:
        """What this worker's replicas have sent since the strategy was made."""
        counts = [count.numpy() for exchange in self.exchanges for count in exchange.counts]
        steps = sum(int(exchange.counts[0].numpy()[STEPS]) for exchange in self.exchanges)
        raw, sent = (sum(int(count[which]) for count in counts) for which in (RAW_BYTES, SENT_BYTES))
        timed = [exchange.times for exchange in self.exchanges if exchange.is_timed]
        if not timed:
            return Traffic(steps, raw, sent, None, None)
        times = [replica.numpy() for each in timed for replica in each.of_replicas]
        encoding, exchanging = np.sum(times, axis=0) / self._make_collectives().replicas
        return Traffic(steps, raw, sent, float(encoding), float(exchanging))

    def residual_norm(self) -> float:
        """The Euclidean norm of all that this worker's replicas have left behind, to be sent later."""
        squares = [tf.reduce_sum(tf.square(value)) for exchange in self.exchanges for value in exchange.residuals()]
        return float(tf.sqrt(tf.add_n(squares))) if squares else 0.0

    def memory_bytes(self) -> int:
        """Bytes that codecs keep from step to step in this worker."""
        states = [state for exchange in self.exchanges for replica in exchange.states for state in replica]
        return sum(state.shape.num_elements() * state.dtype.size for state in states)

    def _warn_of_none(self, gradients: Sequence[Gradient], codecs: Sequence[Codec | None]) -> None:
        """Says once that compression does nothing, and why not for the largest gradient."""
        if self._has_warned or not self._make_collectives().is_first(0):
            return
        self._has_warned = True
        largest = max(range(len(gradients)), key=lambda i: gradients[i].shape.num_elements() or 0)
        gradient, codec = gradients[largest], codecs[largest]
        reason = "its policy gives None"
        if codec is not None:
            reason = f"padded to whole blocks {codec!r} sends no less"
        elif isinstance(self._policy, OneCodec):
            reason = self._policy.objection(gradient.shape, gradient.dtype) or reason
        logging.warning(
            "`compression` does nothing for an optimizer whose largest gradient is of shape %s, %s: %s. All of them "
            "travel as they are.",
            gradient.shape,
            gradient.dtype.name,
            reason,
        )

    def _codec_of(self, gradient: Gradient, position: int) -> Codec | None:
        shape, dtype = gradient.shape, gradient.dtype
        chosen = self._policy(shape, dtype, position) if shape.is_fully_defined() and shape.num_elements() else None
        if not isinstance(chosen, Codec | str | None):
            raise TypeError(
                f"A policy gives a codec of tfdist.compression, a name, or None for each gradient, not {chosen!r}."
            )
        codec = from_name(chosen)
        if codec is None:
            return None
        if why_not := unfit(codec, shape, dtype):
            raise ValueError(
                f"The policy gives {codec!r} for gradient {position} of dtype {dtype.name} and shape {shape}, but "
                f"{why_not}. Give None for it."
            )
        return codec


def _signature(gradients: Sequence[Gradient], places: Sequence[int]) -> str:
    described = [(str(g.shape), g.dtype.name, isinstance(g, tf.IndexedSlices)) for g in gradients]
    return hashlib.sha256(repr((described, list(places))).encode()).hexdigest()[:16]


def _check_summed(gradients: Sequence[Gradient]) -> None:
    for position, gradient in enumerate(gradients):
        if not is_added_up(gradient.dtype):
            raise ValueError(
                f"Replicas add up gradients that are numbers, but gradient {position}, of shape {gradient.shape}, is "
                f"of {gradient.dtype.name}. Keep its variable in a float type."
            )


def _warn_of_unfit(codecs: Sequence[Codec], optimizer: keras.optimizers.Optimizer) -> None:
    """Warns of codecs that an optimizer cannot bear; rows of embeddings travel by others, which all can."""
    names = sorted({codec.name for codec in codecs if codec.for_sgd})
    kind = type(optimizer).__name__.removeprefix("Distributed")
    if names and not isinstance(optimizer, keras.optimizers.SGD):
        logging.warning(
            "compression=%s delays most of a gradient, which %s takes for a smaller one: it may learn less, or "
            "diverge. Train with keras.optimizers.SGD, choose 'int8', or set a start_step.",
            "/".join(repr(name) for name in names),
            kind,
        )
    own = getattr(optimizer, "momentum", 0)
    twice = [codec for codec in codecs if isinstance(codec, TopK) and codec.momentum]
    if twice and own:
        logging.warning(
            "%r has a momentum of its own, and %s one of %s besides: gradients count as many times more, and training "
            "may diverge. Leave one of them out.",
            twice[0],
            kind,
            own,
        )


def sum_of(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The sum of what several workers have left behind, by name.

    Raises:
      ValueError: If there are none, or one has left behind what another has not.
    """
    if not states:
        raise ValueError("`states` has what `state` gave on each of the earlier workers, at least one, but is empty.")
    names = list(dict.fromkeys(name for state in states for name in state))
    for worker, state in enumerate(states):
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"`states` has what `state` gave on each worker at the same step of one run, but number {worker} has "
                f"nothing of {', '.join(missing)}, which others have. Save all of them after the same step."
            )
    return {name: np.sum([state[name] for state in states], axis=0) for name in names}


def _forget(communication: "weakref.ref[Communication]", key: "_Key") -> None:
    known = communication()
    if known is not None:
        known._forget(key)


_Key = tuple[int, str]  # The number of an optimizer's counter, and the signature of what it exchanges.


class _Known:
    """Exchanges by optimizer and what it exchanges; apart from what checkpoints see, which takes no such keys."""

    def __init__(self):
        self.lock = threading.Lock()
        self.exchanges: dict[_Key, Exchange] = {}
        self.names: dict[_Key, str] = {}
        self.made: list[Exchange] = []
        self.inherited: dict[str, np.ndarray] = {}
        self.awaited: dict[Any, tuple[Callable[[Exchange], None], Any]] = {}

    def signatures(self) -> set[str]:
        """Of what is exchanged so far."""
        return {signature for _, signature in list(self.names)}

    def free_name(self, key: _Key) -> str:
        """A name that says what is exchanged, the same in a program that comes to it by another way."""
        taken = set(self.names.values())
        return next(name for number in itertools.count() if (name := f"exchange_{key[1]}_{number}") not in taken)
