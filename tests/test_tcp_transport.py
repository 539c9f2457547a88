"""Exchanges over the TCP transport run concurrently, and errors name the failed worker."""

import dataclasses
import subprocess
import sys

import pytest

from certificates import Authority

DEADLINE_SECONDS = 300

# Two workers in one process, connected without TensorFlow.
WORKERS = """
import os, socket, sys, threading, time
import numpy as np, tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys
from tfdist._compat import tf_internals
from tfdist.strategies.collectives import peer_exchange as module
from tfdist.strategies.collectives.collective_launcher import CollectiveLauncher
from tfdist.strategies.collectives.tcp_transport import TcpTransport
from tfdist.network.tls import Tls, TlsFiles

options = tf_internals.CommunicationOptions()
names = ["worker 0 at a:1", "worker 1 at b:1"]
with socket.create_server(("127.0.0.1", 0)) as listener:
    ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
if len(sys.argv) > 1:
    tls, accepted = Tls(TlsFiles(*sys.argv[1:])), []
    accepting = threading.Thread(target=lambda: accepted.append(tls.accept(ends[1])) or accepted[0].do_handshake())
    accepting.start()
    ends[0] = tls.connect(ends[0], "127.0.0.1")
    accepting.join()
    ends[1] = accepted[0]
wires = [module.PeerExchange(worker, {1 - worker: ends[worker]}, names) for worker in range(2)]
launchers = [CollectiveLauncher(77, 2, CollectiveKeys(), "/device:CPU:0", options) for _ in wires]
for launcher, wire in zip(launchers, wires):
    launcher.transport, launcher.is_ordered = TcpTransport(launcher, wire), True

def sums(launcher):
    def step(*tensors):
        return [launcher.all_reduce(each, options=options) for each in tensors]

    return tf.function(step, autograph=False)

steps = [sums(launcher) for launcher in launchers]
ended = [None, None]

def run(worker, *tensors):
    try:
        ended[worker] = [total.numpy().sum() for total in steps[worker](*tensors)]
    except tf.errors.OpError as error:
        ended[worker] = f"{type(error).__name__} {error.message}"

def begin(*workers, sizes=(1000, 500)):
    threads = [threading.Thread(target=run, args=(i, *map(tf.ones, sizes)), daemon=True) for i in workers]
    for thread in threads:
        thread.start()
    return threads

def both(**options):
    for thread in begin(0, 1, **options):
        thread.join(60)
    return ended

def eventually(found):
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()

assert both() == [[2000, 1000]] * 2, ended
ended = [None, None]
"""

SCENARIOS = {
    "exchanges do not wait for each other": """
thread, = begin(0)
assert eventually(lambda: len(wires[0]._rounds) == 2), wires[0]._rounds
begin(1)
thread.join(60)
assert eventually(lambda: ended == [[2000, 1000]] * 2), ended
assert wires[0].carried_bytes() == wires[1].carried_bytes() >= 4 * 1500 * 4, "each way, in two steps"
""",
    "a header that no worker sends is refused, its sender named and its connection closed": """
FORGED = {
    "a negative size": [(77, 1 << 30, -1)],
    "the least size": [(77, 1 << 30, -(1 << 63))],
    "an absurd size": [(77, 1 << 30, 1 << 31)],
    "the most size": [(77, 1 << 30, (1 << 63) - 1)],
    "a key that is none": [(77, 0, 8)],
    "a negative key": [(77, -1, 8)],
    "a group that is none": [(-1, 5, 8)],
    "an exchange a second time": [(99, 5, 0), (99, 5, 0)],
    "too many exchanges": [(99, key, 0) for key in range(1, 300_000)],
    "another protocol": [(0x47455420, 0x2F204854, 0x54502F312E310D0A)],
}

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def send(end, headers):
    try:
        end.sendall(b"".join(module._HEADER.pack(*each) for each in headers))
        return end.recv(1) == b""
    except OSError:
        return True

begin(0)
assert eventually(lambda: len(wires[0]._rounds) == 2), wires[0]._rounds
before = resident()
for case, headers in FORGED.items():
    assert send(ends[1], headers), case
    assert eventually(lambda: wires[0]._fault), case
    assert wires[0]._fault.startswith("worker 1 at b:1 has ") and "closed" in wires[0]._fault, wires[0]._fault
    assert eventually(lambda: ended[0]) and "worker 1 at b:1 has sent" in ended[0], ended
    ends = [*socket.socketpair()]
    wires[0] = module.PeerExchange(0, {1: ends[0]}, names)
assert resident() - before < 80 << 20, resident() - before
""",
    "the sum of empty tensors is empty": """
assert both(sizes=(0, 4)) == [[0, 8]] * 2, ended
""",
    "a worker that has taken other steps is named": """
module._LOOK_SECONDS, module._UNLIKE_SECONDS = 0.05, 0.5
launchers[0].count.assign_add(2)  # as after a step that failed on one worker only
assert all("UnavailableError" in each for each in both()), ended
assert any("exchanges something else" in each and "worker" in each for each in ended), ended
""",
    "a worker that cannot send fails without waiting": """
def without_room(self, *args):
    raise MemoryError("no room")

module._PendingCollective.__init__ = without_room
assert all("UnavailableError" in each for each in both()), ended
assert all("no room" in each for each in ended), ended
""",
    "large and small tensors arrive independently": """
sizes = [3, 4_000_000, 5, 70_000, 100_001, 1, 2_000_000]
assert both(sizes=sizes) == [[2 * size for size in sizes]] * 2, ended
""",
    "a message larger than one dimension can count arrives": """
module._MOST_BYTES, module._ROW_BITS = 4000, 4  # smaller than a message of 4000 bytes with its key
module._shape.cache_clear()
assert module._shape(4004).shape == [2]
assert both() == [[2000, 1000]] * 2, ended
""",
    "a message that is sent in parts arrives whole": """
for end in ends:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
for sizes in ([50_000], [1000, 60_000, 3], [64_000, 64_000]):
    assert both(sizes=sizes) == [[2 * size for size in sizes]] * 2, ended
""",
    "an exchange after a failure raises at once": """
context, begun = tf_internals.context.context(), threading.Event()
abort = context.abort_collective_ops

def slowly(*args):
    begun.set()
    time.sleep(0.5)
    abort(*args)

context.abort_collective_ops = slowly
threading.Thread(target=wires[0]._fail, args=("worker 1 at b:1 is gone",), daemon=True).start()
begun.wait()
begin(0)[0].join(60)
assert "worker 1 at b:1 is gone" in ended[0], ended
""",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_transport_scenarios_without_tls(name):
    run(SCENARIOS[name])


def run(scenario, *arguments):
    script = WORKERS + scenario + "\nprint('as expected', flush=True)\nos._exit(0)\n"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.stdout == "as expected\n", done.stderr


def test_transport_scenarios_with_tls(tmp_path):
    """Exchanges data in both directions, whole or in parts; an error names the worker that closed the connection."""
    files = Authority(tmp_path).worker()
    scenario = """
for end in ends:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
sizes = [3, 1_000_000, 5, 70_000, 100_001, 1, 0]
for sizes in (sizes, [50_000], [1000, 60_000, 3], [64_000, 64_000]):
    for again in range(2):
        assert both(sizes=sizes) == [[2 * size for size in sizes]] * 2, (sizes, ended)
socket.socket.shutdown(ends[1], socket.SHUT_RDWR)
begin(0)[0].join(60)
assert "worker 1 at b:1 is gone" in ended[0], ended
"""
    run(scenario, *dataclasses.astuple(files))
