"""Sends messages to peers: short ones at once, long ones in a few threads."""

import collections
import queue
import threading
from collections.abc import Callable, Mapping

from tfdist.strategies.collectives.socket_streams import PlainStream

_AT_ONCE_BYTES = 256 << 10  # Waking a thread takes longer than copying this many bytes.
_MOST_THREADS = 4  # One thread fills a link. More go on while one waits for a peer that does not receive.

_Message = tuple[memoryview, memoryview]  # A header and a row of bytes.


class MessageSender:
    """Sends messages to each peer in the order in which they are given.

    The number of threads does not grow beyond four with the number of peers. Messages for several peers take turns.

    Args:
      streams: The streams to the peers, by number of the peer.
      on_error: Called, in any thread, with a peer and the error if a connection fails. Later messages to this peer are
        not sent.
    """

    def __init__(self, streams: Mapping[int, PlainStream], on_error: Callable[[int, Exception], None]):
        self._streams, self._on_error = streams, on_error
        self._locks = {peer: threading.Lock() for peer in streams}
        # The messages that are not sent yet. The first one is being sent, or its peer is in the queue of ready peers.
        self._waiting: dict[int, collections.deque[_Message]] = {peer: collections.deque() for peer in streams}
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(min(len(streams), _MOST_THREADS)):
            threading.Thread(target=self._send_waiting, name="tfdist-peers-send", daemon=True).start()

    def give(self, peer: int, header: bytes, row: memoryview) -> None:
        """Sends a message (header, row): a short one at once, if the connection has room; a thread sends the rest."""
        start, rest = memoryview(header), memoryview(row)
        with self._locks[peer]:
            waiting = self._waiting[peer]
            if rest.nbytes <= _AT_ONCE_BYTES and not waiting:
                count = self._streams[peer].send_now(start, rest)
                if count == start.nbytes + rest.nbytes:
                    return
                start, rest = start[count:], rest[max(count - start.nbytes, 0) :]
            waiting.append((start, rest))
            if len(waiting) == 1:
                self._ready.put(peer)

    def _send_waiting(self) -> None:
        while True:
            peer = self._ready.get()
            waiting = self._waiting[peer]
            try:
                self._streams[peer].send(*waiting[0])
            except Exception as error:  # On any error: steps must not wait for this peer.
                self._on_error(peer, error)
                continue
            with self._locks[peer]:
                waiting.popleft()  # Frees its memory.
                if waiting:
                    self._ready.put(peer)
