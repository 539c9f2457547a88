"""A transport between ranks that are threads of one process, for tests without sockets and devices."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.transport import Transport, all_reduce_in_order

_Result = TypeVar("_Result")


class InMemoryTransport(Transport):
    """Exchanges tensors with ranks in other threads, eagerly only. Use `run_ranks` to make one for each rank.

    Attributes:
      ranks: Number of ranks.
      messages: Number of messages that this rank has sent over this transport.
    """

    def __init__(self, network: "_Network", members: Sequence[int], rank: int):
        self.ranks, self._rank, self._network = len(members), rank, network
        self._place, self._meeting = members.index(rank), network.meeting_of(members)
        self.messages = 0

    def among(self, members: Sequence[int]) -> "InMemoryTransport":
        """Returns a transport to some ranks, this one among them; they all call it with the same members."""
        return InMemoryTransport(self._network, members, self._rank)

    def all_gather(self, rows: tf.Tensor, options: Any = None) -> tf.Tensor:
        del options
        return tf.constant(np.concatenate(self._exchange(rows)))

    def all_to_all(self, rows: tf.Tensor, options: Any = None) -> tf.Tensor:
        del options
        return tf.constant(np.stack([theirs[self._place] for theirs in self._exchange(rows)]))

    def all_reduce(self, tensor: tf.Tensor, options: Any = None) -> tf.Tensor:
        return all_reduce_in_order(self, tensor, options)

    def _exchange(self, rows: tf.Tensor) -> list[Any]:
        sent, barrier = self._meeting
        sent[self._place] = rows.numpy()  # NumPy takes parts of arrays in a fraction of TensorFlow's time.
        self.messages += self.ranks - 1
        barrier.wait()
        received = list(sent)
        barrier.wait()  # Until all ranks have read, no rank sends again.
        return received


class _Network:
    """The memory through which ranks exchange: a place for the tensor of each rank of a group, and a barrier."""

    def __init__(self, timeout_seconds: float):
        self._timeout_seconds, self._lock = timeout_seconds, threading.Lock()
        self._meetings: dict[tuple[int, ...], tuple[list[Any], threading.Barrier]] = {}
        self._is_aborted = False

    def meeting_of(self, members: Sequence[int]) -> tuple[list[Any], threading.Barrier]:
        with self._lock:
            if tuple(members) not in self._meetings:
                barrier = threading.Barrier(len(members), timeout=self._timeout_seconds)
                self._meetings[tuple(members)] = [None] * len(members), barrier
                if self._is_aborted:
                    barrier.abort()
            return self._meetings[tuple(members)]

    def abort(self) -> None:
        """Ends all waits of ranks, now and later."""
        with self._lock:
            self._is_aborted = True
            for _, barrier in self._meetings.values():
                barrier.abort()


def run_ranks(
    ranks: int, rank_function: Callable[[InMemoryTransport, int], _Result], timeout_seconds: float = 300
) -> Sequence[_Result]:
    """Runs a function of a transport and a rank on several ranks at once, each in a thread. Returns all results.

    A rank waits for the others for up to `timeout_seconds` in one exchange.

    Raises:
      Exception: The error of a rank that has failed.
      threading.BrokenBarrierError: If a rank has left out an exchange.
    """
    network = _Network(timeout_seconds)

    def run(rank: int) -> _Result:
        try:
            return rank_function(InMemoryTransport(network, range(ranks), rank), rank)
        except BaseException:
            network.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        runs = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for error in (each.exception() for each in runs) if error is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error  # The cause, if there is one beside the broken barriers of the other ranks.
    return [each.result() for each in runs]
