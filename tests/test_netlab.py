"""Virtual hosts on one machine: links have the requested rate, all bytes are counted, and nothing is left behind."""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.netlab import TOLERANCE, BusyError, Netlab, NetlabError, parse_rate, why_not
from benchmarks.netlab_slots import Slot
from launched import eventually

DEADLINE_SECONDS = 180
ROOT = pathlib.Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "benchmarks.netlab"]
BITS = {"100mbit": 100e6, "1gbit": 1e9}
RATES = ["100mbit", pytest.param("1gbit", marks=pytest.mark.exhaustive)]
TENSOR_BYTES = 4_000_000

pytestmark = pytest.mark.privileged

SEND = """
import socket, sys, time
data = bytes(int(sys.argv[2]))
start = time.perf_counter()
with socket.create_connection((sys.argv[1], 7000), timeout=60) as connection:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # closed by the peer: all of it has arrived
print(time.perf_counter() - start)
"""
RECEIVE = """
import socket
with socket.create_server(("", 7000)) as server:
    server.settimeout(60)
    print("ready", flush=True)
    connection, _ = server.accept()
connection.settimeout(60)
while connection.recv(1 << 20):
    pass
"""
ALL_REDUCE = """
import json, os, sys
import tensorflow as tf
import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
tensor = tf.range(int(sys.argv[1]) // 4, dtype=tf.float32) * (worker + 1.0)

@tf.function
def step():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tensor))

expected = tf.range(int(sys.argv[1]) // 4, dtype=tf.float32) * 3.0
print("right" if bool(tf.reduce_all(step() == expected)) else "wrong")
"""


@pytest.fixture(scope="module", autouse=True)
def possible():
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def machine_stays_as_it_was(possible):
    before = machine()
    yield
    assert machine() == before


@pytest.fixture(scope="module")
def lab():
    with Netlab(hosts=2, rate=None) as lab:
        yield lab


def machine():
    """Returns the machine's links, addresses, routes and rules, and foreign namespaces; a lab must not change them."""
    shown = [run("ip", "-o", *what.split()) for what in ("link", "-4 address", "route", "rule")]
    return [*shown, [name for name in namespaces() if not name.startswith("tfd")]]


def run(*command, **options):
    options = {"capture_output": True, "text": True, "timeout": DEADLINE_SECONDS, "cwd": ROOT, **options}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def namespaces():
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines()]


def leftovers():
    """Returns the namespaces, locks and links of labs on this machine without an owner.

    Other tests begin and end labs meanwhile, so the namespaces of a number are listed while no other process can use
    the number.
    """
    found = [line.split(": ")[1] for line in run("ip", "-o", "link").splitlines() if re.search(r": tfd\d", line)]
    names = [*namespaces(), *os.listdir("/run")]
    for number in sorted({int(match[1]) for match in map(re.compile(r"tfd(\d+)").match, names) if match}):
        if is_left(lock_of(number)):
            found.append(lock_of(number).name)
        if slot := Slot.claim(number, standing=True):
            with contextlib.closing(slot):
                found += [name for name in namespaces() if name.startswith(f"tfd{number}-")]
    return found


def lock_of(number):
    return pathlib.Path("/run", f"tfd{number}.lock")


def is_left(lock):
    """Returns whether a lock file has the name of an owner, but no process holds it."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file.read() != "" and os.path.samestat(os.fstat(file.fileno()), lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def owner(name):
    """Returns what the lock of a namespace's lab says."""
    try:
        return lock_of(re.match(r"tfd(\d+)", name)[1]).read_text()
    except FileNotFoundError:
        return ""


def has_namespaces_of(pid):
    """Returns whether a process has a lab of its own with a namespace, whatever other labs come and go meanwhile."""
    return any(owner(name) == str(pid) for name in namespaces() if name.startswith("tfd"))


def owned_by(lab):
    return {name for host in lab.hosts for name in (host.name, host.name.split("-")[0] + "-switch")}


@contextlib.contextmanager
def started(command, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **{**pipes, **options}) as process:
        try:
            yield process
        finally:
            process.kill()


def transfer(sender, receiver, size):
    """Sends `size` bytes. Returns the seconds, and the increase of both counters."""
    with started(receiver.command([sys.executable, "-c", RECEIVE])) as sink:
        assert sink.stdout.readline() == "ready\n"
        before = sender.counters().sent_bytes, receiver.counters().received_bytes
        seconds = run(*sender.command([sys.executable, "-c", SEND, receiver.address, str(size)]))
        after = sender.counters().sent_bytes, receiver.counters().received_bytes
    return float(seconds), after[0] - before[0], after[1] - before[1]


