"""A handshake in which two workers prove a shared secret to each other before either reveals its identity.

    the end that connects                the end that accepts
      {"nonce", "proves"}            →
                                     ←   {"nonce", "proves", "proof"}      of both nonces
      {"message", "proof"}           →                                     of both nonces and the message
      or {"refused": "secret"}

Without a secret, `proves` is false and there are no proofs. The message is then a claim that anybody can make.
"""

import json
import secrets
import socket
import ssl
from typing import Any

from tfdist.network.secret import SECRET, Secret

LINE_BYTES = 1 << 14
"""The longest line that is accepted before a proof. A parsed line may take twenty times as much memory."""

_NONCE_BYTES = 32
_CONNECTS, _ACCEPTS = "the end that connects", "the end that accepts"


class NotOursError(Exception):
    """The other end of a connection does not speak tfdist's handshake, so is no worker."""


class RefusedError(Exception):
    """The other end of a connection is a worker that does not match this worker's secret or TLS settings."""


def introduce(connection: socket.socket, secret: Secret | None, message: dict[str, Any]) -> None:
    """The connecting end of the handshake: proves the secret after the other end, and sends a JSON message.

    The connection must have a timeout.

    Raises:
      NotOursError: If the other end does not speak this protocol.
      RefusedError: If the other end is a worker without the same secret, or rejects this worker's TLS settings.
      OSError: If the connection fails.
    """
    own = secrets.token_hex(_NONCE_BYTES)
    send(connection, {"nonce": own, "proves": secret is not None})
    try:
        challenge = parse(receive_line(connection))
    except ssl.SSLError as error:  # Under TLS 1.3 a rejection arrives when the first bytes are read.
        raise RefusedError(f"it does not accept this worker's certificate ({error.reason or error})") from error
    if challenge is not None and challenge.get("refused") == "tls":
        raise RefusedError("it uses TLS, but this worker does not: TFDIST_TLS_CERT is not set here")
    if challenge is None or not _is_challenge(challenge):
        raise NotOursError("the program that answers there is not worker 0 of a tfdist job")
    other = challenge["nonce"]
    problem = _unlike(secret, challenge["proves"])
    if secret and not problem and not secret.accepts(challenge.get("proof"), _ACCEPTS, own, other):
        problem = f"its {SECRET} differs from this worker's"
    if problem:
        send(connection, {"refused": "secret"})
        raise RefusedError(problem)
    text = json.dumps(message)
    send(connection, {"message": text, "proof": secret.proof(_CONNECTS, own, other, text) if secret else None})


def receive(connection: socket.socket, secret: Secret | None, most_bytes: int = LINE_BYTES) -> dict[str, Any]:
    """The accepting end of the handshake: proves the secret, and returns the message of the end that connects.

    The connection must have a timeout. With a secret, only a message with a valid proof is returned.

    Raises:
      NotOursError: If the other end does not speak this protocol.
      RefusedError: If the other end does not prove the secret.
      OSError: If the connection fails.
    """
    hello = parse(receive_line(connection))
    if hello is None or not _is_challenge(hello):
        raise NotOursError("it is not a worker of a tfdist job")
    own, other = secrets.token_hex(_NONCE_BYTES), hello["nonce"]
    proof = secret.proof(_ACCEPTS, other, own) if secret else None
    send(connection, {"nonce": own, "proves": secret is not None, "proof": proof})
    problem = _unlike(secret, hello["proves"])
    if problem:
        raise RefusedError(problem)
    answer = parse(receive_line(connection, most_bytes)) or {}
    text = answer.get("message")
    if answer.get("refused") == "secret":
        raise RefusedError(f"its {SECRET} differs from this worker's")
    message = parse(text.encode(errors="replace")) if isinstance(text, str) else None
    if message is None:
        raise NotOursError("it is not a worker of a tfdist job")
    if secret and not secret.accepts(answer.get("proof"), _CONNECTS, other, own, str(text)):
        raise RefusedError(f"it does not prove the {SECRET} of this job")
    return message


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message to a worker as one line of JSON. Raises `OSError` if the connection fails."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_line(connection: socket.socket, most_bytes: int = LINE_BYTES) -> bytes:
    """Receives one line of the handshake. The other end must then send nothing until this end has answered.

    Raises:
      NotOursError: If more than one line comes, or the line is longer than `most_bytes`.
      OSError: If the connection fails or ends.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        received = connection.recv(min(1 << 14, most_bytes + 1 - len(line)))
        if not received:
            raise ConnectionError("the connection was closed")
        line += received
        if len(line) > most_bytes or b"\n" in line[:-1]:
            raise NotOursError("it does not send short lines")
    return bytes(line)


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a received line; `None` if the line has none, as from a stranger."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message else None


def _is_challenge(message: dict[str, Any]) -> bool:
    nonce, proves = message.get("nonce"), message.get("proves")
    return isinstance(nonce, str) and len(nonce) == 2 * _NONCE_BYTES and isinstance(proves, bool)


def _unlike(secret: Secret | None, other_proves: bool) -> str | None:
    """Returns an error text if only one end of a connection has a secret; `None` otherwise."""
    if secret and not other_proves:
        return f"it has no {SECRET}, but this worker has one"
    if other_proves and not secret:
        return f"it has a {SECRET}, but this worker has none"
    return None
