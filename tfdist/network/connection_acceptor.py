"""Accepts connections from workers; strangers cannot block it, as each has little time and memory for its handshake."""

import contextlib
import dataclasses
import queue
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from absl import logging

from tfdist.network.handshake import NotOursError, RefusedError
from tfdist.network.tls import Tls, accept, handshake

T = TypeVar("T")

_GUEST_SECONDS = 3.0
_MOST_GUESTS = 64
_TICK_SECONDS = 0.2
_WARN_SECONDS = 5.0
_SHOWN_CHARACTERS = 200


class Warnings:
    """Logs at most one warning every 5 s, with the number of warnings held back in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._held = 0

    def say(self, text: str) -> None:
        """Logs a warning, unless another was logged in the last 5 s."""
        with self._lock:
            if time.monotonic() < self._next:
                self._held += 1
                return
            held, self._held, self._next = self._held, 0, time.monotonic() + _WARN_SECONDS
        logging.warning("%s%s", text, f" ({held} more warnings of this kind were not shown.)" if held else "")


@dataclasses.dataclass(eq=False)
class _Guest:
    connection: socket.socket
    host: str
    since: float
    has_spoken: bool = False


class ConnectionAcceptor(Generic[T]):
    """Accepts connections, and performs a handshake with each in a separate thread, until `close`.

    A connection has 3 s for its handshake. At most 64 handshakes run at a time, or fewer if this process runs out of
    file descriptors. To make room, the address with the most connections loses one: a silent connection first, then the
    oldest. Failed connections are closed with a warning, at most one every 5 s.

    Args:
      listeners: Listening sockets, which are closed with this object.
      handshake: Called in a thread with each connection. Raises `NotOursError`, `RefusedError` or `OSError` to reject
        the connection. The error text completes the warning "A connection from ... is closed: ".
      tls: The TLS settings. With them every connection must use TLS, without them none may.

    Attributes:
      refused: Names the worker that was refused last, and the reason; `None` if no worker was refused.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handshake: Callable[[socket.socket], T],
        tls: Tls | None = None,
    ):
        self._listeners = listeners
        self._handshake = handshake
        self._tls = tls
        self._lock = threading.Lock()
        self._guests: set[_Guest] = set()
        self._admitted: queue.SimpleQueue[tuple[socket.socket, str, T]] = queue.SimpleQueue()
        self._warnings = Warnings()
        self._is_closed = False
        self.refused: str | None = None
        self._thread = threading.Thread(target=self._receive, name="tfdist-reception", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ConnectionAcceptor[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, seconds: float) -> tuple[socket.socket, str, T] | None:
        """Returns the next connection that has passed its handshake, for the caller to close; `None` after `seconds`.

        With it come the peer's address and the handshake's return value.
        """
        try:
            return self._admitted.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Closes the listeners and all connections that `next` has not returned."""
        self._is_closed = True
        for listener in self._listeners:
            _shut(listener)
        self._thread.join()
        for guest in self._present():
            _shut(guest.connection)
        while (left := self.next(0)) is not None:
            left[0].close()

    def _receive(self) -> None:
        try:
            with select.epoll() as poll:
                for listener in self._listeners:
                    listener.setblocking(False)
                    poll.register(listener, select.EPOLLIN)
                by_descriptor = {listener.fileno(): listener for listener in self._listeners}
                while not self._is_closed:
                    for descriptor, _ in poll.poll(_TICK_SECONDS):
                        if self._is_closed:
                            break
                        self._accept(by_descriptor[descriptor])
                    latest = time.monotonic() - _GUEST_SECONDS
                    for guest in self._present():
                        if guest.since < latest:
                            _shut(guest.connection)
        finally:
            for listener in self._listeners:
                listener.close()

    def _accept(self, listener: socket.socket) -> None:
        if len(self._present()) >= _MOST_GUESTS:
            self._make_room()
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # Out of file descriptors, or the peer is gone again.
            self._make_room()
            time.sleep(0.01)  # Time for the thread that closes the connection.
            return
        connection.settimeout(_GUEST_SECONDS)
        guest = _Guest(connection, remote_host(address), time.monotonic())
        with self._lock:
            self._guests.add(guest)
        try:
            threading.Thread(target=self._serve, args=(guest,), name="tfdist-guest", daemon=True).start()
        except RuntimeError:  # No room for a thread.
            self._forget(guest)
            connection.close()

    def _present(self) -> list[_Guest]:
        with self._lock:
            return list(self._guests)

    def _forget(self, guest: _Guest) -> None:
        with self._lock:
            self._guests.discard(guest)

    def _make_room(self) -> None:
        """Ends the handshake of one connection, so that a new one can be accepted."""
        present = self._present()
        if present:
            of_host = Counter(guest.host for guest in present)
            leaves = max(present, key=lambda guest: (of_host[guest.host], not guest.has_spoken, -guest.since))
            _shut(leaves.connection)
            self._forget(leaves)

    def _serve(self, guest: _Guest) -> None:
        """Performs the handshake with one accepted connection, for `next` to return it, or closes it with a warning."""
        connection = guest.connection
        try:
            guest.has_spoken = bool(_wait_until_readable(connection))
            connection = guest.connection = accept(self._tls, connection)
            handshake(connection)
            value = self._handshake(connection)
        except (NotOursError, RefusedError) as error:
            if isinstance(error, RefusedError):
                self.refused = f"a process on {guest.host} was refused, since {error}"
            self._warnings.say(f"A connection from {guest.host} is closed: {error}.")
            _end(connection)
        except (OSError, ValueError):  # Gone or too slow, such as health checks. ValueError: closed meanwhile.
            connection.close()
        else:
            if self._is_closed:
                connection.close()
            else:
                self._admitted.put((connection, guest.host, value))
        finally:
            self._forget(guest)


def remote_host(address: tuple[Any, ...]) -> str:
    """Returns the IP address in a socket address of a peer; an IPv4 address in its usual form."""
    return str(address[0]).partition("%")[0].removeprefix("::ffff:")


def printable(text: str) -> str:
    """Makes an untrusted text safe for a log: one line of limited length, without control characters."""
    shown = "".join(character if character.isprintable() else "?" for character in text[: _SHOWN_CHARACTERS + 1])
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "…"


def _wait_until_readable(connection: socket.socket) -> list[tuple[int, int]]:
    poll = select.poll()  # Not `select`, which accepts only descriptors below 1024.
    poll.register(connection, select.POLLIN)
    return poll.poll(_GUEST_SECONDS * 1000)


def _shut(connection: socket.socket) -> None:
    """Shuts down a connection, so that another thread stops reading it and closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # With TLS' own, the reader would continue without TLS.


def _end(connection: socket.socket) -> None:
    """Closes a connection so that sent bytes still arrive: with unread bytes the kernel would reset the connection."""
    with connection, contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        connection.settimeout(0.2)
        connection.recv(1 << 14)
