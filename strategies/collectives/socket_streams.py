"""Streams of bytes over a connection between two workers, plain or encrypted by TLS."""

import contextlib
import select
import socket
import ssl
import threading

from tfdist.strategies.collectives.link_counts import LinkCounts, read_counts

_RECORD_BYTES = 1 << 14  # Largest payload of a TLS record.
_FIRST_BYTES = 4 * _RECORD_BYTES
_WAIT_MILLISECONDS = 50
_PIECE_BYTES = 4 << 20  # Bytes to send before `sent` is updated; the size of a bucket of gradients.


class PlainStream:
    """A TCP connection between two workers, written by one thread and read by another.

    Attributes:
      has_more: Whether bytes have arrived that `epoll` does not know of.
      sent: Number of bytes sent; changed by the sending thread.
      received: Number of bytes received; changed by the receiving thread.
    """

    has_more = False

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._waking_bytes = 1
        self.sent = self.received = 0

    def fileno(self) -> int:
        """Returns the file descriptor to poll for bytes to receive."""
        return self._connection.fileno()

    def send_now(self, header: memoryview, row: memoryview) -> int:
        """Sends as many bytes of a message (header, row) as the connection takes at once. Returns their number."""
        try:
            count = self._connection.sendmsg([header, row], [], socket.MSG_DONTWAIT)
        except OSError:  # The send buffer may be full. `send` raises any other error.
            return 0
        self.sent += count
        return count

    def send(self, header: memoryview, row: memoryview) -> None:
        """Sends all bytes of a message (header, row), and waits until the connection has taken them.

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
        """Receives the bytes that have arrived, as many as `room` holds. Returns their number; 0 at the end.

        Raises:
          BlockingIOError: If no bytes have arrived.
          OSError: If the connection fails.
        """
        count = self._connection.recv_into(room, 0, socket.MSG_DONTWAIT)
        self.received += count
        return count

    def wake_at(self, count: int) -> None:
        """Lets `epoll` wake the reader once `count` bytes have arrived, and not for each packet."""
        if count != self._waking_bytes:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._waking_bytes = count

    def counts(self) -> LinkCounts | None:
        """Returns what the kernel has counted on this connection; `None` if it does not count."""
        return read_counts(self._connection, self.sent)

    def close(self) -> None:
        """Closes the connection in both directions."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


class TlsStream(PlainStream):
    """A connection between workers that TLS encrypts. Reads and writes do not block, since they must not overlap."""

    def __init__(self, connection: ssl.SSLSocket):
        super().__init__(connection)
        connection.setblocking(False)
        self._tls = connection
        self._lock = threading.Lock()
        self._is_writable = select.poll()
        self._is_writable.register(connection, select.POLLOUT)

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        """Whether TLS holds decrypted bytes that were not read yet, of which `epoll` does not know."""
        with self._lock:
            return self._tls.pending() > 0

    def send_now(self, header: memoryview, row: memoryview) -> int:
        """Sends as many bytes as TLS takes at once. The rest must be sent next, since TLS may have encrypted a part."""
        try:
            return self._send(memoryview(b"".join((header, row))))
        except OSError:
            return 0

    def send(self, header: memoryview, row: memoryview) -> None:
        """Sends all bytes of a message, and waits until TLS has taken them."""
        # Header and row are joined, as in `send_now`, since TLS may have encrypted a part of the joined bytes.
        self._send_all(memoryview(b"".join((header, row[:_FIRST_BYTES]))))
        self._send_all(row[_FIRST_BYTES:])

    def receive_into(self, room: memoryview) -> int:
        """Decrypts the bytes that have arrived, as many as `room` holds; see `PlainStream.receive_into`."""
        try:
            with self._lock:
                count = self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        self.received += count
        return count

    def wake_at(self, count: int) -> None:
        """Does nothing, since TLS needs whole records of any size."""

    def _send(self, data: memoryview) -> int:
        """Sends as many bytes as TLS takes at once. Returns their number.

        Sends record by record: TLS demands that a record which it has not taken is sent again without a change.
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
    """Returns the stream over a connection between two workers, encrypted if it is a TLS connection."""
    return TlsStream(connection) if isinstance(connection, ssl.SSLSocket) else PlainStream(connection)
