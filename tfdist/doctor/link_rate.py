"""Measures the rate of a link: one end sends blocks for a given time, the other end counts them.

The last byte of a block tells whether it is the last block.
"""

import socket
import time
from collections.abc import Sequence

_BLOCK_BYTES = 1 << 14
_BLOCKS_AT_ONCE = 8
_UNSENT_BYTES = 1 << 17
_SKIPPED_PART = 0.25  # Meanwhile TCP grows its window, and token buckets of switches are still full.
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


def send_blocks(connection: socket.socket, seconds: float) -> None:
    """Sends blocks for some time, as fast as the link takes them.

    Raises:
      OSError: If the connection fails.
    """
    # Otherwise megabytes would wait in the kernel, and take long to arrive over a slow link.
    connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)
    end = time.monotonic() + seconds
    several = bytes(_BLOCK_BYTES * _BLOCKS_AT_ONCE)
    while time.monotonic() < end:
        connection.sendall(several)
    connection.sendall(bytes(_BLOCK_BYTES - 1) + b"\1")


def receive_blocks(connection: socket.socket, seconds: float) -> float:
    """Receives the blocks of `send_blocks` and returns their rate in bit/s.

    Raises:
      OSError: If the connection fails, or a block does not come within the timeout of the connection.
    """
    buffer = bytearray(1 << 18)
    view, total, is_over = memoryview(buffer), 0, False
    moments: list[tuple[float, int]] = []
    while not is_over:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the connection was closed")
        first = (_BLOCK_BYTES - 1 - total) % _BLOCK_BYTES
        is_over = any(buffer[first:received:_BLOCK_BYTES])
        total += received
        moments.append((time.monotonic(), total))
    return rate_of(moments, seconds)


def rate_of(moments: Sequence[tuple[float, int]], seconds: float) -> float:
    """Returns the rate in bit/s from the moments of arrivals with the bytes so far. Leaves the beginning out."""
    start, end = moments[0], moments[-1]
    begin = next((each for each in moments if each[0] - start[0] >= _SKIPPED_PART * seconds), start)
    if end[1] - begin[1] < _BLOCK_BYTES * _BLOCKS_AT_ONCE:
        begin = start
    return 8.0 * (end[1] - begin[1]) / max(end[0] - begin[0], 1e-4)
