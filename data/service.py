"""Batches that the servers of a tf.data service decode and map: those that a worker would make itself, in its order."""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.cluster.address import check_answers, split_address
from tfdist.data.reading import Reader, drawing_afresh
from tfdist.data.sources import Source
from tfdist.data.sources.source import this_worker
from tfdist.errors import SourceError
from tfdist.failure_report import ATTEMPT

Tag = TypeVar("Tag")

_PROTOCOL = "grpc://"
_CHUNK_ROWS = 1 << 16
_HELD = 16  # Batches that wait here, before servers are given a rest; more only while the next one is missing.
_POLL_SECONDS = 0.5
_REMIND_SECONDS = 60

_answered: set[str] = set()  # Addresses at which this process has found a service.


class Service:
    """A tf.data service to which a worker sends numbers of examples, and from which it gets batches of them.

    Each worker asks for its own batches, by number, some ten thousand examples at a time, and puts them in order. What
    the servers do thus never shows in the data: a server may come, go or be slow. What they do not give in time the
    worker makes itself, and says so.

    Unseeded random operations in `map_fn` draw afresh there as they do here, never the same twice. Batches that the
    worker makes itself it makes one at a time.

    The servers read the source's files themselves, under the same paths. The dispatcher keeps 16 bytes of each example
    that was ever asked for, in its folder.

    Args:
      address: Of the dispatcher, "host:port" or "grpc://host:port"; see `tfdist data-service`.
      source: What is read.
      map_fn: What to make of an example, in TensorFlow operations alone: no Python functions, tables or variables.
      timeout_seconds: How long to wait for a batch.

    Attributes:
      element_spec: Of a batch.

    Raises:
      SourceError: If nobody answers there, and nobody has before: neither to this process nor, under `tfdist run`, to
        an earlier attempt. A service that has gone is warned of.
      ValueError: If the address is none, or other processes cannot read the source.
    """

    def __init__(
        self, address: str, source: Source, map_fn: Callable[..., Any] | None, *, timeout_seconds: float = 15.0
    ):
        if source.read_elsewhere(np.zeros(1, np.int64)) is None:
            raise ValueError(
                f"The servers of a tf.data service read TFRecord files, also those of TFDS; they cannot read a "
                f"{type(source).__name__}. Leave service out, or write the examples to TFRecord files."
            )
        self._address = _checked_address(address)
        self._name = f"The tf.data service at {self._address}"
        self._is_silent = not _answers(self._address)
        self._is_used = False
        self._source, self._map_fn, self._timeout_seconds = source, map_fn, timeout_seconds
        self._reader = reader = Reader(source, map_fn)
        self._makers: dict[int, Callable[[tf.Tensor], Any]] = {}
        self.element_spec = tf.data.Dataset.from_tensors(tf.zeros([0], tf.int64)).map(reader).element_spec

    def batches(
        self,
        asked: Iterator[tuple[Tag, np.ndarray]],
        is_over: Callable[[], bool],
        *,
        replica: int,
    ) -> Iterator[tuple[Tag, np.ndarray, Any]]:
        """Makes batches.

        Args:
          asked: What stands for a batch, and the numbers of its examples, int64 [b], b from 0. Read ahead.
          is_over: Whether nobody wants any more; asked while it waits.
          replica: The first of this worker's; see `drawing_afresh`.

        Yields:
          The same, and the batch: a structure of `element_spec`.

        Raises:
          tf.errors.OpError: If an example cannot be read or mapped; names it.
        """
        begun = map(functools.partial(self._begin, replica), _chunks(asked))
        chunk, following = next(begun, None), None
        try:
            while chunk is not None and not is_over():
                following = next(begun, None)  # The servers begin with it while this one is used.
                yield from self._taken(*chunk, is_over, replica)
                chunk[1].close()
                chunk, following = following, None
        finally:
            for left in filter(None, (chunk, following)):
                left[1].close()

    def _begin(
        self, replica: int, requests: list[tuple[Tag, np.ndarray]]
    ) -> tuple[list[tuple[Tag, np.ndarray]], "_Delivery"]:
        batches = [indices for _, indices in requests]
        first = next((number for number, indices in enumerate(batches) if len(indices)), 0)
        return requests, _Delivery(lambda: self._dataset(batches, replica), first)

    def _taken(
        self, requests: list[tuple[Tag, np.ndarray]], delivery: "_Delivery", is_over: Callable[[], bool], replica: int
    ) -> Iterator[Any]:
        # Who is silent is not waited for again, but heard if it speaks.
        patience = 0.0 if self._is_silent and not delivery.has_begun else self._timeout_seconds
        if not patience:
            logging.log_every_n_seconds(logging.WARNING, "%s still gives nothing.", _REMIND_SECONDS, self._name)
        for number, (tag, indices) in enumerate(requests):
            batch = delivery.take(number, patience, is_over) if len(indices) else None
            if is_over():
                return
            if batch is not None and (self._is_silent or not self._is_used):
                again = " again" if self._is_silent else ""
                self._is_silent, self._is_used = False, True
                logging.warning("%s gives batches%s.", self._name, again)
            if batch is None and len(indices) and patience:
                problem = delivery.problem or f"gave nothing for {patience:g} s"
                logging.warning(
                    "%s %s. %s makes up to %d batches itself before it asks again: the same, only slower. See that the "
                    "service runs, or start it again on the same port.",
                    *(self._name, problem, this_worker(), len(requests) - number),
                )
                self._is_silent, patience = True, 0.0  # From here on, only what is there already.
            yield tag, indices, self._make_here(indices, replica) if batch is None else batch

    def _make_here(self, indices: np.ndarray, replica: int) -> Any:
        if replica not in self._makers:
            make = functools.partial(self._reader, replica=replica)
            self._makers[replica] = tf.function(make, input_signature=[tf.TensorSpec([None], tf.int64)])
        return self._makers[replica](tf.constant(indices, tf.int64))

    def _dataset(self, batches: list[np.ndarray], replica: int) -> tf.data.Dataset:
        """Those that are not empty, each with its number, as they come."""
        read = self._source.read_elsewhere(np.concatenate(batches))
        ends = np.cumsum([len(batch) for batch in batches])
        starts, wanted = np.append(0, ends[:-1]), [number for number, batch in enumerate(batches) if len(batch)]

        def make_example(place):
            example = self._source.decode(read(place))
            if self._map_fn is None:
                return example
            map_fn = drawing_afresh(self._map_fn, replica)
            return map_fn(*example) if isinstance(example, tuple) else map_fn(example)

        def make_batch(number):
            first, last = tf.gather(starts, number), tf.gather(ends, number)
            examples = tf.data.Dataset.range(first, last).map(make_example, tf.data.AUTOTUNE, deterministic=True)
            return number, examples.batch(last - first).get_single_element()

        numbers = tf.data.Dataset.from_tensor_slices(np.asarray(wanted, np.int64))
        made = numbers.map(make_batch, tf.data.AUTOTUNE, deterministic=False)
        service = tf.data.experimental.service
        return made.apply(service.distribute(service.ShardingPolicy.DYNAMIC, _PROTOCOL + self._address))


