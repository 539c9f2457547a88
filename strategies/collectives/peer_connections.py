"""Makes a connection between each two workers, in addition to those of TensorFlow."""

import contextlib
import functools
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfdist.cluster.address import split_address
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.network.connection_acceptor import ConnectionAcceptor
from tfdist.network.handshake import NotOursError, RefusedError, introduce, receive
from tfdist.network.listening import listen
from tfdist.network.secret import Secret
from tfdist.network.tls import Tls
from tfdist.network.tls import connect as connect_tls

_TOKEN_BYTES = 32
_TRY_SECONDS = 3.0
# Heartbeats detect a dead host sooner. This limit ends a broken connection between two workers that both still reach
# worker 0. It must be long, since a worker in one long call that holds Python's lock receives nothing meanwhile.
_SILENCE_SECONDS = 120


def connect(
    board: CoordinationStore,
    addresses: Sequence[str],
    timeout_seconds: float,
    peers: Collection[int] | None = None,
    subject: str = "connections",
) -> Mapping[int, socket.socket]:
    """Connects this worker with peers, at free ports of the hosts in TF_CONFIG.

    Each worker listens at its host in TF_CONFIG and sends its port and a token to all peers. It connects to the workers
    of lower number, and accepts those of higher number. Both ends prove that they know the token, and the secret of the
    job if there is one.

    Args:
      board: The coordination store, in which workers exchange ports and tokens.
      addresses: The addresses of all workers in TF_CONFIG.
      timeout_seconds: Deadline for all connections.
      peers: The peers to connect with, which connect with this worker too; by default all.
      subject: A name for these connections in the store, new in this process.

    Returns:
      The connections, by number of the peer.

    Raises:
      ClusterError: If the secret or the TLS files are invalid.
      OSError: If a connection cannot be made in time, for example because a firewall only admits the ports in
        TF_CONFIG. The message names the worker.
    """
    deadline = time.monotonic() + timeout_seconds
    peers = sorted(board.others if peers is None else peers)
    tls = Tls.from_env()
    token = secrets.token_bytes(_TOKEN_BYTES)
    listeners = listen(split_address(addresses[board.worker])[0], 0, backlog=len(addresses))
    port = listeners[0].getsockname()[1]
    admit = functools.partial(_admit, board, _key(token))
    with contextlib.ExitStack() as stack, ConnectionAcceptor(listeners, admit, tls) as reception:
        try:
            said = board.exchange(subject, [port, token.hex()], timeout_seconds, peers)
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        connections: dict[int, socket.socket] = {}
        for peer in (each for each in peers if each < board.worker):
            rest_seconds = max(0.1, deadline - time.monotonic())
            connections[peer] = stack.enter_context(
                _call(board.worker, peer, addresses[peer], said.get(peer), tls, rest_seconds)
            )
        while missing := [i for i in peers if i > board.worker and i not in connections]:
            guest = reception.next(deadline - time.monotonic())
            if guest is None:
                raise OSError("not connected in time: " + ", ".join(f"worker {i} at {addresses[i]}" for i in missing))
            connection, _, peer = guest
            if peer in missing:
                connections[peer] = stack.enter_context(connection)
            else:
                connection.close()
        for connection in connections.values():
            _set_up(connection)
        stack.pop_all()
        return connections


def _key(token: bytes) -> Secret:
    """Returns the key that both workers must know. A stranger may read the token in the coordination store."""
    secret = Secret.from_env()
    return secret.joined(token) if secret else Secret(token)


def _call(
    worker: int, peer: int, address: str, said: Sequence | None, tls: Tls | None, timeout_seconds: float
) -> socket.socket:
    """Connects this worker to a peer of lower number, at the port that the peer has reported, and proves the key."""
    host = split_address(address)[0]
    if said is None:
        raise OSError(f"worker {peer} on {host} reported no port")
    port, token = said
    try:
        connection = socket.create_connection((host, port), timeout=min(_TRY_SECONDS, timeout_seconds))
        connection.settimeout(timeout_seconds)  # The kernel connects; the reply needs a thread of the peer.
        secured = connect_tls(tls, connection, host)
        introduce(secured, _key(bytes.fromhex(token)), {"worker": worker})
    except (OSError, NotOursError, RefusedError) as error:
        raise OSError(f"worker {worker} cannot connect to worker {peer} at {host}:{port}: {error}") from error
    return secured


def _admit(board: CoordinationStore, key: Secret, connection: socket.socket) -> int:
    """Performs the handshake on an accepted connection. Returns the number of the worker that connected."""
    peer = receive(connection, key).get("worker")
    if type(peer) is not int or not board.worker < peer < board.workers:
        raise NotOursError("it is not a worker that connects to this worker")
    return peer


def _set_up(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # Not available on this machine, or not allowed.
        # The default of Linux. Some machines are set to BBR, which mistakes bursts in both directions for a slow link.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_SECONDS * 1000)
