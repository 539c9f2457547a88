"""Connections of each worker to each other, over which goes what steps exchange.

What TensorFlow's collectives exchange they fetch by calls of gRPC, which copy it several times; a connection of our own
takes less of the processor. TensorFlow's still tell of workers that are gone: while a step waits here, a thread asks
every second whether they would still run.
"""

import functools
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.collectives.socket_streams import stream_of

__all__ = ["TcpTransport"]

_HEADER = struct.Struct("!iiq")  # The group of an exchange, its key in the group, the bytes that follow.
_CARRIED = (tf.int8, tf.uint8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
_KEY_BYTES = 4  # Behind what has come.
_FAILED = -1  # In place of a key; those are positive.
_LOOK_SECONDS = 1.0
_UNLIKE_SECONDS = 60.0  # For a worker that exchanges something else meanwhile.
_PROBE_KEYS = 1 << 30  # Group keys of strategies count up from 1, each from a multiple of 65536.
_AT_ONCE_BYTES = 256 << 10  # To wake a thread takes longer than to copy so much.
_WAKING_BYTES = 256 << 10  # Of much that comes, before the thread that receives is waked again.
_MOST_BYTES = (1 << 31) - 1  # Of a message: sizes of TensorFlow's tensors are int32 where Python makes them.
_ROW_BITS = 20  # Of a tensor that holds more.
# Exchanges under way at a time. A step has some hundreds; each takes 2 KB before any of its bytes has come.
_MOST_ROUNDS = 1 << 14

_Tag = tuple[int, int]  # The group of an exchange, and its key.


class TcpTransport:
    """Exchanges between all workers, without copies of its own.

    Args:
      worker: Which worker this is.
      lines: A connection to each other, by worker.
      names: What to call the workers in errors.
    """

    def __init__(self, worker: int, lines: Mapping[int, socket.socket], names: Sequence[str]):
        self._worker, self._names = worker, names
        self._lines = {peer: stream_of(line) for peer, line in lines.items()}
        self._lock = threading.Lock()
        self._rounds: dict[_Tag, _PendingCollective] = {}
        self._gone: dict[int, str] = {}  # Workers that send no more, and what is to be said of each.
        self._fault: str | None = None
        self._has_aborted = threading.Event()  # TensorFlow's collectives, after a fault.
        self._sending = {peer: threading.Lock() for peer in lines}
        self._whole: queue.SimpleQueue[tuple[_Tag, _PendingCollective]] = (
            queue.SimpleQueue()
        )  # For the thread that delivers.
        self._poll = select.epoll()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._send_queues: dict[int, queue.SimpleQueue] = {peer: queue.SimpleQueue() for peer in lines}
        # How many letters were put there, and how many are sent; the latter is written by one thread alone.
        self._given, self._sent = dict.fromkeys(lines, 0), dict.fromkeys(lines, 0)
        threads: list = [("send", self._send, (peer,)) for peer in lines]
        for name, target, args in [*threads, ("receive", self._receive, ()), ("watch", self._watch, ())]:
            threading.Thread(target=target, args=args, name=f"tfdist-wire-{name}", daemon=True).start()

    def exchange(
        self, rows: tf.Tensor, group: int, key: tf.Tensor, token: tf.Tensor, *, apart: bool
    ) -> list[tf.Tensor]:
        """What each worker sends to this one, in their order.

        Args:
          rows: Of one type and shape on all workers: [workers, ...] if they go apart.
          group: The key of the group of replicas that exchange.
          key: int32 [], positive, that none of the group's other exchanges under way has.
          token: A handle by which TensorFlow orders what can fail.
          apart: Whether row j is for worker j; else all are for all.

        Returns:
          The rows of each worker; if they go apart, [1, ...], row `worker` of them.

        Raises:
          tf.errors.UnavailableError: While the graph runs, if a worker is gone or TensorFlow's collectives fail.
        """
        workers, others = len(self._names), len(self._lines)
        sent = tf.reshape(tf.bitcast(rows, tf.uint8), [workers if apart else 1, -1])
        size = tf.shape(sent, tf.int64)[1] if sent.shape[1] is None else sent.shape[1]
        with tf.init_scope(), tf.device("CPU:0"):
            inbox = tf.queue.FIFOQueue(-1, [tf.uint8])
        # In a thread of the step: to wake another takes longer. Not stateful, since TensorFlow runs those in order.
        key = tf.numpy_function(functools.partial(self._begin, inbox, group), [key, sent], tf.int32, stateful=False)

        def take():
            received = tf.reshape(inbox.dequeue(), [-1])
            return tf.bitcast(received[-_KEY_BYTES:], tf.int32), received

        # What a step has left that failed halfway is of another key.
        got, received = tf.while_loop(lambda got, _: (got != key) & (got != _FAILED), lambda *_: take(), take())
        checked = tf.cond(got == _FAILED, lambda: self._probe(token), lambda: tf.zeros([1]))
        own = rows[self._worker : self._worker + 1] if apart else rows
        with tf.control_dependencies([checked]):
            parts = tf.unstack(tf.reshape(received[: others * size], [others, size]), num=others)
        parts = [_as(part, own) for part in parts]
        return [*parts[: self._worker], own, *parts[self._worker :]]

    def carried_bytes(self) -> int:
        """How many bytes it has sent and received; more of them show that an exchange gets on, however slowly."""
        return sum(line.sent + line.received for line in self._lines.values())

    @staticmethod
    def carries(rows: tf.Tensor) -> bool:
        """Whether it exchanges such a tensor: numbers, in a graph."""
        return rows.dtype in _CARRIED and not tf.executing_eagerly()

    def _begin(self, inbox, group, key, sent):
        """Sends this worker's part of an exchange, for which its step waits at the inbox; gives the key back."""
        try:
            fault = self._join(inbox, (group, int(key)), sent)
        except Exception as error:  # Whatever it is, nobody may wait for this worker.
            fault = f"{self._names[self._worker]} can send nothing: {error}"
        if fault:
            self._fail(fault)
            self._tell_of_failure(inbox)
        return key

    def _join(self, inbox, tag, sent):
        """Why it cannot be sent, or `None`."""
        size = sent.shape[1]
        with self._lock:
            current = self._round(tag, size)
            gone = [self._gone[peer] for peer in sorted(current.missing) if peer in self._gone]
            fault = next(filter(None, [self._fault, *gone, self._unlike(current, size, self._worker)]), None)
            if fault:
                self._rounds.pop(tag)
                return fault
            current.inbox, current.since = inbox, time.monotonic()
        for peer in self._lines:
            self._give(peer, _HEADER.pack(*tag, size), sent[peer] if len(sent) > 1 else sent[0])
        if self._is_whole(tag, current, self._worker):
            # In a thread that lasts: in one of a step TensorFlow would set up what its operations need each time.
            self._whole.put((tag, current))
            os.eventfd_write(self._wakeup_fd, 1)
        return None

    def _give(self, peer, header, row):
        """Sends what the connection takes at once, if it is little and nothing waits; its thread sends the rest."""
        header, row = memoryview(header), memoryview(row)
        with self._sending[peer]:
            if row.nbytes <= _AT_ONCE_BYTES and self._given[peer] == self._sent[peer]:
                count = self._lines[peer].send_now(header, row)
                if count == header.nbytes + row.nbytes:
                    return
                header, row = header[count:], row[max(count - header.nbytes, 0) :]
            self._given[peer] += 1
            self._send_queues[peer].put((header, row))

    def _round(self, tag, size):
        """The exchange of that tag, which begins with the worker that is first."""
        if tag not in self._rounds:
            self._rounds[tag] = _PendingCollective(self._worker, len(self._names), size)
        return self._rounds[tag]

    def _unlike(self, current, size, worker):
        """What is wrong with a worker's part of an exchange, if its size is not that of another's."""
        known = current.size
        if size == known:
            return None
        return (
            f"All workers must exchange tensors of one size, but {self._names[worker]} has {size} bytes, and another "
            f"{known}. Give all the same model and the same codec, and let all take the same steps."
        )

    def _is_whole(self, tag, current, worker):
        """Whether an exchange is, now that a worker's part has come."""
        with self._lock:
            current.missing.discard(worker)
            return not current.missing and self._rounds.pop(tag, None) is current

    def _lose(self, peer, error):
        """Takes note that a worker sends no more; who waits for it need not wait on."""
        why = f"{self._names[peer]} is gone: its connection to this worker has ended ({error}). Its log may say why."
        with self._lock:
            self._gone[peer] = why
            is_missed = any(each.inbox is not None and peer in each.missing for each in self._rounds.values())
        if is_missed:
            self._fail(why)

    def _fail(self, why):
        """Lets all exchanges fail, now and from now on, and with them TensorFlow's collectives on this worker."""
        with self._lock:
            is_first = self._fault is None
            if is_first:
                self._fault = why
                rounds = list(self._rounds.values())
                self._rounds.clear()
        if not is_first:
            self._has_aborted.wait()  # Until then a step that is told of it would find nothing amiss.
            return
        try:
            _tf.context.context().abort_collective_ops(tf.errors.UNAVAILABLE, why)
        finally:
            self._has_aborted.set()
            for current in rounds:
                if current.inbox is not None:
                    self._tell_of_failure(current.inbox)

    def _tell_of_failure(self, inbox):
        with tf.device("CPU:0"):
            inbox.enqueue([np.frombuffer(np.int32(_FAILED), np.uint8)])

    def _probe(self, *tokens):
        """Raises if TensorFlow's collectives are aborted: one of this worker alone, that meets nobody."""
        return tf.raw_ops.CollectiveReduceV2(
            input=tf.zeros([1]),
            group_size=1,
            group_key=_PROBE_KEYS + self._worker,
            instance_key=1,
            ordering_token=tokens,
            merge_op="Add",
            final_op="Id",
        )

    # Threads: one for each other worker to which much is sent, one that receives, and one that watches.

    def _send(self, peer):
        line, letters = self._lines[peer], self._send_queues[peer]
        try:
            while True:
                header, row = letters.get()
                line.send(header, row)
                del row  # Else what was sent last is kept.
                self._sent[peer] += 1
        except Exception as error:  # See above.
            self._lose(peer, error)

    def _receive(self):
        arrivals = {line.fileno(): _Arrival(peer, line) for peer, line in self._lines.items()}
        for descriptor in [self._wakeup_fd, *arrivals]:
            self._poll.register(descriptor, select.EPOLLIN)
        with tf.device("CPU:0"):  # Each step has all of Python leave the caches, so what is done once is much.
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor == self._wakeup_fd:
                        self._deliver_whole()
                    elif self._fault is not None or not self._takes(arrivals[descriptor]):
                        self._poll.unregister(descriptor)

    def _takes(self, arrival):
        """Takes what is there of one exchange; whether more may come."""
        try:
            self._take(arrival)
            while arrival.has_more and self._fault is None:
                self._take(arrival)
            return True
        except (OSError, EOFError) as error:
            self._lose(arrival.peer, error)
        except Exception as error:  # Whatever it is, nobody may wait for this thread.
            own, other = self._names[self._worker], self._names[arrival.peer]
            self._fail(f"{own} can receive nothing of {other}: {error}")
        return False

    def _take(self, arrival):
        while arrival.fill():
            if arrival.current is None:
                group, key, size = _HEADER.unpack(arrival.header)
                if wrong := self._wrong(arrival.peer, group, key, size):
                    arrival.close()
                    self._fail(f"{self._names[arrival.peer]} {wrong} This worker has closed its connection to it.")
                    return
                with self._lock:
                    current = self._round((group, key), size)
                if fault := self._unlike(current, size, arrival.peer):
                    self._fail(fault)
                    return
                arrival.expect((group, key), current)
            else:
                if self._is_whole(arrival.tag, arrival.current, arrival.peer):
                    self._deliver(arrival.tag, arrival.current)
                arrival.expect(None, None)
                return

    def _wrong(self, peer, group, key, size):
        """What is wrong with a header, of whatever origin; `None` if nothing is."""
        if group < 0 or key <= 0 or not 0 <= size <= _MOST_BYTES:
            return f"has sent what is no exchange: group {group}, key {key}, {size} bytes."
        with self._lock:
            current = self._rounds.get((group, key))
            if current is not None and peer not in current.missing:
                return f"has sent its part of an exchange twice: group {group}, key {key}."
            if current is None and len(self._rounds) >= _MOST_ROUNDS:
                return f"has begun more than {_MOST_ROUNDS} exchanges that this worker has not come to."
        return None

    def _deliver_whole(self):
        os.eventfd_read(self._wakeup_fd)
        while not self._whole.empty():
            self._deliver(*self._whole.get())

    def _deliver(self, tag, current):
        try:
            current.deliver(tag[1])
        except Exception as error:  # Nobody else knows this exchange any more.
            self._fail(f"{self._names[self._worker]} can receive nothing: {error}")
            self._tell_of_failure(current.inbox)

    def _watch(self):
        while self._fault is None:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            with self._lock:
                waiting = [each for each in self._rounds.values() if each.waits(now - _LOOK_SECONDS)]
                astray = self._astray(now)
            if astray is not None:
                self._fail(
                    f"{self._names[self._worker]} has waited {_UNLIKE_SECONDS:g} s for {self._names[astray]}, which "
                    "exchanges something else. All workers must take the same steps: a step that fails on one must "
                    "end the program of that worker, or be left out by all."
                )
            elif waiting:
                try:
                    self._probe()
                except tf.errors.OpError as error:
                    self._fail(error.message)

    def _astray(self, now):
        """Who is long waited for while it has sent what this worker has not come to."""
        unasked = [each for each in self._rounds.values() if each.inbox is None]
        late = [each for each in self._rounds.values() if each.waits(now - _UNLIKE_SECONDS)]
        peers = (peer for each in late for peer in sorted(each.missing))
        return next((peer for peer in peers if any(peer not in each.missing for each in unasked)), None)


class _PendingCollective:
    """One exchange under way.

    Attributes:
      size: Bytes that each worker sends.
      missing: Whose have not come.
      inbox: The queue from which this worker's step takes them; `None` before it is there.
      since: When it was there, of the monotonic clock.
    """

    def __init__(self, worker, workers, size):
        if size > _MOST_BYTES:
            raise ValueError(
                f"an exchange takes less than 2 GiB of each worker, not {size} bytes; cut what you exchange"
            )
        self._worker, self._others, self.size, self.missing = worker, workers - 1, size, set(range(workers))
        self._tensor, self._bytes = None, None
        self.inbox, self.since = None, 0.0

    def waits(self, since):
        """Whether this worker's step has waited since before that moment."""
        return self.inbox is not None and self.since < since

    def row(self, peer):
        """Where to put what another worker sends."""
        if self._bytes is None:
            # Memory of TensorFlow's, which no other thread gives back under the interpreter's lock.
            self._tensor = tf.raw_ops.Empty(shape=_shape(self._others * self.size + _KEY_BYTES), dtype=tf.uint8)
            # Not a copy, and not `np.asarray`, which makes one to read only.
            self._bytes = self._tensor.__array__().reshape(-1)
        place = peer - (peer > self._worker)
        return self._bytes[place * self.size : (place + 1) * self.size]

    def deliver(self, key):
        """Gives this worker's step what has come, under that key."""
        self._bytes[-_KEY_BYTES:] = np.frombuffer(np.int32(key), np.uint8)
        tf.raw_ops.QueueEnqueueV2(handle=self.inbox.queue_ref, components=[self._tensor])


@functools.lru_cache(maxsize=1024)
def _shape(size):
    """Of at least so many bytes."""
    return tf.constant([size] if size <= _MOST_BYTES else [-(-size >> _ROW_BITS), 1 << _ROW_BITS])


class _Arrival:
    """What comes of another worker: a header, and as much as that says.

    Attributes:
      peer: The worker.
      header: What has come of the header.
      tag: Of the exchange whose header has come.
      current: That exchange.
    """

    def __init__(self, peer, line):
        self.peer, self._line, self.header = peer, line, bytearray(_HEADER.size)
        self.expect(None, None)

    def expect(self, tag, current):
        """Has `fill` fill the part of an exchange, or the header of the next."""
        self.tag, self.current = tag, current
        self._rest = memoryview(self.header if current is None else current.row(self.peer))
        if current is None:
            self._line.wake_at(1)

    def fill(self):
        """Takes what is there of what is expected; whether that is all of it."""
        while self._rest.nbytes:
            try:
                count = self._line.receive_into(self._rest)
            except BlockingIOError:
                self._line.wake_at(min(self._rest.nbytes, _WAKING_BYTES))
                return False
            if not count:
                raise EOFError("closed")
            self._rest = self._rest[count:]
        return True

    @property
    def has_more(self):
        """Whether something is there of which `epoll` does not know."""
        return self._line.has_more

    def close(self):
        """Ends the connection, in both directions."""
        self._line.close()


def _as(part, own):
    """Bytes as a tensor of the type and the shape of another."""
    bits = tf.reshape(part, [-1, own.dtype.size] if own.dtype.size > 1 else [-1])
    return tf.ensure_shape(tf.reshape(tf.bitcast(bits, own.dtype), tf.shape(own)), own.shape)
