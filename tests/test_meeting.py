"""Workers meet before TensorFlow connects them: who is missing, or does not fit, is named by all who came."""

import contextlib
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from launched import eventually
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.faults import meeting

DEADLINE_SECONDS = 90
START_SECONDS = 3


class Meeting:
    """Workers that meet, each in a thread."""

    def __init__(self, seconds=DEADLINE_SECONDS):
        self.seconds = seconds
        self.results = {}
        self.threads = []

    def add(self, name, cluster):
        def meet():
            start = time.monotonic()
            try:
                self.results[name] = meeting.meet(cluster, self.seconds)
            except ClusterError as error:
                self.results[name] = str(error)
            self.results[name] = self.results[name], time.monotonic() - start

        self.threads.append(threading.Thread(target=meet))
        self.threads[-1].start()

    def end(self):
        for thread in self.threads:
            thread.join(DEADLINE_SECONDS)
        results = {name: result for name, (result, _) in self.results.items()}
        for lines in results.values():
            for line in lines.values() if not isinstance(lines, str) else ():
                line.close()
        return results


def clusters(workers):
    ports = free_ports(workers)
    return [ClusterSpec.local(workers, index, ports) for index in range(workers)]


def test_workers_meet_in_any_order_and_keep_their_lines():
    group, specs = Meeting(), clusters(4)
    for index in (2, 0, 3):
        group.add(index, specs[index])
    time.sleep(0.5)
    assert group.results == {}
    group.add(1, specs[1])
    results = group.end()
    assert {index: sorted(lines) for index, lines in results.items()} == {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}


def test_a_chief_comes_first():
    ports = free_ports(2)
    jobs = {"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    group = Meeting()
    group.add("worker", ClusterSpec(jobs, "worker", 0))
    group.add("chief", ClusterSpec(jobs, "chief", 0))
    assert {name: sorted(lines) for name, lines in group.end().items()} == {"chief": [1], "worker": [0]}


@pytest.mark.parametrize("missing", [0, 2])
def test_who_is_missing_is_named_by_all_who_came_within_the_deadline(missing):
    group, specs = Meeting(START_SECONDS), clusters(4)
    for index in {0, 1, 2, 3} - {missing}:
        group.add(index, specs[index])
    results = group.end()
    assert len(results) == 3
    for result, seconds in group.results.values():
        assert f"worker {missing} at {specs[missing].address}" in result
        assert "two processes have the same index in TF_CONFIG" in result
        assert START_SECONDS - 1 < seconds < 10 * START_SECONDS


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "(Connection refused)"), ("no-such-host.invalid", ": correct the name in TF_CONFIG")],
)
def test_why_worker_0_cannot_be_reached_is_told(host, why):
    port, own = free_ports(2)
    peer = host if host.startswith("127.") else "here"  # loopback may not stand beside other hosts
    cluster = ClusterSpec({"worker": [f"{host}:{port}", f"{peer}:{own}"]}, "worker", 1)
    group = Meeting(0.1)
    group.add(1, cluster)
    (result,) = group.end().values()
    assert f"worker 0 at {host}:{port} (" in result and why in result


def test_a_port_that_worker_0_cannot_open_is_named():
    spec, _ = clusters(2)
    with socket.create_server(("", int(spec.address.rpartition(":")[2]))):
        with pytest.raises(ClusterError, match=f"worker 0 of 2 at {spec.address}(.|\n)*cannot be opened"):
            meeting.meet(spec, START_SECONDS)


def test_who_has_left_again_is_missing():
    group, specs = Meeting(START_SECONDS), clusters(3)
    group.add(0, specs[0])
    with guest(specs[0], meeting._introduction(specs[1])):
        time.sleep(0.5)
    group.add(2, specs[2])
    results = group.end()
    assert "missing: worker 1" in results[0] and "missing: worker 1" in results[2]


@contextlib.contextmanager
def guest(chief, introduction):
    host, port = chief.address.split(":")
    assert eventually(lambda: connects(host, int(port)))
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(json.dumps(introduction).encode() + b"\n")
        yield connection


def connects(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port)):
        return True
    return False


def test_strangers_at_the_door_do_no_harm():
    group, specs = Meeting(), clusters(2)
    group.add(0, specs[0])
    own = meeting._introduction(specs[1])
    almost = [{**own, "worker": worker} for worker in (0, 2, True, "1", None)]
    almost += [{**own, "addresses": addresses} for addresses in (None, [1], "all")] + [{**own, "host": None}]
    for words in ("GET / HTTP/1.1", [1], {}, "\u2620", {"jsonrpc": "2.0"}, {"worker": 1}, *almost):
        with guest(specs[0], words):
            pass
    group.add(1, specs[1])
    assert {index: sorted(lines) for index, lines in group.end().items()} == {0: [1], 1: [0]}


def test_a_stranger_in_the_place_of_worker_0_is_no_worker():
    specs = clusters(2)
    group = Meeting(START_SECONDS / 2)
    with socket.create_server(("127.0.0.1", int(specs[0].address.rpartition(":")[2]))) as server:
        server.settimeout(DEADLINE_SECONDS)
        group.add(1, specs[1])
        for words in (b'{"jsonrpc": "2.0"}', b'{"missing": 1}', b'{"missing": [7]}', b"[]"):
            stranger, _ = server.accept()
            with stranger:
                stranger.recv(1)
                stranger.sendall(words + b"\n")
    assert "missing: worker 0" in group.end()[1]


def test_who_came_and_is_not_connected_is_named_before_the_stacks():
    (spec, other, _) = clusters(3)
    code = """
        import sys, time
        from tfdist.cluster import ClusterSpec
        from tfdist.faults import meeting
        with meeting.connecting(ClusterSpec.from_json(sys.argv[1]), 60):
            pass
        with meeting.connecting(ClusterSpec.from_json(sys.argv[1]), 4):
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), spec.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    words, _, stacks = done.stderr.partition("Timeout")
    assert done.returncode == 1 and f"worker 1 at {other.address}, worker 2 at" in words and "line 8 in" in stacks
    assert words.count("tfdist:") == 1 and "worker 0 of 3" in words


def test_another_cluster_is_named_on_all_workers_at_once():
    group, specs = Meeting(), clusters(3)
    other = ClusterSpec({"worker": [*specs[0].jobs["worker"], "127.0.0.1:9"]}, "worker", 2)
    group.add(0, specs[0])
    group.add(1, specs[1])
    time.sleep(0.5)
    group.add(2, other)
    results = group.end()
    for index in range(3):
        assert "the same cluster" in results[index] and "worker 0 has 3 workers" in results[index]
        assert "worker 2" in results[index] and "127.0.0.1:9" in results[index] and group.results[index][1] < 10


def test_other_versions_and_two_of_one_index_are_named():
    for change, words in (
        ({"versions": "tfdist 0.0.1"}, "tfdist 0.0.1"),
        ({"worker": 1}, "say that they are worker 1"),
    ):
        group, specs = Meeting(), clusters(3)
        group.add(0, specs[0])
        group.add(1, specs[1])
        time.sleep(0.5)
        with guest(specs[0], {**meeting._introduction(specs[2]), **change}):
            results = group.end()
        assert all(words in results[index] for index in (0, 1)), results
