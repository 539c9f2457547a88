"""One end of the connection between worker 0 and another worker of a job that goes on without lost workers."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.strategies.elastic.member_socket import MemberSocket
from tfdist.strategies.elastic.round_messages import Message, receive_message, send_message

BEAT_SECONDS = 1.0
_BEAT = "beat"


class MemberLink:
    """A connection with a thread that receives its messages. Both ends send a sign of life every second.

    Each byte of a message is a sign of life too, since a large message may take long on a slow link.

    Args:
      connection: The connection, after its handshake.
      silence_seconds: How long the peer may be silent, or take nothing, before it counts as frozen or cut off.
      on_message: Called in a thread of this object with each message but signs of life.
      on_end: Called once in that thread when the connection has ended, with the reason.
      tells: Returns the content of each sign of life for the peer, as JSON.

    Attributes:
      told: The content of the peer's newest sign of life.
    """

    def __init__(
        self,
        connection: socket.socket,
        silence_seconds: float,
        on_message: Callable[["MemberLink", Message], None],
        on_end: Callable[["MemberLink", str], None],
        tells: Callable[[], dict[str, Any]] = dict,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._silence_seconds = MemberSocket(connection, silence_seconds), silence_seconds
        self._on_message, self._on_end, self._tells = on_message, on_end, tells
        self.told: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        for target in (self._receive, self._beat):
            threading.Thread(target=target, name="tfdist-member", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether the peer has sent nothing for too long."""
        return time.monotonic() - self._socket.heard > self._silence_seconds

    @property
    def is_receiving(self) -> bool:
        """Whether a message is arriving, which may take long on a slow link."""
        return self._socket.is_in_message

    def send(self, message: Message) -> None:
        """Sends a message. Raises `OSError` if the connection fails, or the peer takes nothing for too long."""
        with self._lock:
            send_message(self._socket, message)

    def send_last(self, message: Message) -> None:
        """Sends a message, and waits until the peer's kernel has it, so that this process may end. Raises `OSError`."""
        self.send(message)
        self._socket.await_delivery(self._lock)

    def close(self) -> None:
        """Ends the connection, so that the peer notices it."""
        self._is_closed.set()
        self._socket.end()

    def _receive(self) -> None:
        why = "the connection was closed"
        try:
            while True:
                message = receive_message(self._socket)
                if message.kind == _BEAT:
                    self.told = message.fields
                else:
                    self._on_message(self, message)
                self._socket.is_in_message = False  # Not before, so that the message is either arriving or taken.
        except (OSError, ValueError, KeyError) as error:
            why = str(error)
        finally:
            self._is_closed.set()
            self._socket.end()
            with self._lock:  # Not while a message is sent, since the number of a closed socket may be given away.
                self._socket.close()
            self._on_end(self, why)

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_SECONDS):
            if self._lock.acquire(blocking=False):  # Otherwise a message is on its way.
                try:
                    send_message(self._socket, Message(_BEAT, self._tells()))
                except (OSError, ValueError):
                    self._is_closed.set()
                    self._socket.end()  # A part of the message may have been sent, so no other message can follow.
                    return
                finally:
                    self._lock.release()
