"""How bytes go over a connection between two workers: as they lie in memory, or encrypted by TLS."""

import contextlib
import select
import socket
import ssl
import threading

__all__ = ["PlainStream", "TlsStream", "stream_of"]

_RECORD_BYTES = 1 << 14  # As much as a record of TLS holds.
_FIRST_BYTES = 4 * _RECORD_BYTES
_WAIT_MILLISECONDS = 50
_PIECE_BYTES = 4 << 20  # Of what is sent before it is counted: as much as a bucket of gradients.


class PlainStream:
    """A TCP connection, written and read by one thread each.

    Args:
      connection: The connection.

    Attributes:
      has_more: Whether there are received bytes of which `epoll` does not know.
      sent: How many bytes were sent; changed by the thread that sends.
      received: How many bytes were received; changed by the thread that receives.
    """

    has_more = False

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._waking_bytes = 1
        self.sent = self.received = 0

    def fileno(self) -> int:
        """The descriptor to wait at for bytes to receive."""
        return self._connection.fileno()

    def send_now(self, header: memoryview, row: memoryview) -> int:
        """Sends as much as is taken at once, and says how many bytes that is."""
        try:
            count = self._connection.sendmsg([header, row], [], socket.MSG_DONTWAIT)
        except OSError:  # There may be no room. `send` raises any other error.
            return 0
        self.sent += count
        return count

    def send(self, header: memoryview, row: memoryview) -> None:
        """Sends all, and waits until it is taken.

        Raises:
          OSError: If the connection fails.
        """
        # Without a payload, MSG_MORE would delay the header.
        self._connection.sendall(header, socket.MSG_MORE if row.nbytes else 0)
        self.sent += header.nbytes
        for begin in range(0, row.nbytes, _PIECE_BYTES):
            piece = row[begin : begin + _PIECE_BYTES]
            self._connection.sendall(piece)
            self.sent += piece.nbytes

    def receive_into(self, room: memoryview) -> int:
        """Receives what is there, and says how many bytes that is; 0 at the end.

        Raises:
          BlockingIOError: If nothing is there.
          OSError: If the connection fails.
        """
        count = self._connection.recv_into(room, 0, socket.MSG_DONTWAIT)
        self.received += count
        return count

    def wake_at(self, count: int) -> None:
        """Has `epoll` wake its reader when so many bytes are there, and not for each piece."""
        if count != self._waking_bytes:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._waking_bytes = count

    def close(self) -> None:
        """Ends the connection, in both directions."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


class TlsStream(PlainStream):
    """The same over TLS, whose reads and writes must not overlap: each is short, and none waits.

    Args:
      connection: The connection, after its handshake.
    """

    def __init__(self, connection: ssl.SSLSocket):
        super().__init__(connection)
        connection.setblocking(False)
        self._tls = connection
        self._lock = threading.Lock()
        self._is_writable = select.poll()
        self._is_writable.register(connection, select.POLLOUT)

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        """Whether TLS holds bytes that it has decrypted."""
        with self._lock:
            return self._tls.pending() > 0

    def send_now(self, header: memoryview, row: memoryview) -> int:
        """See `PlainStream.send_now`. The rest must be sent next, since TLS may have encrypted a part of it."""
        try:
            return self._send(memoryview(b"".join((header, row))))
        except OSError:
            return 0

    def send(self, header: memoryview, row: memoryview) -> None:
        """See `PlainStream.send`."""
        # Both in one piece, as `send_now` gave them to TLS.
        self._send_all(memoryview(b"".join((header, row[:_FIRST_BYTES]))))
        self._send_all(row[_FIRST_BYTES:])

    def receive_into(self, room: memoryview) -> int:
        """See `PlainStream.receive_into`."""
        try:
            with self._lock:
                count = self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        self.received += count
        return count

    def wake_at(self, count: int) -> None:
        """Does nothing: TLS needs whole records, whatever their size."""

    def _send(self, data: memoryview) -> int:
        """Sends what is taken at once of some bytes.

        In records: what TLS has not taken must be sent again as it was, from its beginning.
        """
        sent = 0
        while sent < data.nbytes:
            try:
                with self._lock:
                    sent += self._tls.send(data[sent : sent + _RECORD_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
        self.sent += sent
        return sent

    def _send_all(self, data: memoryview) -> None:
        while data.nbytes:
            count = self._send(data)
            data = data[count:]
            if data.nbytes:
                self._is_writable.poll(_WAIT_MILLISECONDS)


def stream_of(connection: socket.socket) -> PlainStream:
    """The stream over a connection."""
    return TlsStream(connection) if isinstance(connection, ssl.SSLSocket) else PlainStream(connection)
