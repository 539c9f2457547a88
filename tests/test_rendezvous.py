"""At the rendezvous, all present workers name a worker that is missing or unfit, and strangers cannot do harm."""

import contextlib
import dataclasses
import json
import re
import resource
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from benchmarks.netlab import Netlab, why_not
from certificates import Authority
from launched import SCRIPTS, eventually
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.faults import admission, rendezvous
from tfdist.faults.admission import PLAIN_SECONDS, Admission, Introduction
from tfdist.network import handshake
from tfdist.network.secret import SECRET, SECRET_FILE, Secret
from tfdist.network.tls import TLS_VARIABLES, Tls, TlsFiles

DEADLINE_SECONDS = 90
PATIENT_SECONDS = 10_000  # A deadline that passes only if the clock of the test jumps.


class Meeting:
    """Workers at a rendezvous, each in a thread."""

    def __init__(self, seconds=DEADLINE_SECONDS):
        self.seconds = seconds
        self.results = {}
        self.threads = []

    def add(self, name, cluster):
        def meet():
            try:
                self.results[name] = rendezvous.meet(cluster, self.seconds)
            except ClusterError as error:
                self.results[name] = str(error)

        self.threads.append(threading.Thread(target=meet, name=str(name)))
        self.threads[-1].start()

    def end(self):
        for thread in self.threads:
            thread.join(DEADLINE_SECONDS)
        for lines in self.results.values():
            for line in lines.values() if not isinstance(lines, str) else ():
                line.close()
        return self.results


class Clock:
    """The clock of the rendezvous, which jumps over a deadline when all workers wait, and what workers log meanwhile.

    A short deadline could pass on a busy machine before all workers have come.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self._ahead, self._logged = 0.0, []

    def monotonic(self):
        return time.monotonic() + self._ahead

    def jump(self):
        self._ahead += 2 * PATIENT_SECONDS

    def warning(self, text, *arguments):
        self._logged.append((threading.current_thread().name, text % arguments))

    def waits_for(self, spec, *names):
        """Returns whether threads of these names have soon logged that of all workers they only wait for this one."""
        words = f"s more for worker {spec.worker_id} at {spec.address} "  # A reason may follow, but no comma.
        return eventually(lambda: {name for name, text in list(self._logged) if words in f"{text} "} >= set(names))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "logging", clock)
    monkeypatch.setattr(rendezvous, "_LOG_SECONDS", 0.0)
    return clock


def clusters(workers):
    ports = free_ports(workers)
    return [ClusterSpec.local(workers, index, ports) for index in range(workers)]


def test_workers_join_in_any_order_and_keep_their_connections():
    group, specs = Meeting(), clusters(4)
    for index in (2, 0, 3):
        group.add(index, specs[index])
    time.sleep(0.5)
    assert group.results == {}
    group.add(1, specs[1])
    results = group.end()
    assert {index: sorted(lines) for index, lines in results.items()} == {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}


def test_a_chief_is_worker_0():
    ports = free_ports(2)
    jobs = {"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    group = Meeting()
    group.add("worker", ClusterSpec(jobs, "worker", 0))
    group.add("chief", ClusterSpec(jobs, "chief", 0))
    assert {name: sorted(lines) for name, lines in group.end().items()} == {"chief": [1], "worker": [0]}


def test_a_missing_worker_is_named_by_all_others_at_the_deadline(clock):
    groups = {missing: (Meeting(PATIENT_SECONDS), clusters(4)) for missing in (0, 2)}
    for missing, (group, specs) in groups.items():
        names = [f"{missing}.{index}" for index in range(4) if index != missing]
        for name in names:
            group.add(name, specs[int(name[-1])])
        assert clock.waits_for(specs[missing], *names) and group.results == {}
    clock.jump()
    for missing, (group, specs) in groups.items():
        assert len(group.end()) == 3
        for result in group.results.values():
            assert f"worker {missing} at {specs[missing].address}" in result
            assert "two processes have the same index in TF_CONFIG" in result


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "(Connection refused)"), ("no-such-host.invalid", ": correct the name in TF_CONFIG")],
)
def test_the_reason_why_worker_0_cannot_be_reached_is_logged(host, why):
    port, own = free_ports(2)
    peer = host if host.startswith("127.") else "here"  # a loopback address cannot be mixed with other hosts
    cluster = ClusterSpec({"worker": [f"{host}:{port}", f"{peer}:{own}"]}, "worker", 1)
    group = Meeting(0.1)
    group.add(1, cluster)
    (result,) = group.end().values()
    assert f"worker 0 at {host}:{port} (" in result and why in result


def test_a_port_that_worker_0_cannot_open_is_named():
    spec, _ = clusters(2)
    with socket.create_server(("", int(spec.address.rpartition(":")[2]))):
        with pytest.raises(ClusterError, match=f"worker 0 of 2 at {spec.address}(.|\n)*cannot open it"):
            rendezvous.meet(spec, DEADLINE_SECONDS)


def test_a_worker_that_has_left_again_is_missing(clock):
    group, specs = Meeting(PATIENT_SECONDS), clusters(3)
    group.add(0, specs[0])
    with guest(specs[0], rendezvous._introduction(specs[1])):
        assert clock.waits_for(specs[2], "0")
    group.add(2, specs[2])
    assert clock.waits_for(specs[1], "0", "2")
    clock.jump()
    results = group.end()
    assert "missing: worker 1" in results[0] and "missing: worker 1" in results[2]


@contextlib.contextmanager
def guest(chief, introduction, secret=None):
    """Connects to worker 0's address and sends an introduction."""
    if dataclasses.is_dataclass(introduction):
        introduction = dataclasses.asdict(introduction)
    with stranger(chief) as connection:
        handshake.introduce(connection, secret, introduction)
        yield connection