def skips_on_a_busy_machine(test):
    """A link that is too fast fails the test; other programs may have slowed a link down, so the test is skipped."""

    @functools.wraps(test)
    def run_test(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except BusyError as error:
            pytest.skip(f"the lab cannot measure here now: {error}")

    return run_test


@pytest.mark.parametrize("rate", RATES)
@skips_on_a_busy_machine
def test_links_have_the_asked_rate(lab, rate):
    lab.shape(rate)
    assert lab.wire_bits_per_second == pytest.approx(BITS[rate], rel=TOLERANCE)
    # Frames of 1514 bytes carry 1448 bytes of payload, so the received rate agrees with the rate of the token bucket.
    assert lab.bits_per_second == pytest.approx(BITS[rate] * 1448 / 1514, rel=TOLERANCE)


@pytest.mark.parametrize("rate", RATES)
@skips_on_a_busy_machine
def test_a_transfer_of_known_size_is_counted_and_not_faster_than_the_rate(lab, rate):
    lab.shape(rate)
    size = int(BITS[rate] / 8 * 0.3)
    for ends in (lab.hosts, lab.hosts[::-1]):
        seconds, sent, received = transfer(*ends, size)
        assert (sent, received) == pytest.approx((size, size), rel=0.02)
        # No upper bound: the test above measures the full rate, before other tests load the machine.
        assert seconds > (1 - TOLERANCE) * size * 8 / BITS[rate] * 1514 / 1448


def network_settings(host):
    """Returns the token bucket of a host, and whether TCP begins connections anew after a pause."""
    bucket = run("tc", "-n", host.name, "qdisc", "show", "dev", host.interface)
    return bucket, run(*host.command(["cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle"])).strip()


@skips_on_a_busy_machine
def test_in_dilated_time_queues_hold_as_many_bytes_and_tcp_keeps_its_window(lab):
    lab.shape("10mbit", dilation=10.0)
    for host in lab.hosts:
        bucket, begins_anew = network_settings(host)
        assert "lat 1s" in bucket and begins_anew == "0"
    lab.shape("100mbit")
    for host in lab.hosts:
        bucket, begins_anew = network_settings(host)
        assert "lat 100ms" in bucket and begins_anew == "1"


@skips_on_a_busy_machine
def test_a_link_that_is_off_is_reported(lab):
    lab.shape("100mbit")
    host = lab.hosts[0]
    slower = ["tc", "-n", host.name, "qdisc", "replace", "dev", host.interface, "root", "tbf"]
    run(*slower, "rate", "50mbit", "burst", "70000", "latency", "100ms")
    with pytest.raises(NetlabError, match=r"was to carry 100\.0 Mbit/s and carried [45]\d\."):
        lab.check()


@skips_on_a_busy_machine
def test_frames_arrive_after_the_delay_and_soon_again_afterwards(lab):
    to, connect = lab.hosts[1].address, "import socket, sys, time; begin = time.monotonic(); "
    # The host refuses the connection, after one round trip.
    connect += "code = socket.socket().connect_ex((sys.argv[1], 9)); print(code > 0, time.monotonic() - begin)"

    def seconds():
        is_refused, taken = run(*lab.hosts[0].command([sys.executable, "-c", connect, to])).split()
        assert is_refused == "True"
        return float(taken)

    with lab.delayed(0.2):
        assert seconds() >= 0.4
    assert eventually(lambda: seconds() < 0.4)  # A delay would be in each of them.


def test_two_labs_are_not_connected(lab):
    with Netlab(hosts=3, rate="100mbit") as other:
        assert not owned_by(lab) & owned_by(other)
        for sender, receiver in [*itertools.permutations(other.hosts, 2), lab.hosts]:
            assert min(transfer(sender, receiver, 1000)[1:]) >= 1000
        with pytest.raises(AssertionError, match="Network is unreachable"):
            transfer(lab.hosts[0], other.hosts[0], 1000)
    assert owned_by(lab) <= set(namespaces())


def test_up_exec_and_down_do_not_touch_other_labs(lab):
    first = run(*COMMAND, "up", "--hosts", "3", "--rate", "none").splitlines()
    name, address = first[2].split()
    with Netlab(hosts=2, rate=None):
        assert address in run(*COMMAND, "exec", name, "--", "ip", "-4", "address", "show", "dev", "eth0")
    run(*COMMAND, "up", "--hosts", "2", "--rate", "none")
    # The second lab has replaced it, though another test may have a lab of this number and more hosts now.
    assert eventually(lambda: name not in namespaces() or owner(name).isdigit())
    assert str(os.getpid()) in run(*COMMAND, "down")
    assert leftovers() == []
    assert owned_by(lab) <= set(namespaces())


def test_an_error_inside_removes_the_lab_and_its_processes():
    with pytest.raises(KeyboardInterrupt):
        with Netlab(hosts=2, rate=None) as lab:
            command = lab.hosts[1].command(["sh", "-c", "echo inside; exec sleep 1000"])
            sleeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            with sleeper.stdout as output:
                assert output.readline() == "inside\n"  # `ip` has entered the namespace, so the lab can see the process
            raise KeyboardInterrupt
    assert sleeper.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert not owned_by(lab) & set(namespaces())
    assert leftovers() == []


UP_FOR_LONG = [
    sys.executable,
    "-c",
    """
import time
from benchmarks import netlab
netlab.end_on_signals()
with netlab.Netlab(2, None) as lab:
    time.sleep(1000)
""",
]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_terminated_lab_leaves_nothing_and_prints_nothing(signum, code):
    for command in (UP_FOR_LONG, [*COMMAND, "up", "--hosts=4"]):
        with started(command) as process:
            assert eventually(lambda process=process: has_namespaces_of(process.pid))
            process.send_signal(signum)
            process.send_signal(signum)
            out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, out) == (code, ""), out
        assert leftovers() == []


