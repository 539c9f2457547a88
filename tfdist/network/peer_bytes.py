"""Counts the bytes on TensorFlow's connections to the peers, as the kernel counts them. Does not load TensorFlow.

TensorFlow does not tell how many bytes its collectives send. The kernel of Linux counts the bytes of each connection,
and tells them through a netlink socket, as for the program `ss`.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_SOCK_DIAG = 4  # The netlink protocol, and its request and answers; see sock_diag(7).
_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_REQUEST, _DUMP = 1, 0x300
_ESTABLISHED = 1 << 1  # A state of TCP, as a bit.
_INFO = 2  # The extension with `struct tcp_info`.
_MESSAGE = struct.Struct("=IHHII")  # Length, type, flags, sequence, port.
_QUERY = struct.Struct("=BBBxI48x")  # Family, protocol, extensions, states, and no socket in particular.
_ADDRESSES = struct.Struct("!HH16s16s")  # Local port, remote port, local address, remote address.
_ADDRESSES_AT, _INODE_AT, _ATTRIBUTES_AT = 4, 68, 72
_ATTRIBUTE = struct.Struct("=HH")  # Length, type.
_COUNTERS, _COUNTERS_AT = struct.Struct("=QQ"), 120  # Bytes that the peer has acknowledged, and bytes received.
_READ_BYTES = 1 << 16


class Connection(NamedTuple):
    """A connection of TCP, with its counters.

    Attributes:
      inode: Number of its socket.
      local: Address and port of this end.
      remote: Address and port of the other end.
      sent: Bytes that the other end has acknowledged.
      received: Bytes that have arrived.
    """

    inode: int
    local: tuple[bytes, int]
    remote: tuple[bytes, int]
    sent: int
    received: int


class PeerBytes:
    """The bytes on this process's connections between the ports in TF_CONFIG.

    Connections that have ended count with their last known bytes. Ends are known by their ports alone. So a connection
    to another server counts too, if that server has the port of a peer.

    Args:
      own_port: Port of this worker.
      peer_ports: Ports of its peers.
      read: Returns the present connections of this process.
    """

    def __init__(
        self, own_port: int, peer_ports: Iterable[int], read: Callable[[], Sequence[Connection]] | None = None
    ) -> None:
        self._own_port, self._peer_ports = own_port, frozenset(peer_ports)
        self._read = read or own_connections
        self._seen: dict[int, Connection] = {}
        self._ended_sent = self._ended_received = 0

    def sent_and_received(self) -> tuple[int, int] | None:
        """Returns the bytes sent to all peers, and those received from all; `None` if the kernel does not tell."""
        try:
            found = {each.inode: each for each in self._to_peers(self._read())}
        except OSError:
            return None
        for inode, before in self._seen.items():
            now = found.get(inode)
            if now is None or now.sent < before.sent or now.received < before.received:  # Another with this number.
                self._ended_sent += before.sent
                self._ended_received += before.received
        self._seen = found
        sent, received = (sum(getattr(each, name) for each in found.values()) for name in ("sent", "received"))
        return self._ended_sent + sent, self._ended_received + received

    def _to_peers(self, connections: Sequence[Connection]) -> Iterator[Connection]:
        ends = {(each.local, each.remote) for each in connections}
        for each in connections:
            is_of_cluster = each.local[1] == self._own_port or each.remote[1] in self._peer_ports
            if is_of_cluster and (each.remote, each.local) not in ends:  # Not of this process with itself.
                yield each


def own_connections() -> list[Connection]:
    """Returns the connections of this process that are established.

    Raises:
      OSError: If the kernel does not tell.
    """
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("only Linux tells the bytes of connections")
    own = set(_own_sockets())
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        families = (socket.AF_INET, socket.AF_INET6)
        return [each for family in families for each in _connections(kernel, family) if each.inode in own]


def _own_sockets() -> Iterator[int]:
    """Yields the numbers of the sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):  # It was closed meanwhile, or is no socket.
            kind, _, number = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                yield int(number.strip("[]"))


def _connections(kernel: socket.socket, family: int) -> Iterator[Connection]:
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    kernel.send(_MESSAGE.pack(_MESSAGE.size + len(query), _BY_FAMILY, _REQUEST | _DUMP, 1, 0) + query)
    while True:
        data = memoryview(kernel.recv(_READ_BYTES))
        while data:
            length, kind, *_ = _MESSAGE.unpack_from(data)
            if kind == _DONE:
                return
            if kind == _ERROR or length < _MESSAGE.size:
                raise OSError("the kernel does not list connections")
            connection = _connection(data[_MESSAGE.size : length])
            if connection is not None:
                yield connection
            data = data[_aligned(length) :]


def _connection(answer: memoryview) -> Connection | None:
    """Returns the connection that an answer of the kernel describes; `None` if it has no counters."""
    local_port, remote_port, local, remote = _ADDRESSES.unpack_from(answer, _ADDRESSES_AT)
    (inode,) = struct.unpack_from("=I", answer, _INODE_AT)
    attributes = answer[_ATTRIBUTES_AT:]
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO and length >= _ATTRIBUTE.size + _COUNTERS_AT + _COUNTERS.size:
            sent, received = _COUNTERS.unpack_from(attributes, _ATTRIBUTE.size + _COUNTERS_AT)
            return Connection(inode, (local, local_port), (remote, remote_port), sent, received)
        attributes = attributes[max(_aligned(length), _ATTRIBUTE.size) :]
    return None


def _aligned(length: int) -> int:
    """Returns the place of the next part, since the kernel begins each at a multiple of four bytes."""
    return length + 3 & ~3
