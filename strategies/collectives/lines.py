"""Makes a connection from each worker to each other, beside those of TensorFlow."""

import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.cluster.address import split_address
from tfdist.faults.board import Board

__all__ = ["connect"]

_TOKEN_BYTES, _WORKER_BYTES = 16, 4
_TRY_SECONDS = 3.0
# Heartbeats tell sooner of a host that is gone. This ends what is cut between two that both still reach worker 0, and
# must be long: who takes nothing in meanwhile may be in one long call that keeps Python's lock.
_SILENCE_SECONDS = 120


def connect(board: Board, addresses: Sequence[str], timeout_seconds: float) -> Mapping[int, socket.socket]:
    """Connects this worker with each other, at a free port of the hosts in TF_CONFIG; once in a process.

    Each listens, tells the others its port and a token, connects to those before it, and takes in those after it that
    know the token.

    Args:
      board: Where workers tell each other.
      addresses: Of all workers.
      timeout_seconds: For all of it.

    Returns:
      The connections, by worker.

    Raises:
      OSError: If one cannot be made in time, as where a firewall lets only the ports of TF_CONFIG pass; says which.
    """
    deadline = time.monotonic() + timeout_seconds
    token = secrets.token_bytes(_TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(len(addresses)))
        try:
            said = board.exchange("lines", [listener.getsockname()[1], token.hex()], timeout_seconds)
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        lines: dict[int, socket.socket] = {}
        for peer in range(board.worker):
            lines[peer] = stack.enter_context(_call(board.worker, peer, addresses[peer], said.get(peer)))
        while missing := [i for i in range(board.worker + 1, board.workers) if i not in lines]:
            rest_seconds = deadline - time.monotonic()
            if rest_seconds <= 0:
                raise OSError("not connected in time: " + ", ".join(f"worker {i} at {addresses[i]}" for i in missing))
            guest, peer = _welcome(listener, token, rest_seconds)
            if guest and peer in missing:
                lines[peer] = stack.enter_context(guest)
            elif guest:
                guest.close()
        for line in lines.values():
            _set_up(line)
        return {peer: line.dup() for peer, line in lines.items()}


def _listen(workers: int) -> socket.socket:
    with contextlib.suppress(OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=workers, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=workers)


def _call(worker: int, peer: int, address: str, said: Sequence | None) -> socket.socket:
    host = split_address(address)[0]
    if said is None:
        raise OSError(f"worker {peer} on {host} says no port")
    port, token = said
    try:
        line = socket.create_connection((host, port), timeout=_TRY_SECONDS)
        line.sendall(bytes.fromhex(token) + worker.to_bytes(_WORKER_BYTES, "big"))
    except OSError as error:
        raise OSError(f"worker {worker} cannot connect to worker {peer} at {host}:{port}: {error}") from error
    return line


def _welcome(listener: socket.socket, token: bytes, timeout_seconds: float) -> tuple[socket.socket | None, int]:
    """A connection and who it is from, if one comes that is from one of ours: not a health check, nor a scanner."""
    listener.settimeout(timeout_seconds)
    try:
        guest, _ = listener.accept()
    except TimeoutError:
        return None, -1
    guest.settimeout(min(_TRY_SECONDS, timeout_seconds))
    try:
        said = guest.recv(_TOKEN_BYTES + _WORKER_BYTES, socket.MSG_WAITALL)
    except OSError:
        said = b""
    if not secrets.compare_digest(said[:_TOKEN_BYTES], token):
        guest.close()
        return None, -1
    return guest, int.from_bytes(said[_TOKEN_BYTES:], "big")


def _set_up(line: socket.socket) -> None:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # Not on this machine, or not allowed.
        # Linux' own choice, unless told otherwise. BBR, which some are told, takes bursts that go both ways for a
        # slow link.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 2)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_SECONDS * 1000)
