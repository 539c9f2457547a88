"""Reads how fast the link of a connection carries data, as the kernel measures it. Does not load TensorFlow.

A program cannot tell a slow link from a peer that does not read: both fill the send buffer. The kernel can. It measures
the rate from acknowledgments, which the peer's kernel sends. It also counts the time in which the peer had no room.
"""

import socket
import struct
from typing import NamedTuple

_FLAGS = 7  # Place of a byte in `struct tcp_info` of Linux; its last bit: too little data to measure the rate.
_COUNTERS = struct.Struct("=QQQ")  # Bytes per second; microseconds with data on the way, of them without room there.
_COUNTERS_AT = 160
_SIZE = _COUNTERS_AT + _COUNTERS.size

_LEAST_BYTES = 256 << 10  # Fewer bytes do not fill a link.
_MOST_BLOCKED = 0.25  # Part of the busy time in which the peer may have no room.


class LinkCounts(NamedTuple):
    """Counters of a connection to a peer at one moment.

    Attributes:
      sent: Bytes sent so far.
      rate: Bytes per second, in the newest round trip that tells it; 0 if not known.
      is_limited_by_program: Whether there was too little data in this round trip to fill the link.
      busy: Microseconds so far with data on the way.
      blocked: Microseconds of them in which the peer's receive buffer had no room.
    """

    sent: int
    rate: int
    is_limited_by_program: bool
    busy: int
    blocked: int


class LinkRate(NamedTuple):
    """The rate at which a connection carries data.

    Attributes:
      rate: Bytes per second.
      is_of_link: Whether the link limits it. Otherwise a program does, and the link may be faster.
    """

    rate: float
    is_of_link: bool


def read_counts(connection: socket.socket, sent: int) -> LinkCounts | None:
    """Returns the counters of a connection with `sent` bytes so far; `None` if the kernel does not have them."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:  # It is closed, or a socket of another kind.
        return None
    if len(info) < _SIZE:
        return None
    rate, busy, blocked = _COUNTERS.unpack_from(info, _COUNTERS_AT)
    return LinkCounts(sent, rate, bool(info[_FLAGS] & 1), busy, blocked)


def rate_between(before: LinkCounts, now: LinkCounts) -> LinkRate | None:
    """Returns the rate of a connection; `None` if it had too little to carry."""
    if now.sent - before.sent < _LEAST_BYTES or not now.rate:
        return None
    is_blocked = now.blocked - before.blocked > _MOST_BLOCKED * (now.busy - before.busy)
    return LinkRate(float(now.rate), not (is_blocked or now.is_limited_by_program))
