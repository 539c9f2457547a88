"""Exchanges tensors over one TCP connection between each two workers.

TensorFlow's collectives fetch tensors with gRPC calls, which copy them several times; these connections need less CPU
time. TensorFlow still detects dead workers: while a step waits here, a thread checks every second whether TensorFlow's
collectives would still run.
"""

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.events import recorder
from tfdist.events.event_buffer import EVENTS
from tfdist.events.event_file import EXCHANGE
from tfdist.strategies.collectives.abort_probe import raise_if_aborted
from tfdist.strategies.collectives.collective_launcher import FIRST_KEY_BESIDE
from tfdist.strategies.collectives.exchange_inboxes import ExchangeInboxes
from tfdist.strategies.collectives.link_speeds import LinkSpeeds
from tfdist.strategies.collectives.message_arrival import HEADER, MessageArrival
from tfdist.strategies.collectives.message_sender import MessageSender
from tfdist.strategies.collectives.pending_exchange import FAILED, MOST_BYTES, ExchangeForm, PendingExchange
from tfdist.strategies.collectives.socket_streams import stream_of

_CARRIED = (tf.int8, tf.uint8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
_LOOK_SECONDS = 1.0
_UNLIKE_SECONDS = 60.0  # Longest wait for a worker that sends other exchanges meanwhile.
# Largest number of pending exchanges. A step has some hundreds. Each takes 2 KB before its first byte arrives.
_MOST_ROUNDS = 1 << 14

_Tag = tuple[int, int]  # The group of an exchange, and its key.

_FORMS = frozenset(each.value for each in ExchangeForm)


class PeerExchange:
    """Exchanges the tensors of steps between all workers, over their own connections and without extra copies.

    `connections` are the connections to all peers, by number of the peer. Errors use the `names` of the workers.
    """

    def __init__(self, worker: int, connections: Mapping[int, socket.socket], names: Sequence[str]):
        self._worker, self._names = worker, names
        self._streams = {peer: stream_of(connection) for peer, connection in connections.items()}
        self._lock = threading.Lock()
        self._rounds: dict[_Tag, PendingExchange] = {}
        self._refused: list[tuple[_Tag, PendingExchange]] = []  # The first exchange begun without a peer, if any.
        self._members: dict[int, tuple[int, ...]] = {}  # The workers of the groups that have not all, by group.
        self._gone: dict[int, str] = {}  # Error messages about peers without a connection.
        self._fault: str | None = None
        self._has_aborted = threading.Event()  # Set when TensorFlow's collectives are aborted after a fault.
        # Complete exchanges, which the receiving thread delivers.
        self._whole: queue.SimpleQueue[tuple[_Tag, PendingExchange]] = queue.SimpleQueue()
        self._poll = select.epoll()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sender = MessageSender(self._streams, self._lose)
        for name, target in [("receive", self._receive), ("watch", self._watch)]:
            threading.Thread(target=target, name=f"tfdist-peers-{name}", daemon=True).start()
        recorder.add_state(self._state)
        self._inboxes = ExchangeInboxes(worker, self._begin)

    def limit(self, group: int, workers: Sequence[int]) -> None:
        """Limits the exchanges of a group of replicas to some workers, this one among them.

        All workers of the group call it before any of them begins an exchange of the group.
        """
        self._members[group] = tuple(workers)

    def all_gather(self, rows: tf.Tensor, group: int, key: tf.Tensor) -> tf.Tensor:
        """Sends rows to all workers. Returns the rows of all workers in order: [n, ...] -> [workers * n, ...].

        Workers outside of the group's limits take no part, and do not count.

        Args:
          rows: A tensor of equal type and shape on all workers.
          group: The key of the group of replicas that exchange.
          key: int32 [], positive, different from the keys of the group's other pending exchanges.

        Raises:
          tf.errors.UnavailableError: While the graph runs, if a worker is gone or TensorFlow's collectives fail.
        """
        return self._call(rows, group, key, ExchangeForm.ALL_GATHER)

    def all_to_all(self, rows: tf.Tensor, group: int, key: tf.Tensor) -> tf.Tensor:
        """Sends row j to worker j. Returns the rows from all workers in order, as `rows`; see `all_gather`."""
        return self._call(rows, group, key, ExchangeForm.ALL_TO_ALL)

    def swap(self, tensor: tf.Tensor, group: int, key: tf.Tensor) -> tf.Tensor:
        """Sends a tensor to the only other worker. Returns the tensor of that worker; see `all_gather`."""
        return self._call(tensor, group, key, ExchangeForm.SWAP)

    def sum_whole(self, tensor: tf.Tensor, group: int, key: tf.Tensor) -> tf.Tensor:
        """Sends a tensor to all workers. Returns the sum of all, in the order of workers; see `all_gather`.

        The receiving thread adds, which takes TensorFlow no operations.
        """
        return self._call(tensor, group, key, ExchangeForm.SUM_WHOLE)

    def sum_parts(self, tensor: tf.Tensor, group: int, key: tf.Tensor) -> tf.Tensor:
        """Sums the tensors of all workers, of which each sums one part: [workers * n], as the result; see `all_gather`.

        Each worker sends row j to worker j, and then the sum of the rows that it gets to all. The receiving thread adds
        and begins the second exchange. The first one has the key before `key`.
        """
        return self._call(tensor, group, key, ExchangeForm.SUM_PARTS)

    def _call(self, rows, group, key, form):
        times = len(self._workers_of(group)) if form is ExchangeForm.ALL_GATHER else 1
        return self._inboxes.exchange(rows, group, key, form, times)

    def _workers_of(self, group):
        """Returns the numbers of the workers that exchange in a group."""
        return self._members.get(group) or tuple(range(len(self._names)))

    def _limits_of(self, group):
        """Returns the workers of a group, for events; nothing if all workers exchange in it."""
        members = self._members.get(group)
        return {} if members is None else {"workers": members}

    def carried_bytes(self) -> int:
        """Returns the number of bytes sent and received, by which the watchdog sees progress, however slow."""
        return sum(self.sent_and_received_bytes())

    def sent_and_received_bytes(self) -> tuple[int, int]:
        """Returns the number of bytes sent to all peers, and of those received from all."""
        streams = self._streams.values()
        return sum(stream.sent for stream in streams), sum(stream.received for stream in streams)

    def link_speeds(self) -> LinkSpeeds:
        """Returns a new record of the speeds of the links to all peers."""
        return LinkSpeeds(list(self._streams), lambda peer: self._streams[peer].counts())

    @staticmethod
    def carries(rows: tf.Tensor) -> bool:
        """Whether the connections can carry a tensor like `rows`: numbers, in a graph."""
        return rows.dtype in _CARRIED and not tf.executing_eagerly()

    def _begin(self, labels, key, rows):
        """Sends this worker's part of an exchange, returns its key. The step awaits the result in an inbox."""
        place, group, form = labels.tolist()
        inbox = self._inboxes[place]
        first = int(key) - 1 if form == ExchangeForm.SUM_PARTS.value else int(key)
        try:
            fault = self._join(inbox, (group, first), rows, ExchangeForm(form))
        except Exception as error:  # On any error: peers must not wait for this worker.
            fault = f"{self._names[self._worker]} cannot send: {error}"
        if fault:
            self._fail(fault)
            self._tell_of_failure(inbox)
        return key

    def _join(self, inbox, tag, rows, form):
        """Joins an exchange and sends this worker's part. Returns the error message if that fails, else `None`."""
        members = self._workers_of(tag[0])
        dtype, rows = rows.dtype, rows.reshape(len(members) if form.sends_rows else 1, -1).view(np.uint8)
        size = rows.shape[1]
        with self._lock:
            current = self._round(tag, size, form)
            gone = [self._gone[peer] for peer in sorted(current.missing) if peer in self._gone]
            fault = next(filter(None, [self._fault, *gone, self._unlike(current, size, form, self._worker)]), None)
            current.inbox, current.dtype, current.since = inbox, dtype, time.monotonic()
            if fault:
                self._rounds.pop(tag)
                self._refused = self._refused or [(tag, current)]
                return fault
        rows = rows if len(rows) > 1 else [rows[0]] * len(members)
        own = members.index(self._worker)
        for place in (*range(own + 1, len(members)), *range(own)):  # Otherwise all would send to the first ones first.
            self._sender.give(members[place], HEADER.pack(*tag, size, form.value), rows[place])
        if form is not ExchangeForm.SWAP:
            current.row(self._worker)[:] = rows[own]
        if self._is_whole(tag, current, self._worker):
            # The receiving thread delivers: in a thread of the step, TensorFlow would set up its operations each time.
            self._whole.put((tag, current))
            os.eventfd_write(self._wakeup_fd, 1)
        return None

    def _round(self, tag, size, form):
        """Returns the pending exchange with a tag (group, key), made when its first part comes. Needs the lock."""
        if tag not in self._rounds:
            self._rounds[tag] = PendingExchange(self._workers_of(tag[0]), size, form)
        return self._rounds[tag]

    def _unlike(self, current, size, form, worker):
        """Returns an error message if a worker's part differs from the exchange in size or form, else `None`."""
        if (size, form) == (current.size, current.form):
            return None
        own, known = (f"{each} bytes" for each in (size, current.size))
        if size == current.size:
            own, known = (f"sends them by {each.name.lower()}" for each in (form, current.form))
        return (
            f"All workers must exchange tensors of one size, in one way, but {self._names[worker]} has {own}, and "
            f"another {known}. Give all workers the same model and codec, and take the same steps on all."
        )

    def _is_whole(self, tag, current, worker):
        """Records that a worker's part of an exchange has arrived. Returns whether all parts are there now."""
        with self._lock:
            current.missing.discard(worker)
            if current.missing or self._rounds.pop(tag, None) is not current:
                return False
        group, key = tag
        since = round(current.since * 1e9)
        told = self._limits_of(group)
        EVENTS.note(EXCHANGE, since=since, group=group, key=key, bytes=current.size, last=worker, **told)
        return True

    def _lose(self, peer, error):
        """Records that the connection to a peer has ended. Fails all exchanges if this worker's step waits for it."""
        why = f"{self._names[peer]} is gone: its connection to this worker has ended ({error}). See its log."
        with self._lock:
            self._gone[peer] = why
            is_missed = any(each.inbox is not None and peer in each.missing for each in self._rounds.values())
        if is_missed:
            self._fail(why)

    def _fail(self, why):
        """Fails all present and later exchanges, and TensorFlow's collectives on this worker."""
        recorder.capture_failure(EXCHANGE, message=why)  # While the exchanges are pending.
        with self._lock:
            is_first = self._fault is None
            if is_first:
                self._fault = why
                rounds = list(self._rounds.values())
                self._rounds.clear()
        if not is_first:
            self._has_aborted.wait()  # Before the abort, `raise_if_aborted` in a failed step would not raise.
            return
        try:
            tf_internals.context.context().abort_collective_ops(tf.errors.UNAVAILABLE, why)
        finally:
            self._has_aborted.set()
            for current in rounds:
                if current.inbox is not None:
                    self._tell_of_failure(current.inbox)
        recorder.write_failure(EXCHANGE, message=why)

    def _state(self):
        """Returns the exchanges that are not complete, for the file with the events of this worker."""
        with self._lock:
            return {"pending": [self._described(*each) for each in (*self._rounds.items(), *self._refused)]}

    def _described(self, tag, pending):
        has_joined = pending.inbox is not None
        return {
            **dict(zip(("group", "key"), tag, strict=True)),
            **self._limits_of(tag[0]),
            "bytes": pending.size,
            "missing": sorted(pending.missing - {self._worker} if has_joined else pending.missing),
            "since": round(pending.since * 1e9) if has_joined else None,
        }

    def _tell_of_failure(self, inbox):
        with tf.device("CPU:0"):
            inbox.enqueue([tf.zeros([0], tf.uint8), FAILED])

    # Threads: one receiver and one watcher, beside those of the sender.

    def _receive(self):
        arrivals = {stream.fileno(): MessageArrival(peer, stream) for peer, stream in self._streams.items()}
        for descriptor in [self._wakeup_fd, *arrivals]:
            self._poll.register(descriptor, select.EPOLLIN)
        with tf.device("CPU:0"):  # Entered once, since each step evicts Python from the CPU caches and slows calls.
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor == self._wakeup_fd:
                        self._deliver_whole()
                    elif self._fault is not None or not self._takes(arrivals[descriptor]):
                        self._poll.unregister(descriptor)

    def _takes(self, arrival):
        """Receives the available bytes of a peer's messages. Returns whether the connection may bring more."""
        try:
            self._take(arrival)
            while arrival.has_more and self._fault is None:
                self._take(arrival)
            return True
        except (OSError, EOFError) as error:
            self._lose(arrival.peer, error)
        except Exception as error:  # On any error: steps must not wait for this thread.
            own, other = self._names[self._worker], self._names[arrival.peer]
            self._fail(f"{own} cannot receive from {other}: {error}")
        return False

    def _take(self, arrival):
        while arrival.fill():
            if arrival.current is None:
                group, key, size, code = HEADER.unpack(arrival.header)
                if wrong := self._wrong(arrival.peer, group, key, size, code):
                    arrival.close()
                    self._fail(f"{self._names[arrival.peer]} {wrong} This worker has closed its connection to it.")
                    return
                with self._lock:
                    current = self._round((group, key), size, ExchangeForm(code))
                if fault := self._unlike(current, size, ExchangeForm(code), arrival.peer):
                    self._fail(fault)
                    return
                arrival.expect((group, key), current)
            else:
                if self._is_whole(arrival.tag, arrival.current, arrival.peer):
                    self._deliver(arrival.tag, arrival.current)
                arrival.expect(None, None)
                return

    def _wrong(self, peer, group, key, size, code):
        """Returns an error message if a received header is invalid, else `None`. Headers are not trusted."""
        if group < 0 or key <= 0 or not 0 <= size <= MOST_BYTES or code not in _FORMS:
            return f"has sent an invalid header: group {group}, key {key}, {size} bytes, form {code}."
        if peer not in self._workers_of(group):
            return f"has sent its part of an exchange in which it takes no part: group {group}, key {key}."
        with self._lock:
            current = self._rounds.get((group, key))
            if current is not None and peer not in current.missing:
                return f"has sent its part of an exchange twice: group {group}, key {key}."
            if current is None and len(self._rounds) >= _MOST_ROUNDS:
                return f"has sent more than {_MOST_ROUNDS} exchanges that this worker has not joined."
        return None

    def _deliver_whole(self):
        os.eventfd_read(self._wakeup_fd)
        while not self._whole.empty():
            self._deliver(*self._whole.get())

    def _deliver(self, tag, current):
        fault = None
        try:
            if current.form is ExchangeForm.SUM_PARTS:
                group, key = tag
                fault = self._join(current.inbox, (group, key + 1), current.sum(), ExchangeForm.ALL_GATHER)
            else:
                current.deliver(tag[1])
        except Exception as error:
            fault = f"{self._names[self._worker]} cannot receive: {error}"
        if fault:
            self._fail(fault)
            self._tell_of_failure(current.inbox)  # `_fail` does not know this exchange any more.

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
                    "exchanges something else. All workers must take the same steps: if a step fails on one worker, "
                    "end its program, or skip the step on all workers."
                )
            elif waiting:
                try:
                    raise_if_aborted(self._worker)
                except tf.errors.OpError as error:
                    self._fail(error.message)

    def _astray(self, now):
        """Returns a worker that this one awaits too long, while that one exchanges something else; else `None`."""
        # Exchanges beside steps may take long, and tell nothing about the order of steps.
        of_steps = [each for (_, key), each in self._rounds.items() if key < FIRST_KEY_BESIDE]
        unasked = [each for each in of_steps if each.inbox is None]
        late = [each for each in of_steps if each.waits(now - _UNLIKE_SECONDS)]
        peers = (peer for each in late for peer in sorted(each.missing))
        have_sent = {peer for each in unasked for peer in each.workers if peer not in each.missing}
        return next((peer for peer in peers if peer in have_sent), None)
