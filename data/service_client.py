"""Client of a tf.data service that decodes and maps batches for a worker: the same batches as without it."""

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.cluster.address import check_answers, split_address
from tfdist.data.batch_assignment import BatchAssignment, When
from tfdist.data.reading import Reader, drawing_afresh
from tfdist.data.sources import Source
from tfdist.data.sources.source import this_worker
from tfdist.data.weak_callbacks import weakly
from tfdist.errors import SourceError
from tfdist.readable_numbers import counted
from tfdist.run_files import ATTEMPT

_Requests = list[tuple[When, np.ndarray]]  # Batches that are requested together.

_PROTOCOL = "grpc://"
_CHUNK_ROWS = 1 << 16
_HELD = 16  # Received batches that may wait before the servers are paused; more while the next batch is missing.
_POLL_SECONDS = 0.5
_REMIND_SECONDS = 60
_RETRY_SECONDS = 120.0  # Between two tries of a silent service while the thread of the last try still waits.

_answered: set[str] = set()  # Addresses at which a service has answered this process.


class Service:
    """A tf.data service that makes batches from indices of examples.

    Each worker requests its own batches, some ten thousand examples at a time, and puts the results in order. The data
    therefore does not depend on the servers, which may come, go or be slow. The worker makes batches itself, one at a
    time, if they do not arrive in time, and logs a warning.

    Unseeded random operations in `map_fn` draw new numbers in each batch, as they do without the service. The servers
    read the source's files themselves, under the same paths. The dispatcher keeps 16 bytes per requested example in
    its folder.

    Args:
      address: Address of the dispatcher, "host:port" or "grpc://host:port"; see `tfdist data-service`.
      source: The source of the examples.
      map_fn: A function applied to each example, made of TensorFlow operations only, without Python functions, tables
        or variables.
      timeout_seconds: Longest time to wait for a batch, in seconds.

    Attributes:
      element_spec: The `element_spec` of a batch.

    Raises:
      SourceError: If no service answers at the address. If one has answered this process, or an earlier attempt under
        `tfdist run`, a warning is logged instead.
      ValueError: If the address is malformed, or the source cannot be read by other processes.
    """

    def __init__(
        self, address: str, source: Source, map_fn: Callable[..., Any] | None, *, timeout_seconds: float = 15.0
    ):
        if source.read_elsewhere(np.zeros(1, np.int64)) is None:
            raise ValueError(
                f"The servers of a tf.data service can only read TFRecord files, including those of TFDS; they cannot "
                f"read a {type(source).__name__}. Leave service out, or write the examples to TFRecord files."
            )
        self._address = _checked_address(address)
        self._name = f"The tf.data service at {self._address}"
        self._is_silent = not _answers(self._address)
        self._is_used = False
        self._source, self._map_fn, self._timeout_seconds = source, map_fn, timeout_seconds
        self._reader = reader = Reader(source, map_fn)
        self._makers: dict[int, Callable[[tf.Tensor], Any]] = {}
        self._receiving: threading.Thread | None = None  # The thread of the delivery that was closed last.
        self._asked_at = -math.inf  # When the last delivery began.
        self.element_spec = tf.data.Dataset.from_tensors(tf.zeros([0], tf.int64)).map(reader).element_spec

    def dataset(self, begin: Callable[[], BatchAssignment]) -> tf.data.Dataset:
        """Returns a dataset of (batch, the epoch that begins after it or 0), of the assignment that `begin` returns."""
        return tf.data.Dataset.from_generator(
            functools.partial(weakly(self._elements), begin),
            output_signature=(self.element_spec, tf.TensorSpec([], tf.int64)),
        )

    def _elements(self, begin: Callable[[], BatchAssignment]) -> Iterator[tuple[Any, int]]:
        assignment = begin()
        for when, indices, batch in self.batches(assignment):
            assignment.note_read(when, [indices])
            yield batch, when.begins
        assignment.note_end()

    def batches(self, assignment: BatchAssignment) -> Iterator[tuple[When, np.ndarray, Any]]:
        """Yields position, indices and batch for each batch of an assignment, made by the service or else here.

        Reads the assignment ahead.

        Raises:
          tf.errors.OpError: If an example cannot be read or mapped; the message names it.
        """
        replica = assignment.place.own.start
        begun = map(functools.partial(self._begin, replica), _chunks(assignment.batches()))
        chunk, following = next(begun, None), None
        try:
            while chunk is not None and not assignment.closed:
                following = next(begun, None)  # The servers start on it while the present chunk is used.
                requests, delivery = chunk
                if delivery is None and not self._is_silent:  # The service has answered since.
                    requests, delivery = self._begin(replica, requests)
                if delivery is None:
                    yield from self._made_here(requests, assignment)
                else:
                    yield from self._taken(requests, delivery, assignment)
                self._close(delivery)
                chunk, following = following, None
        finally:
            for left in filter(None, (chunk, following)):
                self._close(left[1])

    def _begin(self, replica: int, requests: _Requests) -> tuple[_Requests, "_Delivery | None"]:
        is_waiting = self._receiving is not None and self._receiving.is_alive()
        if self._is_silent and is_waiting and time.monotonic() - self._asked_at < _RETRY_SECONDS:
            return requests, None  # A thread may wait for ever. One for each chunk would be too many threads.
        self._asked_at = time.monotonic()
        batches = [indices for _, indices in requests]
        first = next((number for number, indices in enumerate(batches) if len(indices)), 0)
        return requests, _Delivery(lambda: self._dataset(batches, replica), first)

    def _close(self, delivery: "_Delivery | None") -> None:
        if delivery is not None:
            delivery.close()
            self._receiving = delivery.thread

    def _taken(self, requests: _Requests, delivery: "_Delivery", assignment: BatchAssignment) -> Iterator[Any]:
        # Do not wait again for a service that was silent, but use its batches if they arrive.
        patience = 0.0 if self._is_silent and not delivery.has_begun else self._timeout_seconds
        if not patience:
            self._remind()
        for number, (when, indices) in enumerate(requests):
            batch = delivery.take(number, patience, assignment) if len(indices) else None
            if assignment.closed:
                return
            if batch is not None and (self._is_silent or not self._is_used):
                again = " again" if self._is_silent else ""
                self._is_silent, self._is_used = False, True
                logging.warning("%s sends batches%s.", self._name, again)
            if batch is None and len(indices) and patience:
                problem = delivery.problem or f"sent nothing for {patience:g} s"
                logging.warning(
                    "%s %s. %s makes up to %s itself, more slowly, before it tries again. Check that the "
                    "service runs, or restart it on the same port.",
                    *(self._name, problem, this_worker(), counted(len(requests) - number, "equal batch")),
                )
                self._is_silent, patience = True, 0.0  # From here on take only batches that have arrived.
            if batch is None:
                batch = self._make_here(indices, assignment.place.own.start)
            yield when, indices, batch

    def _made_here(self, requests: _Requests, assignment: BatchAssignment) -> Iterator[Any]:
        self._remind()
        for when, indices in requests:
            if assignment.closed:
                return
            yield when, indices, self._make_here(indices, assignment.place.own.start)

    def _remind(self) -> None:
        logging.log_every_n_seconds(logging.WARNING, "%s still sends no batches.", _REMIND_SECONDS, self._name)

    def _make_here(self, indices: np.ndarray, replica: int) -> Any:
        if replica not in self._makers:
            make = functools.partial(self._reader, replica=replica)
            self._makers[replica] = tf.function(make, input_signature=[tf.TensorSpec([None], tf.int64)])
        return self._makers[replica](tf.constant(indices, tf.int64))

    def _dataset(self, batches: list[np.ndarray], replica: int) -> tf.data.Dataset:
        """A dataset that the service makes, of (number, batch) for batches with rows, in order of completion."""
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
    """Receives numbered batches from the service, in any order, in a daemon thread, which may block for ever."""

    def __init__(self, make_dataset: Callable[[], tf.data.Dataset], first: int):
        self._make_dataset = make_dataset
        self._arrived: dict[int, Any] = {}
        self._next = first
        self._ended = False
        self.problem: str | None = None
        self._news = threading.Condition()
        self.thread = threading.Thread(target=self._receive, name="tfdist-service", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # The process has too many threads.
            self.problem, self._ended = f"failed: {error}", True

    @property
    def has_begun(self) -> bool:
        """Whether any batch has arrived, so that it is worth waiting for more."""
        with self._news:
            return bool(self._arrived)

    def take(self, number: int, timeout_seconds: float, assignment: BatchAssignment) -> Any:
        """Waits for batch `number` from the service; None if it is not there in time. Call it in order of numbers."""
        deadline = time.monotonic() + timeout_seconds
        with self._news:
            self._next = number
            for earlier in [each for each in self._arrived if each < number]:  # They arrived too late.
                del self._arrived[earlier]
            self._news.notify_all()
            while number not in self._arrived and not self._ended and not assignment.closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._news.wait(min(remaining, _POLL_SECONDS))
            self._next = number + 1
            return self._arrived.pop(number, None)

    def close(self) -> None:
        """Stops receiving batches from the service."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _receive(self) -> None:
        problem = "lost some batches"
        try:
            for number, batch in self._make_dataset():
                if not self._put(int(number), batch):
                    return
        except Exception as error:  # After any error, the worker can make the batches itself.
            problem = f"failed: {str(getattr(error, 'message', error)).partition(chr(10))[0]}"
        with self._news:
            self.problem, self._ended = problem, True
            self._news.notify_all()

    def _put(self, number: int, batch: Any) -> bool:
        """Stores a batch, and waits while enough batches are stored. Returns whether more are wanted."""
        with self._news:
            self._arrived[number] = batch
            self._news.notify_all()
            self._news.wait_for(lambda: self._ended or len(self._arrived) < self._most_held())
            return not self._ended

    def _most_held(self) -> int:
        return _HELD if self._next in self._arrived else 4 * _HELD


def _chunks(batches: Iterator[tuple[When, np.ndarray]]) -> Iterator[_Requests]:
    chunk: _Requests = []
    rows = 0
    for when, indices in batches:
        chunk.append((when, indices))
        rows += len(indices)
        if rows >= _CHUNK_ROWS:
            yield chunk
            chunk, rows = [], 0
    if chunk:
        yield chunk


def _checked_address(address: str) -> str:
    """Returns `address` as "host:port"; raises if it is not the address of a service."""
    plain = address.removeprefix(_PROTOCOL)
    try:
        split_address(plain)
    except ValueError as error:
        raise ValueError(f'service must be the address of a tf.data service, such as "node0:5050": {error}') from error
    return plain


def _answers(address: str) -> bool:
    """Whether a tf.data service answers at `address`. Raises in the first attempt of a job if none ever has."""
    try:
        check_answers(address)
    except OSError as error:
        _, port = split_address(address)
        way_out = f"Start one there, with `tfdist data-service --port {port}`, or leave service out."
        if address not in _answered and os.environ.get(ATTEMPT, "0") == "0":
            raise SourceError(f"No tf.data service answers {this_worker()} at {address}: {error}. {way_out}") from error
        logging.warning("The tf.data service at %s does not answer: %s. Batches are made here.", address, error)
        return False
    _answered.add(address)
    return True
