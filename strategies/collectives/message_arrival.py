"""The messages of workers' own connections: a header, and the bytes that follow, as they arrive."""

import struct

from tfdist.strategies.collectives.pending_exchange import PendingExchange
from tfdist.strategies.collectives.socket_streams import PlainStream

# The group of an exchange, its key in the group, the number of bytes that follow, and the form of the exchange.
HEADER = struct.Struct("!iiqB")
_WAKING_BYTES = 256 << 10  # Bytes of a long message that wake the receiving thread again.


class MessageArrival:
    """The message that is being received from a peer: a header, then as many bytes as the header states.

    The attribute `current` is the exchange that the header names by its `tag`.
    """

    def __init__(self, peer: int, stream: PlainStream):
        self.peer, self._stream, self.header = peer, stream, bytearray(HEADER.size)
        self.expect(None, None)

    def expect(self, tag: tuple[int, int] | None, current: PendingExchange | None) -> None:
        """Prepares `fill` for the peer's part of an exchange, or for the next header."""
        self.tag, self.current = tag, current
        self._rest = memoryview(self.header if current is None else current.row(self.peer))
        if current is None:
            self._stream.wake_at(1)

    def fill(self) -> bool:
        """Receives the available part of the expected bytes. Returns whether they are complete."""
        while self._rest.nbytes:
            try:
                count = self._stream.receive_into(self._rest)
            except BlockingIOError:
                self._stream.wake_at(min(self._rest.nbytes, _WAKING_BYTES))
                return False
            if not count:
                raise EOFError("closed")
            self._rest = self._rest[count:]
        return True

    @property
    def has_more(self) -> bool:
        """Whether received bytes remain that `epoll` does not report, so that they must be read now."""
        return self._stream.has_more

    def close(self) -> None:
        """Closes the connection to the peer in both directions."""
        self._stream.close()