@contextlib.contextmanager
def stranger(chief, words=b""):
    """Connects to worker 0's address once it listens, and sends bytes."""
    host, port = chief.address.split(":")
    assert eventually(lambda: connects(host, int(port)))
    with connected(chief, words) as connection:
        yield connection


@contextlib.contextmanager
def connected(chief, words=b""):
    """Connects to worker 0's address, which may raise an `OSError`, and sends bytes."""
    host, port = chief.address.split(":")
    with socket.create_connection((host, int(port)), DEADLINE_SECONDS) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(words)
        yield connection


def connects(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port)):
        return True
    return False


HELLO = {"nonce": "0" * 64, "proves": False}
STRANGERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": bytes.fromhex("16030100c5010000c10303") + bytes(186),
    "depth": b"[" * 200_000 + b"\n",
    "little depth": b"[" * 9_000 + b"\n",
    "digits": b"9" * 9_000 + b"\n",
    "zeros": bytes(4_000_000),
    "two lines": json.dumps(HELLO).encode() + b"\n" + json.dumps(HELLO).encode() + b"\n",
    "a list": b"[1]\n",
    "no text": b"\xff\xfe\n",
    "no nonce": b'{"nonce": 7, "proves": false}\n',
    "no answer": json.dumps(HELLO).encode() + b"\n",
}


@pytest.mark.parametrize("secret", [None, "s" * 32])
def test_connections_of_strangers_do_no_harm(secret, monkeypatch):
    if secret:
        monkeypatch.setenv(SECRET, secret)
    group, specs = Meeting(), clusters(2)
    group.add(0, specs[0])
    with contextlib.ExitStack() as stack:
        for words in STRANGERS.values():
            stack.enter_context(stranger(specs[0], words))
        own = dataclasses.asdict(rendezvous._introduction(specs[1]))
        almost = [{**own, "worker": worker} for worker in (0, 2, True, "1", None, [0], 1 << 999)]
        almost += [{**own, "addresses": addresses} for addresses in (None, [1], "all", {}, own["addresses"] * 999)]
        for introduction in ({"host": None}, {}, *almost):
            with contextlib.suppress(OSError, handshake.RefusedError), guest(specs[0], introduction):
                pass
        group.add(1, specs[1])
        assert {index: sorted(lines) for index, lines in group.end().items()} == {0: [1], 1: [0]}