class _Delivery:
    """Numbered batches as they arrive in any order, received by a thread that may be abandoned: no call of it ends."""

    def __init__(self, make_dataset: Callable[[], tf.data.Dataset], first: int):
        self._make_dataset = make_dataset
        self._arrived: dict[int, Any] = {}
        self._next = first
        self._ended = False
        self.problem: str | None = None
        self._news = threading.Condition()
        threading.Thread(target=self._receive, name="tfdist-service", daemon=True).start()

    @property
    def has_begun(self) -> bool:
        """Whether anything has arrived."""
        with self._news:
            return bool(self._arrived)

    def take(self, number: int, timeout_seconds: float, is_over: Callable[[], bool]) -> Any:
        """The batch of that number, for which to wait; None if it does not come, or `is_over`. Ask in their order."""
        deadline = time.monotonic() + timeout_seconds
        with self._news:
            self._next = number
            for earlier in [each for each in self._arrived if each < number]:  # Came too late.
                del self._arrived[earlier]
            self._news.notify_all()
            while number not in self._arrived and not self._ended and not is_over():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._news.wait(min(remaining, _POLL_SECONDS))
            self._next = number + 1
            return self._arrived.pop(number, None)

    def close(self) -> None:
        """Receives no more."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _receive(self) -> None:
        problem = "lost some batches"
        try:
            for number, batch in self._make_dataset():
                if not self._put(int(number), batch):
                    return
        except Exception as error:  # Whatever it is, the worker can do without.
            problem = f"failed: {str(getattr(error, 'message', error)).partition(chr(10))[0]}"
        with self._news:
            self.problem, self._ended = problem, True
            self._news.notify_all()

    def _put(self, number: int, batch: Any) -> bool:
        """Keeps a batch, and waits while there are enough; False if no more are wanted."""
        with self._news:
            self._arrived[number] = batch
            self._news.notify_all()
            self._news.wait_for(lambda: self._ended or len(self._arrived) < self._most_held())
            return not self._ended

    def _most_held(self) -> int:
        return _HELD if self._next in self._arrived else 4 * _HELD


def _chunks(asked: Iterator[tuple[Tag, np.ndarray]]) -> Iterator[list[tuple[Tag, np.ndarray]]]:
    chunk: list[tuple[Tag, np.ndarray]] = []
    rows = 0
    for tag, indices in asked:
        chunk.append((tag, indices))
        rows += len(indices)
        if rows >= _CHUNK_ROWS:
            yield chunk
            chunk, rows = [], 0
    if chunk:
        yield chunk


def _checked_address(address: str) -> str:
    """`address` as "host:port"."""
    plain = address.removeprefix(_PROTOCOL)
    try:
        split_address(plain)
    except ValueError as error:
        raise ValueError(f'service is the address of a tf.data service, such as "node0:5050": {error}') from error
    return plain


def _answers(address: str) -> bool:
    """Whether somebody answers there; raises if nobody ever has, in the first attempt of a job."""
    try:
        check_answers(address)
    except OSError as error:
        _, port = split_address(address)
        way_out = f"Start one there, with `tfdist data-service --port {port}`, or leave service out."
        if address not in _answered and os.environ.get(ATTEMPT, "0") == "0":
            raise SourceError(
                f"No tf.data service answers at {address}: {error}. Asked by {this_worker()}. {way_out}"
            ) from error
        logging.warning("The tf.data service at %s is gone: %s. This worker makes batches itself.", address, error)
        return False
    _answered.add(address)
    return True
