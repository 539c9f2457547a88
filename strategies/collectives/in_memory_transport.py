"""A transport between ranks that are threads of one process, for tests without sockets and devices."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.strategies.collectives.transport import Transport, all_reduce_in_order

_Result = TypeVar("_Result")


class InMemoryTransport(Transport):
    """Exchanges tensors with ranks in other threads, eagerly only. Use `run_ranks` to make one for each rank."""

    def __init__(self, rank: int, sent: list[Any], barrier: threading.Barrier):
        self.ranks, self._rank, self._sent, self._barrier = len(sent), rank, sent, barrier

    def all_gather(self, rows: tf.Tensor, options: Any = None) -> tf.Tensor:
        del options
        return tf.concat(self._exchange(rows), axis=0)

    def all_to_all(self, rows: tf.Tensor, options: Any = None) -> tf.Tensor:
        del options
        return tf.stack([theirs[self._rank] for theirs in self._exchange(rows)])

    def all_reduce(self, tensor: tf.Tensor, options: Any = None) -> tf.Tensor:
        return all_reduce_in_order(self, tensor, options)

    def _exchange(self, rows: tf.Tensor) -> list[tf.Tensor]:
        self._sent[self._rank] = rows
        self._barrier.wait()
        received = list(self._sent)
        self._barrier.wait()  # Until all ranks have read, no rank sends again.
        return received


def run_ranks(
    ranks: int, rank_function: Callable[[InMemoryTransport, int], _Result], timeout_seconds: float = 60
) -> Sequence[_Result]:
    """Runs a function of a transport and a rank on several ranks at once, each in a thread. Returns all results.

    A rank waits for the others for up to `timeout_seconds` in one exchange.

    Raises:
      Exception: The error of a rank that has failed.
      threading.BrokenBarrierError: If a rank has left out an exchange.
    """
    sent: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=timeout_seconds)

    def run(rank: int) -> _Result:
        try:
            return rank_function(InMemoryTransport(rank, sent, barrier), rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        runs = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for error in (each.exception() for each in runs) if error is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error  # The cause, if there is one beside the broken barriers of the other ranks.
    return [each.result() for each in runs]