def test_many_silent_or_sending_strangers_do_not_block_workers():
    specs = clusters(2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    commands = [[sys.executable, SCRIPTS / "meet.py", spec.to_json(), "64"] for spec in specs]
    chief = subprocess.Popen(commands[0], stdout=subprocess.PIPE, text=True)
    with chief, contextlib.ExitStack() as stack:
        crowd = []
        for number in range(600):
            words = (b"", b"x", json.dumps(HELLO).encode() + b"\n" + b"[" * 100_000)[number % 3]
            crowd.append(stack.enter_context(stranger(specs[0], b"")))
            crowd[-1].setblocking(False)
            with contextlib.suppress(OSError):
                crowd[-1].send(words)
        worker = subprocess.run(commands[1], stdout=subprocess.PIPE, text=True)
        printed = chief.communicate(timeout=DEADLINE_SECONDS)[0]
    assert worker.stdout.startswith("{0:") and printed.startswith("{1:"), printed
    # Memory that 600 connections took, compared with a worker that no stranger disturbs.
    assert int(printed.split()[-1]) - int(worker.stdout.split()[-1]) < 30_000, (printed, worker.stdout)


def test_a_stranger_at_the_address_of_worker_0_is_not_accepted(clock):
    specs = clusters(2)
    group = Meeting(PATIENT_SECONDS)
    with socket.create_server(("127.0.0.1", int(specs[0].address.rpartition(":")[2]))) as server:
        server.settimeout(DEADLINE_SECONDS)
        group.add(1, specs[1])
        for words in (b'{"jsonrpc": "2.0"}', b'{"missing": 1}', b'{"missing": [7]}', b"[]"):
            stranger, _ = server.accept()
            with stranger:
                stranger.recv(1)
                stranger.sendall(words + b"\n")
    clock.jump()
    assert "missing: worker 0" in group.end()[1]


def test_a_worker_that_tensorflow_cannot_connect_is_named_before_the_stacks():
    (spec, other, _) = clusters(3)
    code = """
        import sys, time
        from tfdist.cluster import ClusterSpec
        from tfdist.faults import rendezvous
        with rendezvous.connecting(ClusterSpec.from_json(sys.argv[1]), 60):
            pass
        with rendezvous.connecting(ClusterSpec.from_json(sys.argv[1]), 10):  # Time to start the process that writes.
            time.sleep(80)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), spec.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    words, _, stacks = done.stderr.partition("Timeout")
    assert done.returncode == 1 and f"worker 1 at {other.address}, worker 2 at" in words and "line 8 in" in stacks
    assert words.count("tfdist:") == 1 and "worker 0 of 3" in words


def test_a_different_cluster_on_a_cluster_host_is_named_soon(monkeypatch, clock):
    monkeypatch.setattr(admission, "PLAIN_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "_REFUSED_SECONDS", PATIENT_SECONDS)
    group, specs = Meeting(PATIENT_SECONDS), clusters(3)
    other = ClusterSpec({"worker": [*specs[0].jobs["worker"], "127.0.0.1:9"]}, "worker", 2)
    for index, cluster in enumerate([*specs[:2], other]):
        group.add(index, cluster)
    assert eventually(lambda: len(group.results) == 2)  # Long before the deadline.
    clock.jump()  # A refused worker gives up later.
    results = group.end()
    for index in range(3):
        assert "127.0.0.1:9" in results[index] and "worker 2" in results[index]
    for index in range(2):
        assert "the same cluster" in results[index] and "worker 0 has 3 workers" in results[index]


@pytest.mark.parametrize("secret", [None, "s" * 32])
def test_different_versions_and_equal_indices_are_named_soon(secret, monkeypatch, clock):
    """With a secret, the unfit worker learns the full reason; without a secret, only its own wrong property."""
    monkeypatch.setattr(admission, "PLAIN_SECONDS", 0.5)
    if secret:
        monkeypatch.setenv(SECRET, secret)
    for change, words in (({"versions": "tfdist 0.0.1"}, "tfdist 0.0.1"), ({"worker": 1}, "have index 1")):
        group, specs = Meeting(PATIENT_SECONDS), clusters(3)
        group.add(0, specs[0])
        group.add(1, specs[1])
        assert clock.waits_for(specs[2], "0", "1")
        misfit = dataclasses.asdict(dataclasses.replace(rendezvous._introduction(specs[2]), **change))
        answers, deadline = [], time.monotonic() + DEADLINE_SECONDS
        while len(group.results) < 2 and time.monotonic() < deadline:
            # Worker 0 listens no more once it has judged.
            with contextlib.suppress(OSError, handshake.NotOursError), connected(specs[0]) as connection:
                handshake.introduce(connection, Secret.from_env(), misfit)
                answers.append(connection.recv(1 << 16).decode())
            time.sleep(0.3)
        results, answers = group.end(), list(filter(None, answers))
        assert all(words in results[index] for index in (0, 1)), results
        assert (len(answers) == 1) == bool(secret), answers
        assert secret or not re.search(r"127\.0|tensorflow", answers[0]), answers


def test_versions_are_those_of_loaded_packages(monkeypatch):
    """The metadata of a nightly build are under another name."""
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(__version__="3.99.0.dev1"))
    assert "keras 3.99.0.dev1" in rendezvous._introduction(clusters(1)[0]).versions


@pytest.mark.exhaustive
@pytest.mark.privileged
def test_another_host_cannot_end_the_job_or_replace_a_worker():
    """Without a secret, a stranger sends lines that could end the job; a forged worker 1 comes before the real one."""
    if why := why_not():
        pytest.skip(why)
    with Netlab(hosts=4, rate=None) as lab, contextlib.ExitStack() as stack:
        jobs = {"worker": [f"{host.address}:2222" for host in lab.hosts[:3]]}

        def start(host, script, index):
            command = [sys.executable, str(SCRIPTS / script), ClusterSpec(jobs, "worker", index).to_json()]
            process = subprocess.Popen(host.command(command), stdout=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            return process

        def met(process):
            return eval(process.communicate(timeout=DEADLINE_SECONDS)[0].splitlines()[0])

        chief, attacker = start(lab.hosts[0], "meet.py", 0), start(lab.hosts[3], "attack_rendezvous.py", 1)
        assert attacker.stdout.readline() == "attacked\n"
        assert chief.poll() is None
        workers = [start(lab.hosts[1], "meet.py", 1)]
        time.sleep(1)
        workers.append(start(lab.hosts[2], "meet.py", 2))
        addresses = [host.address for host in lab.hosts]
        assert met(chief) == {1: addresses[1], 2: addresses[2]}
        for worker in workers:
            assert met(worker) == {0: addresses[0]}


# The shared secret.


def test_workers_with_the_same_secret_join_without_sending_it(monkeypatch, tmp_path):
    specs = clusters(2)
    monkeypatch.setenv(SECRET, "the secret of this job")
    relayed = []

    class Relay(socket.socket):
        def sendall(self, data, *flags):
            relayed.append(bytes(data))
            return super().sendall(data, *flags)

    monkeypatch.setattr(socket, "socket", Relay)
    group = Meeting()
    group.add(0, specs[0])
    group.add(1, specs[1])
    assert {index: sorted(lines) for index, lines in group.end().items()} == {0: [1], 1: [0]}
    assert b"proof" in b"".join(relayed) and b"the secret" not in b"".join(relayed)


def test_a_worker_reveals_its_cluster_only_after_a_proof_of_the_secret():
    spec, key = clusters(2)[1], Secret(b"k" * 16)
    for challenge in ({"nonce": "1" * 64, "proves": True, "proof": "0" * 64}, {"nonce": "1" * 64, "proves": False}):
        ends = socket.socketpair()
        with ends[0], ends[1]:
            handshake.send(ends[1], challenge)
            with pytest.raises(handshake.RefusedError, match=SECRET):
                handshake.introduce(ends[0], key, dataclasses.asdict(rendezvous._introduction(spec)))
            ends[0].shutdown(socket.SHUT_WR)
            assert b"127.0.0.1" not in b"".join(iter(lambda ends=ends: ends[1].recv(1 << 16), b""))


def test_a_worker_with_another_secret_gets_an_error_and_does_not_end_the_job(monkeypatch, clock):
    monkeypatch.setattr(rendezvous, "_REFUSED_SECONDS", 1.5)
    secrets, groups = {}, []
    monkeypatch.setattr(rendezvous.Secret, "from_env", lambda: secrets[threading.current_thread().name])
    first, second = (Secret(text) for text in (b"the secret of this job", b"the secret of another"))
    for case, pair in enumerate([(first, second), (first, None), (None, second)]):
        groups.append(Meeting(PATIENT_SECONDS))
        for spec, secret in zip(clusters(2), pair, strict=True):
            secrets[f"{case}.{spec.worker_id}"] = secret
            groups[-1].add(f"{case}.{spec.worker_id}", spec)
    # Worker 0 waits for the right worker until the deadline.
    assert eventually(lambda: [[*group.results] for group in groups] == [[f"{case}.1"] for case in range(3)])
    clock.jump()
    for group in groups:
        chief, worker = (result for _, result in sorted(group.end().items()))
        assert "worker 1 of 2" in worker and SECRET in worker
        assert "missing: worker 1" in chief and SECRET in chief and "on 127.0.0.1 was refused" in chief
        assert "the secret of" not in worker + chief


def test_a_forged_worker_is_not_admitted_with_a_secret(monkeypatch):
    monkeypatch.setenv(SECRET, "the secret of this job")
    group, specs = Meeting(), clusters(2)
    group.add(0, specs[0])
    introduction = rendezvous._introduction(specs[1])
    with contextlib.suppress(handshake.RefusedError), guest(specs[0], introduction, Secret(b"guessed, guessed")):
        pass
    with stranger(specs[0]) as connection:  # This stranger knows the protocol.
        handshake.send(connection, {"nonce": "0" * 64, "proves": True})
        handshake.receive_line(connection)
        text = json.dumps(dataclasses.asdict(introduction))
        handshake.send(connection, {"message": text, "proof": "0" * 64})
        assert connection.recv(1 << 16) == b""
    group.add(1, specs[1])
    assert {index: sorted(lines) for index, lines in group.end().items()} == {0: [1], 1: [0]}


def test_a_secret_comes_from_the_environment_or_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("the secret of this job\n")
    given = [{SECRET: "the secret of this job"}, {SECRET_FILE: str(path)}]
    proofs = [Secret.from_env(environ).proof("a", "b") for environ in given]
    assert proofs[0] == proofs[1] != Secret.from_env(given[0]).proof("ab", "")
    assert Secret.from_env({}) is None and Secret.from_env({SECRET: " "}) is None
    path.write_text("short")
    for environ, words in (
        ({SECRET: "short"}, "at least 16 bytes"),
        ({SECRET_FILE: str(path)}, f"the file {path}"),
        ({SECRET_FILE: str(tmp_path / "none")}, "cannot be read"),
        ({SECRET: "a" * 16, SECRET_FILE: str(path)}, "both are set"),
    ):
        with pytest.raises(ClusterError, match=words) as raised:
            Secret.from_env(environ)
        assert "aaaa" not in str(raised.value)
    assert "secret" not in repr(Secret(b"the secret of this job")).partition("object")[2]


# TLS.


def test_with_tls_workers_join_over_encrypted_connections(monkeypatch, tmp_path):
    tls = Tls(Authority(tmp_path).worker())
    monkeypatch.setattr(rendezvous.Tls, "from_env", lambda: tls)
    group, specs = Meeting(), clusters(3)
    group.add(0, specs[0])
    with contextlib.ExitStack() as stack:
        for words in STRANGERS.values():
            stack.enter_context(stranger(specs[0], words))
        for spec in specs[1:]:
            group.add(spec.worker_id, spec)
        assert {index: sorted(lines) for index, lines in group.end().items()} == {0: [1, 2], 1: [0], 2: [0]}
    assert all(isinstance(line, ssl.SSLSocket) for lines in group.results.values() for line in lines.values())


def test_workers_with_different_tls_settings_get_errors_and_do_not_end_the_job(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(rendezvous, "_REFUSED_SECONDS", 1.5)
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "another")
    own, failed = Tls(ours.worker()), "the TLS handshake failed"
    cases = {
        "worker without": (own, None, "TFDIST_TLS_CERT is not set here", "it does not use TLS"),
        "chief without": (None, own, "TFDIST_TLS_CERT, TFDIST_TLS_KEY, TFDIST_TLS_CA for all", "it uses TLS"),
        "another authority": (own, Tls(theirs.worker("w1")), "certificate is not valid for 127.0.0.1", failed),
        "refused": (own, Tls(theirs.worker("w2", authority=ours)), "does not accept this worker's", failed),
        "another host": (Tls(ours.worker("w3", "DNS:a")), own, "certificate is not valid for 127.0.0.1", failed),
    }
    given, groups = {}, {}
    monkeypatch.setattr(rendezvous.Tls, "from_env", lambda: given[threading.current_thread().name])
    for case, (chief, worker, *_) in cases.items():
        groups[case] = Meeting(PATIENT_SECONDS)
        for spec, tls in zip(clusters(2), (chief, worker), strict=True):
            given[f"{case}.{spec.worker_id}"] = tls
            groups[case].add(f"{case}.{spec.worker_id}", spec)
    # Each worker 0 waits for the right worker until the deadline.
    assert eventually(lambda: [[*groups[case].results] for case in cases] == [[f"{case}.1"] for case in cases])
    clock.jump()
    for case, (_, _, of_worker, of_chief) in cases.items():
        chief, worker = (result for _, result in sorted(groups[case].end().items()))
        assert "worker 1 of 2" in worker and of_worker in worker, (case, worker)
        assert "missing: worker 1" in chief and of_chief in chief and "127.0.0.1 was refused" in chief, (case, chief)


def test_tls_files_are_checked_by_name(tmp_path):
    files = Authority(tmp_path).worker()
    paths = dict(zip(TLS_VARIABLES, dataclasses.astuple(files), strict=True))
    assert TlsFiles.from_env(paths) == files and TlsFiles.from_env({}) is None
    for variable in TLS_VARIABLES:
        with pytest.raises(ClusterError, match=f"{variable} is not set"):
            TlsFiles.from_env({**paths, variable: ""})
        for wrong in (str(tmp_path / "none"), str(tmp_path / "worker.ext")):
            with pytest.raises(ClusterError, match=f"{variable}(.|\n)*Correct the paths"):
                Tls(TlsFiles.from_env({**paths, variable: wrong}))


# Decisions about admission.

HOSTS = {0: {"10.0.0.1"}, 1: {"10.0.0.2"}, 2: {"10.0.0.3", "fd00::3"}}
OWN = Introduction(0, ("a:1", "b:1", "c:1"), "tfdist 1", "a")
GUEST = dataclasses.replace(OWN, worker=1, host="b")
OTHER_CLUSTER = dataclasses.replace(GUEST, addresses=("x:1", "y:1"))


def test_without_a_secret_only_cluster_hosts_can_end_the_job_after_a_delay():
    for misfit in (OTHER_CLUSTER, dataclasses.replace(GUEST, versions="tfdist 2")):
        judge = Admission(OWN, False, HOSTS.get).judge
        for now in range(0, 100, 10):
            assert not judge(misfit, "192.0.2.1", None, now).is_plain
        assert [judge(misfit, "10.0.0.3", None, now).is_plain for now in (0, 1, PLAIN_SECONDS)] == [False, False, True]
    assert Admission(OWN, True, HOSTS.get).judge(OTHER_CLUSTER, "192.0.2.1", None, 0).is_plain


def test_the_worker_on_the_host_of_its_address_replaces_an_impostor():
    judge = Admission(OWN, False, HOSTS.get).judge
    verdict = judge(GUEST, "10.0.0.2", ("192.0.2.1", "forged"), 0)
    assert verdict.refused is None and "forged" in verdict.problem
    for source in ("192.0.2.1", "10.0.0.2"):  # two equal claims, or a claim against the right worker
        assert judge(GUEST, source, ("10.0.0.2", "b"), 0).refused == "index"
    assert judge(GUEST, "192.0.2.1", None, 0).refused is None  # as behind NAT


def test_notes_and_messages_about_strangers_are_limited():
    judged = Admission(OWN, False, HOSTS.get)
    for number in range(5000):
        host = f"\x1b[31m\n{number}" + "x" * 9999
        verdict = judged.judge(dataclasses.replace(OTHER_CLUSTER, host=host), "10.0.0.2", None, 0)
        assert len(verdict.problem) < 1000 and verdict.problem.isprintable()
    assert len(judged._first_seen) <= admission._MOST_NOTED
