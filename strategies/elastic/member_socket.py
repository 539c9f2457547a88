"""A connection between worker 0 and another worker, plain or encrypted by TLS, with a limit for time without bytes."""

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from typing import Any

_RECORD_BYTES = 1 << 14  # Largest payload of a TLS record. TLS demands that a record is sent again without a change.
_PIECE_BYTES = 1 << 20
_WAIT_MILLISECONDS = 50
_DELIVERY_SECONDS = 0.02
_COUNT = struct.Struct("i")
_WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class MemberSocket:
    """Sends and receives all bytes of a message; one thread may send while another one receives.

    Calls do not block in the kernel, since reads and writes of a TLS connection must not overlap.

    Args:
      connection: The connection, after its handshake.
      silence_seconds: How long the peer may take no bytes while this end sends.

    Attributes:
      heard: When the newest bytes arrived, on the monotonic clock.
      is_in_message: Whether the first bytes of a message have arrived, and it was not taken yet.
    """

    def __init__(self, connection: socket.socket, silence_seconds: float):
        connection.setblocking(False)
        self._connection, self._silence_seconds = connection, silence_seconds
        is_tls = isinstance(connection, ssl.SSLSocket)
        self._lock: contextlib.AbstractContextManager[Any] = threading.Lock() if is_tls else contextlib.nullcontext()
        self._piece_bytes = _RECORD_BYTES if is_tls else _PIECE_BYTES
        self.heard = time.monotonic()
        self.is_in_message = False

    def send_all(self, data: bytes | memoryview) -> None:
        """Sends all bytes.

        Raises:
          OSError: If the connection fails, or the peer takes no bytes for too long.
        """
        left, last = memoryview(data), time.monotonic()
        while left.nbytes:
            try:
                with self._lock:
                    left = left[self._connection.send(left[: self._piece_bytes]) :]
                last = time.monotonic()
            except _WAITS:
                if time.monotonic() - last > self._silence_seconds:
                    raise TimeoutError(f"the peer has taken no bytes for {self._silence_seconds:g} s") from None
                self._wait(select.POLLOUT)

    def await_delivery(self, lock: contextlib.AbstractContextManager[Any]) -> None:
        """Waits until the peer's kernel has all bytes. A process that ends before may lose them.

        The kernel discards them if the peer sends something to a connection that is closed already. Takes `lock` for
        each look, since the connection may be closed meanwhile.

        Raises:
          OSError: If the connection fails, or the peer takes no bytes for too long.
        """
        before, last = sys.maxsize, time.monotonic()
        while unsent := self._unsent_bytes(lock):
            if unsent < before:
                before, last = unsent, time.monotonic()
            elif time.monotonic() - last > self._silence_seconds:
                raise TimeoutError(f"the peer has taken no bytes for {self._silence_seconds:g} s")
            time.sleep(_DELIVERY_SECONDS)

    def _unsent_bytes(self, lock: contextlib.AbstractContextManager[Any]) -> int:
        """Returns the bytes that the peer's kernel has not confirmed."""
        with lock:
            descriptor = self._connection.fileno()
            if descriptor < 0:
                raise ConnectionError("the connection was closed")
            answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(_COUNT.size))
        return int(_COUNT.unpack(answer)[0])

    def receive_exactly(self, size: int) -> bytearray:
        """Receives this many bytes, and waits for them without a limit.

        Raises:
          OSError: If the connection fails or ends.
        """
        received = bytearray(size)
        left = memoryview(received)
        while left.nbytes:
            try:
                with self._lock:
                    count = self._connection.recv_into(left)
            except _WAITS:
                self._wait(select.POLLIN)
                continue
            if not count:
                raise ConnectionError("the connection was closed")
            left, self.heard = left[count:], time.monotonic()
        return received

    def end(self) -> None:
        """Ends the connection in both directions, so that both ends notice it. Any thread may call this."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS would wait for the peer.

    def close(self) -> None:
        """Closes the connection, when no other thread uses it any more."""
        with contextlib.suppress(OSError):
            self._connection.close()

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        poll.poll(_WAIT_MILLISECONDS)
