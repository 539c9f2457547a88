"""Measures a TCP stream from one host of a lab to another. `Netlab` runs it on the hosts:

    python -I -S netlab_stream.py source ADDRESS
    python -I -S netlab_stream.py sink ADDRESS SWITCH PORT SETTLE WINDOW

The sink prints JSON. `goodput` is the payload in bit/s. `wire` is the rate in bit/s of frames that passed the token
bucket of the switch's port, or 0 if the port has no token bucket.
"""

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import time

_PORT = 5201
_DEADLINE_SECONDS = 60.0


def _go_first() -> None:
    """Gives this process real-time priority, so that other load does not disturb the measurement."""
    with contextlib.suppress(PermissionError):  # a container may lack CAP_SYS_NICE
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def send_forever(address: str) -> None:
    """Connects to the sink, and sends until it closes the connection."""
    _go_first()
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        try:
            connection = socket.create_connection((address, _PORT), timeout=_DEADLINE_SECONDS)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with connection, contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(1 << 18))


def receive(address: str, switch: str, port: str, settle: float, window: float) -> None:
    """Prints the speed of a stream, without its first `settle` seconds."""
    _go_first()
    buffer = bytearray(1 << 20)
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(_DEADLINE_SECONDS)
        connection, _ = server.accept()

    def drain(seconds: float) -> float:
        """Receives for some seconds, and returns the payload in bit/s."""
        received, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            received += connection.recv_into(buffer)
        return received * 8 / (time.perf_counter() - start)

    # Count frames in a thread, since the stream would stop if it were not read meanwhile.
    with connection, concurrent.futures.ThreadPoolExecutor() as threads:
        connection.settimeout(_DEADLINE_SECONDS)
        drain(settle)
        first = threads.submit(count_frames, switch, port)
        goodput = drain(window)
        last = threads.submit(count_frames, switch, port)
        while not last.done():
            drain(0.001)
    (start, before), (end, after) = first.result(), last.result()
    print(json.dumps({"goodput": goodput, "wire": (after - before) * 8 / (end - start)}))


def count_frames(switch: str, port: str) -> tuple[float, int]:
    """The time, and the bytes that passed the token bucket of a port until then; 0 if it has none."""
    start = time.perf_counter()
    command = ["tc", "-n", switch, "-s", "-j", "qdisc", "show", "dev", port]
    done = subprocess.run(command, capture_output=True, check=True, timeout=_DEADLINE_SECONDS)
    (bucket,) = json.loads(done.stdout)
    return (start + time.perf_counter()) / 2, bucket["bytes"]


if __name__ == "__main__":
    if sys.argv[1] == "source":
        send_forever(*sys.argv[2:])
    else:
        receive(*sys.argv[2:5], *map(float, sys.argv[5:]))
