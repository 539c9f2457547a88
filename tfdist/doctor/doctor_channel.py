"""Connections between the tasks of `tfdist doctor`: requests and answers, one JSON line each, after a handshake.

    the end that connects                   the end that accepts
      handshake: {"doctor", "token", …}  →    see `tfdist.network.handshake`
                                         ←    {"doctor", "token", "worker", "port"}
      a request                          →
                                         ←    its answer

Under the role "serves" the other end sends the requests: so the chief can ask a worker that it cannot connect to.
"""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster.address import split_address
from tfdist.doctor.link_rate import receive_blocks, send_blocks
from tfdist.network.handshake import NotOursError, introduce, parse, receive, receive_line, send
from tfdist.network.secret import Secret
from tfdist.network.tls import Tls, connect

PROTOCOL = 1
CONTACTS, COMMANDS, SERVES = "contacts", "commands", "serves"
"""Roles of the end that connects: it only tests the connection, sends the chief's requests, or answers them."""

_ANSWER_BYTES = 1 << 23
_CONNECT_SECONDS = 2.0
_PINGS = 6
_MOST_SECONDS = 2.0  # The longest measurement that a peer may ask for.


@dataclasses.dataclass(frozen=True)
class Identity:
    """The sender's place in its own TF_CONFIG, and its token.

    Attributes:
      worker: Index of the worker in its own TF_CONFIG.
      token: Random name of the process.
      port: A second, free port at which it listens; 0 if none.
      role: `CONTACTS`, `COMMANDS` or `SERVES`.
    """

    worker: int
    token: str
    port: int = 0
    role: str = CONTACTS

    def to_message(self) -> dict[str, Any]:
        """Returns the message for the peer."""
        return {"doctor": PROTOCOL, **dataclasses.asdict(self)}

    @classmethod
    def read(cls, message: dict[str, Any] | None) -> "Identity":
        """Returns the identity in a message of a peer.

        Raises:
          NotOursError: If the message is none of `tfdist doctor` of this version.
        """
        message = message or {}
        worker, token, port = message.get("worker"), message.get("token"), message.get("port")
        if message.get("doctor") != PROTOCOL or type(worker) is not int or type(port) is not int:
            raise NotOursError("it is not `tfdist doctor` of this version")
        return cls(worker, str(token)[:64], port, str(message.get("role")))


class DoctorChannel:
    """One end of a connection between two tasks, after the handshake.

    Args:
      connection: The connection.
      peer: The identity of the other end.
    """

    def __init__(self, connection: socket.socket, peer: Identity):
        self._connection, self.peer = connection, peer

    def __enter__(self) -> "DoctorChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        self._connection.close()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Raises:
          NotOursError: If the answer is no JSON object.
          OSError: If the connection fails, or no answer comes in time.
        """
        self._connection.settimeout(max(0.1, seconds))
        send(self._connection, request)
        return self._read()

    def serve(self, answer: Callable[[dict[str, Any]], dict[str, Any]], seconds: float) -> None:
        """Answers requests until the other end closes the connection, or sends none for some seconds.

        Raises:
          NotOursError: If a request is no JSON object.
          OSError: When the connection is closed, or fails.
        """
        while True:
            self._connection.settimeout(seconds)
            request = self._read()
            if "sink" in request:
                send(self._connection, {"ready": True})
                send(self._connection, {"rate": receive_blocks(self._connection, _seconds_of(request, "sink"))})
            elif "source" in request:
                send_blocks(self._connection, _seconds_of(request, "source"))
            else:
                send(self._connection, answer(request))

    def ping(self, clock: Callable[[], float], seconds: float) -> tuple[float, float]:
        """Returns the shortest round trip in seconds, and by how much the clock of the other end is ahead.

        Raises:
          NotOursError: If the other end does not answer with a time.
          OSError: If the connection fails.
        """
        found = []
        for _ in range(_PINGS):
            own, start = clock(), time.perf_counter()
            there = self.ask({"ping": True}, seconds).get("clock")
            elapsed = time.perf_counter() - start
            if not isinstance(there, float):
                raise NotOursError("it does not tell its time")
            found.append((elapsed, there - own - elapsed / 2))
        return min(found)

    def rates(self, seconds: float, most_seconds: float) -> tuple[float, float]:
        """Returns the rates to the other end and from it, in bit/s.

        Args:
          seconds: Duration of the measurement in each direction.
          most_seconds: Longest time without a byte.

        Raises:
          NotOursError: If the other end does not follow the protocol.
          OSError: If the connection fails.
        """
        self.ask({"sink": seconds}, most_seconds)
        send_blocks(self._connection, seconds)
        there = self._read().get("rate")
        send(self._connection, {"source": seconds})
        here = receive_blocks(self._connection, seconds)
        return float(there) if isinstance(there, float | int) else 0.0, here

    def _read(self) -> dict[str, Any]:
        message = parse(receive_line(self._connection, _ANSWER_BYTES))
        if message is None:
            raise NotOursError("it does not send JSON objects")
        return message


def call(address: str, own: Identity, secret: Secret | None, tls: Tls | None, seconds: float) -> DoctorChannel:
    """Connects to the task of `tfdist doctor` at an address.

    Raises:
      NotOursError: If another program answers.
      RefusedError: If the secret or TLS of the other end does not match.
      OSError: If there is no connection in time.
    """
    host, port = split_address(address)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((host, port), timeout=min(_CONNECT_SECONDS, seconds)))
        try:
            connection = stack.enter_context(connect(tls, plain, host))
            introduce(connection, secret, own.to_message())
            peer = Identity.read(parse(receive_line(connection)))
        except TimeoutError as error:
            raise NotOursError("it accepts connections, but does not answer") from error
        stack.pop_all()
        return DoctorChannel(connection, peer)


def welcome(connection: socket.socket, own: Identity, secret: Secret | None) -> DoctorChannel:
    """The accepting end of `call`. Raises as the handshake does."""
    peer = Identity.read(receive(connection, secret))
    send(connection, own.to_message())
    return DoctorChannel(connection, peer)


def is_open(host: str, port: int) -> bool:
    """Returns whether a connection to a port can be opened."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _seconds_of(request: dict[str, Any], name: str) -> float:
    value = request[name]
    return min(float(value), _MOST_SECONDS) if isinstance(value, float | int) else 0.0
