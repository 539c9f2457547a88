"""A switch of a lab that passes each frame on after a delay, in place of the kernel's bridge. `Netlab.delay` runs it:

    python -I -S netlab_delay.py SECONDS PORT...

It runs in the namespace of the switch, whose interfaces PORT are in no bridge then. It prints a line once it passes
frames on. Frames keep the header by which the kernel describes checksums and segments that are not made yet, so packets
of up to 64 KB stay whole. The token buckets of the ports limit what it sends, as they do with the bridge.
"""

import collections
import select
import socket
import sys
import time

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_IGNORE_OUTGOING, _PACKET_VNET_HDR = 263, 23, 15
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # As SO_SNDBUF and SO_RCVBUF, beyond the limits of the system.
_VNET_BYTES, _MOST_BYTES = 10, 1 << 17
_BUFFER_BYTES = 64 << 20  # The kernel drops frames for which a socket has no room.


def _open(port: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    made.setblocking(False)
    made.bind((port, _ETH_P_ALL))
    return made


def pass_on(delay: float, ports: list[str]) -> None:
    """Passes frames on between ports, for ever."""
    sockets = [_open(port) for port in ports]
    known: dict[bytes, socket.socket] = {}  # The port of each address.
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(sockets, [], [], rest)[0]:
            frame = source.recv(_MOST_BYTES)
            known[frame[_VNET_BYTES + 6 : _VNET_BYTES + 12]] = source
            waiting.append((time.monotonic() + delay, source, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            target = known.get(frame[_VNET_BYTES : _VNET_BYTES + 6])
            for each in [other for other in sockets if other is not source] if target is None else [target]:
                try:
                    each.send(frame)
                except OSError:  # The port has no room, as a full queue of a switch. TCP sends the frame again.
                    continue


if __name__ == "__main__":
    pass_on(float(sys.argv[1]), sys.argv[2:])
