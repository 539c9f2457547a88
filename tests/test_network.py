"""Processes listen only at the requested addresses, and a private network is private."""

import contextlib
import ctypes
import socket
import subprocess
import sys

import pytest

from launched import eventually, nothing_left
from scanner import listening_at
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.launch import private_network
from tfdist.network import listening
from tfdist.network.peer_bytes import Connection, PeerBytes

DEADLINE_SECONDS = 240
PR_SET_DUMPABLE = 4


@pytest.fixture
def run(tmp_path):
    with nothing_left(tmp_path) as run:
        yield run


def connection(inode, local, remote, sent=0, received=0):
    return Connection(inode, (b"a", local), (b"b", remote), sent, received)


@pytest.mark.unit
def test_bytes_between_the_ports_of_the_cluster_count_also_after_the_end_of_a_connection():
    web, itself = (
        connection(1, 5000, 443, 9, 9),
        [connection(2, 70, 2222), Connection(3, (b"b", 2222), (b"a", 70), 9, 9)],
    )
    looks = [
        [web, *itself, connection(4, 2222, 61, 100, 10), connection(5, 62, 3333, 1, 2)],
        [web, *itself, connection(4, 2222, 61, 150, 10)],
        [connection(4, 2222, 63, 5, 5)],  # The kernel has used the number again.
    ]
    traffic = PeerBytes(2222, [3333], read=lambda: looks.pop(0))
    assert [traffic.sent_and_received() for _ in range(3)] == [(101, 12), (151, 12), (156, 17)]


@pytest.mark.unit
def test_bytes_are_unknown_where_the_kernel_does_not_tell(monkeypatch):
    monkeypatch.delattr(socket, "AF_NETLINK")
    assert PeerBytes(2222, [3333]).sent_and_received() is None


@pytest.mark.unit
def test_the_kernel_tells_the_bytes_of_the_connections_of_this_process():
    code = "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    code += "; c.sendall(bytes(5000)); c.recv(9)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", code, str(port)]) as peer:
            with server.accept()[0] as accepted:
                while accepted.recv(9999, socket.MSG_PEEK) != bytes(5000):
                    pass
                traffic = PeerBytes(port, [])
                assert traffic.sent_and_received() == (0, 5000)
                accepted.sendall(b"x" * 9)
            assert peer.wait(DEADLINE_SECONDS) == 0
        assert traffic.sent_and_received() == (0, 5000), "the connection has ended, and was not read again"


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("127.0.0.5", {"127.0.0.5"}),
        ("localhost", {"127.0.0.1", "::1"}),
        ("192.0.2.1", {"::", "0.0.0.0"}),  # belongs to no machine (RFC 5737), as behind NAT
        ("no-such-host.invalid", {"::", "0.0.0.0"}),
    ],
)
def test_a_listener_uses_only_the_addresses_of_its_host(host, addresses):
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in listening.listen(host, 0, backlog=1)]
        found = [each.getsockname()[:2] for each in listeners]
    assert {address for address, _ in found} <= addresses and len({port for _, port in found}) == 1


def test_a_name_that_resolves_to_loopback_only_here_does_not_limit_the_listener(monkeypatch):
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1, where peers on other machines cannot connect."""
    monkeypatch.setattr(listening, "addresses_of", lambda host: ["127.0.1.1"])
    (listener,) = listening.listen("node0", 0, backlog=1)
    with listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_worker_0_and_the_exchange_connections_listen_at_loopback_under_a_local_run(run):
    """TensorFlow's own server listens at all addresses; therefore --private-network exists."""
    spec = ClusterSpec.local(2, 0, free_ports(2))
    code = "import sys; from tfdist.cluster import ClusterSpec; from tfdist.faults import rendezvous; "
    code += "rendezvous.meet(ClusterSpec.from_json(sys.argv[1]), 60)"
    with subprocess.Popen([sys.executable, "-c", code, spec.to_json()]) as chief:
        try:
            assert eventually(lambda: listening_at([chief.pid]))
            assert {address for address, _ in listening_at([chief.pid])} == {"127.0.0.1"}
        finally:
            chief.kill()


ALONE = """
import socket
ports = [int(port) for port in sys.argv[1:]]
with socket.create_server(("", ports[worker])):
    leave(f"listens-{worker}", "")
    while len(list(here.glob("listens-*"))) < 2: time.sleep(0.01)
    socket.create_connection(("127.0.0.1", ports[1 - worker])).close()
    leave(f"met-{worker}", repr(socket.if_nameindex()))
    while not (here / "enough").exists(): time.sleep(0.01)
"""


def test_workers_in_a_private_network_reach_each_other_and_nothing_else(run):
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in taken:  # Without listening, so that no other process here can listen at the workers' ports.
            each.bind(("", 0))
        ports = [each.getsockname()[1] for each in taken]
        script = run.script("leave(f'pid-{worker}', os.getpid())\n" + ALONE)
        with run.start("--workers", 2, "--private-network", script, *ports) as job:
            try:
                assert eventually(lambda: len(list(run.directory.glob("met-*"))) == 2)
                assert {path.read_text() for path in run.directory.glob("met-*")} == {"[(1, 'lo')]"}
                own = [address for address in socket.gethostbyname_ex(socket.gethostname())[2]]
                for address in ["127.0.0.1", *own]:
                    for port in ports:
                        with pytest.raises(ConnectionRefusedError):
                            socket.create_connection((address, port), DEADLINE_SECONDS)
            finally:
                (run.directory / "enough").touch()
            assert job.communicate(timeout=DEADLINE_SECONDS) and job.returncode == 0


def test_a_user_without_privileges_can_have_a_private_network(tmp_path):
    code = f"""
import ctypes, os, socket, sys
from tfdist.launch import private_network
if os.getuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl({PR_SET_DUMPABLE}, 1)
private_network.enter()
print(socket.if_nameindex(), os.getuid() == os.geteuid() != 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    if "--private-network needs a kernel" in done.stderr:
        pytest.skip("this kernel does not let users make network namespaces")
    assert done.stdout == "[(1, 'lo')] True\n", done.stderr


def test_a_kernel_without_namespaces_gets_an_error_with_a_remedy(monkeypatch):
    def refuse(flags):
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(private_network._LIBC, "unshare", refuse, raising=False)
    with pytest.raises(ClusterError, match=r"--private-network needs(.|\n)*not permitted(.|\n)*user namespaces"):
        private_network.enter()


def test_a_private_network_of_several_hosts_is_refused(run):
    code, _, err = run.finish(
        "--private-network", run.script(""), env={"TF_CONFIG": ClusterSpec.local(1, 0, [1]).to_json()}
    )
    assert code == 2 and "--private-network needs --workers" in err