def test_the_command_is_also_a_script_and_does_not_remove_where_it_runs():
    name = run(*COMMAND, "up", "--rate", "NONE").split()[0]
    script = [sys.executable, "benchmarks/netlab.py"]
    for arguments, words in (
        (["exec", name, *script, "down"], f"This runs on {name}"),
        (["exec", name], f"A command to run on {name} is missing"),
    ):
        refused = subprocess.run([*script, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert refused.returncode == 1 and words in refused.stderr and "Traceback" not in refused.stderr
    run(*script, "down")
    assert leftovers() == []


def test_without_tools_a_command_is_refused():
    code = "from benchmarks import netlab; netlab.execute('tfd0-host0', ['true'])"
    environ = {**os.environ, "PATH": "/nowhere"}
    refused = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert "NetlabError: A lab needs the command ip and tc" in refused.stderr


@pytest.mark.parametrize("rate", ["0mbit", "99kbit", "101gbit", "fast", "1mbps", ""])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        parse_rate(rate)


def test_rates_are_read_in_upper_case_too():
    assert [parse_rate(rate) for rate in ("1GBIT", "100kbit", "None", "Unshaped")] == [1e9, 1e5, None, None]


def test_killed_runs_are_cleaned_up():
    for _ in range(3):
        with started([*COMMAND, "up", "--rate", "100mbit"], stdout=subprocess.DEVNULL) as up:
            time.sleep(random.uniform(0.1, 0.8))
            up.kill()
    run(*COMMAND, "up", "--rate", "none")
    run(*COMMAND, "down")
    assert leftovers() == []


@pytest.mark.exhaustive  # `test_benchmarks.py` trains over a link and counts its bytes
def test_two_workers_on_two_hosts_reduce_over_the_link(lab, tmp_path):
    cluster = {"worker": [f"{host.address}:2222" for host in lab.hosts]}
    before = [host.counters() for host in lab.hosts]
    with contextlib.ExitStack() as stack:
        workers = []
        for index, host in enumerate(lab.hosts):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            environ = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
            command = host.command([sys.executable, "-c", ALL_REDUCE, str(TENSOR_BYTES)])
            workers.append(stack.enter_context(started(command, env=environ, cwd=tmp_path)))
        outputs = [worker.communicate(timeout=DEADLINE_SECONDS)[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0 and output.endswith("right\n"), output
    # In a ring of 2, each worker sends half of the tensor twice.
    for host, start in zip(lab.hosts, before, strict=True):
        assert TENSOR_BYTES <= host.counters().sent_bytes - start.sent_bytes < 1.5 * TENSOR_BYTES
