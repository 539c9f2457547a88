"""Sends worker 0 messages that could end a job or take a worker's place, for longer than a worker would need."""

import contextlib
import dataclasses
import socket
import sys
import time

from tfdist.cluster import ClusterSpec
from tfdist.faults import rendezvous
from tfdist.network import handshake

spec = ClusterSpec.from_json(sys.argv[1])
own = rendezvous._introduction(spec)
misfit = dataclasses.replace(own, addresses=("10.9.9.9:1", "10.9.9.8:1"))
kept = []


def connect():
    host, port = spec.jobs["worker"][0].split(":")
    while True:
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection((host, int(port)), 3))
            return kept[-1]
        time.sleep(0.05)


end = time.monotonic() + 3.5  # longer than `admission.PLAIN_SECONDS`
while time.monotonic() < end:
    with contextlib.suppress(OSError):
        connect().sendall(b"[" * 200_000 + b"\n")
    with contextlib.suppress(OSError):
        handshake.introduce(connect(), None, dataclasses.asdict(misfit))
    with contextlib.suppress(OSError, handshake.NotOursError):
        handshake.introduce(connect(), None, dataclasses.asdict(own))  # One that fits.
    time.sleep(0.2)
print("attacked", flush=True)
time.sleep(60)
