"""The rendezvous: workers find each other at the start, with a deadline, before TensorFlow connects them without one.

The workers keep these connections as liveness connections: when a process ends, the kernel closes them.

Worker 0 listens at its address. Each other worker connects to worker 0, proves the secret of the job if there is one
(see `tfdist.network.handshake`), and introduces itself:

    worker i                         worker 0
      {"worker", "addresses", …}  →    compares: the same cluster, the same versions? (see `admission`)
                                  ←    {"missing": [...]}   every second
                                  ←    {"go": true}         when all have come: TensorFlow takes over the port
                                  ←    {"refused": "..."}   the entry that does not fit; the worker tries again
                                  ←    {"error": "..."}     to admitted workers: at the deadline, or after a misfit

Strangers can connect too. They learn nothing about the cluster, and cannot keep workers out: see
`tfdist.network.connection_acceptor`.
"""

import contextlib
import dataclasses
import faulthandler
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import split_address
from tfdist.cluster.ports import is_held
from tfdist.errors import ClusterError, WorkerLostError
from tfdist.faults.admission import PLAIN_SECONDS, Admission, Introduction
from tfdist.network import listening
from tfdist.network.connection_acceptor import ConnectionAcceptor, Warnings
from tfdist.network.handshake import (
    LINE_BYTES,
    NotOursError,
    RefusedError,
    introduce,
    parse,
    receive,
    send,
)
from tfdist.network.secret import Secret
from tfdist.network.tls import Tls, connect
from tfdist.package_version import version_of

_STATUS_SECONDS = 1.0
_LOG_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_REFUSED_SECONDS = 3 * PLAIN_SECONDS  # A refused worker gives up later than worker 0.
_TOLD_BYTES = 1 << 20  # The longest line that worker 0 sends.
_HERALD = (
    "import select, sys, time; left = max(0, float(sys.argv[1]) - time.monotonic()); "
    "select.select([0], [], [], left)[0] or sys.stderr.write(sys.argv[2])"
)
_HERALD_SECONDS = 1.0  # How long before the stacks the message appears.
_PACKAGES = ("tfdist", "tensorflow", "keras")


def meet(cluster: ClusterSpec, timeout_seconds: float) -> Mapping[int, socket.socket]:
    """Waits until all workers of a cluster have come, and logs the missing workers every few seconds.

    Returns:
      The connections of the rendezvous, by peer: on worker 0 to every peer, on the other workers to worker 0.

    Raises:
      ClusterError: If a worker is missing at the deadline, or has a different cluster, different versions or a
        different secret; or if the environment of this worker has an invalid secret.
    """
    wait = _Wait(cluster, timeout_seconds)
    if cluster.num_workers == 1:
        return {}
    secret = Secret.from_env()
    return _receive(cluster, secret, wait) if cluster.worker_id == 0 else _report(cluster, secret, wait)


@contextlib.contextmanager
def connecting(cluster: ClusterSpec, timeout_seconds: float) -> Iterator[None]:
    """Ends this process with its peers' names, its stacks and exit code 1, unless the block finishes in time.

    Works for calls that hold the interpreter's lock, during which no Python thread can run. Another process therefore
    writes the message. That process ends early when this process has finished the block or has ended.
    """
    words = f"tfdist: {unconnected(cluster, timeout_seconds)} It ends with exit code 1 at this point:\n"
    moment = str(time.monotonic() + timeout_seconds - _HERALD_SECONDS)  # A clock that all processes share.
    command = [sys.executable, "-I", "-S", "-c", _HERALD, moment, words]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # Without another process, only the stacks appear.
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def unconnected(cluster: ClusterSpec, seconds: float) -> str:
    """Returns the error text for workers that have all come, but that TensorFlow did not connect in time."""
    workers = enumerate(cluster.training_addresses)
    others = ", ".join(f"worker {worker} at {address}" for worker, address in workers if worker != cluster.worker_id)
    return (
        f"TensorFlow must connect all {cluster.num_workers} workers within {seconds:.0f} s after they have joined, but "
        f"{cluster.describe()} on {socket.gethostname()} got no connection to one of {others}. See their logs, or set "
        f"start_timeout_seconds of tfdist.FaultTolerance to more than {5 * seconds:.0f}."
    )


class _Wait:
    """The deadline of a worker that waits for all workers to start, and its warnings until then."""

    def __init__(self, cluster: ClusterSpec, timeout_seconds: float):
        self._cluster = cluster
        self._timeout_seconds = timeout_seconds
        self._start = time.monotonic()
        self._said = self._start

    def check(self, missing: list[int], why: str = "") -> None:
        """Logs the missing workers from time to time, with the reason if known; raises after the deadline."""
        now = time.monotonic()
        come = self._cluster.num_workers - len(missing)
        names = ", ".join(f"worker {worker} at {self._cluster.training_addresses[worker]}" for worker in missing)
        names += f" ({why})" if why else ""
        if now - self._start > self._timeout_seconds:
            raise WorkerLostError(
                f"All {self._cluster.num_workers} workers must join within {self._timeout_seconds:g} s, but {come} "
                f"joined; missing: {names}, or two processes have the same index in TF_CONFIG. This is "
                f"{self._cluster.describe()} on {socket.gethostname()}. Start the missing workers, see their logs, let "
                "them reach worker 0's port, or raise start_timeout_seconds of tfdist.FaultTolerance."
            )
        if now - self._said > _LOG_SECONDS:
            self._said = now
            left = self._timeout_seconds - (now - self._start)
            total = self._cluster.num_workers
            logging.warning("%d of %d workers have joined; waiting %.0f s more for %s", come, total, left, names)


# Worker 0.


def _receive(cluster: ClusterSpec, secret: Secret | None, wait: _Wait) -> Mapping[int, socket.socket]:
    """On worker 0: admits all workers of the job at its start, and returns their connections."""
    with _Desk(cluster, secret) as desk:
        try:
            while desk.missing:
                desk.serve(_STATUS_SECONDS)
                wait.check(desk.missing, desk.refused or "")
                desk.tell({"missing": desk.missing})
        except ClusterError as error:
            desk.tell({"error": str(error), "lost": isinstance(error, WorkerLostError)})
            raise
        return desk.let_go()


class _Come(NamedTuple):
    """A worker that worker 0 has admitted: its connection, its IP address and its introduction."""

    connection: socket.socket
    source: str
    introduction: Introduction


class _Desk:
    """Worker 0's side of the rendezvous: admits, refuses and informs the other workers."""

    def __init__(self, cluster: ClusterSpec, secret: Secret | None):
        self._cluster = cluster
        self._secret = secret
        own = _introduction(cluster)
        self._line_bytes = max(LINE_BYTES, 2 * len(repr(own)))
        self._admission = Admission(own, secret is not None, _Resolved(cluster.training_addresses))
        self._come: dict[int, _Come] = {}
        self._warnings = Warnings()
        self._misfit: str | None = None
        tls = Tls.from_env()  # First, since it may raise: no socket is open yet.
        self._reception = ConnectionAcceptor(listen_at(cluster), self._shake_hands, tls)

    def __enter__(self) -> "_Desk":
        return self

    def __exit__(self, *_: object) -> None:
        self._reception.close()
        for worker in list(self._come):
            self._dismiss(worker)

    @property
    def missing(self) -> list[int]:
        """The workers that have not come to the rendezvous, or have left it again."""
        return [worker for worker in range(1, self._cluster.num_workers) if worker not in self._come]

    @property
    def refused(self) -> str | None:
        """A text with the worker that worker 0 refused last and the reason, to explain missing workers."""
        return self._misfit or self._reception.refused

    def serve(self, seconds: float) -> None:
        """Admits or refuses connecting workers until one has come or left, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        before = self.missing
        while self.missing == before and (left := deadline - time.monotonic()) > 0:
            guest = self._reception.next(left)
            self._dismiss_gone()
            if guest is not None:
                self._judge(*guest)

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message to all workers that have come to the rendezvous."""
        for each in self._come.values():
            _send(each.connection, message)

    def let_go(self) -> Mapping[int, socket.socket]:
        """Tells all workers to continue, frees worker 0's port for TensorFlow and returns the connections."""
        self._reception.close()
        self.tell({"go": True})
        come, self._come = self._come, {}
        return {worker: each.connection for worker, each in come.items()}

    def _shake_hands(self, connection: socket.socket) -> Introduction:
        """Performs the handshake with a new connection, and returns the introduction of the worker."""
        introduction = Introduction.read(receive(connection, self._secret, self._line_bytes))
        if introduction is None:
            raise NotOursError("it is not a worker of a tfdist job")
        connection.settimeout(_STATUS_SECONDS)
        return introduction

    def _judge(self, connection: socket.socket, source: str, guest: Introduction) -> None:
        """Admits a worker that has introduced itself, or refuses it."""
        present = self._come.get(guest.worker)
        earlier = (present.source, present.introduction.host) if present else None
        verdict = self._admission.judge(guest, source, earlier, time.monotonic())
        if verdict.refused is None:
            if verdict.problem:
                self._warnings.say(f"{verdict.problem} Worker 0 admits the one at {source}, its host in TF_CONFIG.")
                self._dismiss(guest.worker)
            self._come[guest.worker] = _Come(connection, source, guest)
            return
        # A stranger learns only which of its claims does not fit.
        _send(connection, {"error": verdict.problem} if self._secret else {"refused": verdict.refused})
        connection.close()
        if verdict.is_plain:
            raise ClusterError(verdict.problem)
        self._misfit = f"{guest.describe()} was refused: {verdict.problem}"
        self._warnings.say(f"Worker 0 refuses a worker at {source}: {verdict.problem}")

    def _dismiss_gone(self) -> None:
        """Forgets workers that have closed their connection. Waiting workers send nothing, so any event is a close."""
        poll = select.poll()
        workers = {each.connection.fileno(): worker for worker, each in self._come.items()}
        for descriptor in workers:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
            self._dismiss(workers[descriptor])

    def _dismiss(self, worker: int) -> None:
        self._come.pop(worker).connection.close()


class _Resolved:
    """The IP addresses of the workers' hosts, looked up in a thread since name servers may be slow."""

    def __init__(self, addresses: Sequence[str]):
        self._addresses = addresses
        self._found: dict[str, Collection[str]] = {}
        threading.Thread(target=self._look_up, name="tfdist-resolve", daemon=True).start()

    def __call__(self, worker: int) -> Collection[str]:
        """Returns the IP addresses of a worker's host that are known so far."""
        return self._found.get(split_address(self._addresses[worker])[0], ())

    def _look_up(self) -> None:
        for host in {split_address(address)[0]: None for address in self._addresses}:
            self._found[host] = frozenset(listening.addresses_of(host))


def listen_at(cluster: ClusterSpec) -> list[socket.socket]:
    """Listens at the address of worker 0 in TF_CONFIG. Raises `ClusterError` if the port is taken."""
    host, port = split_address(cluster.address)
    try:
        return listening.listen(host, port, backlog=1024, reuse_port=is_held(port))
    except OSError as error:
        raise ClusterError(
            f"Worker 0 needs its port to receive its peers, but {cluster.describe()} on {socket.gethostname()} cannot "
            f"open it: {error}. `ss -ltnp 'sport = :{port}'` shows which process holds the port: end that process, or "
            "give worker 0 another port in every worker's TF_CONFIG."
        ) from error


# The other workers.


def _report(cluster: ClusterSpec, secret: Secret | None, wait: _Wait) -> Mapping[int, socket.socket]:
    """On the other workers: connects to worker 0 again and again until all workers have come."""
    refusals, tls = _Refusals(cluster), Tls.from_env()
    while True:
        why = ""
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(_connect(cluster, tls))
                introduce(connection, secret, dataclasses.asdict(_introduction(cluster)))
                if _is_let_go(connection, cluster, wait, refusals):
                    stack.pop_all()
                    return {0: connection}
        except RefusedError as error:
            refusals.note(f"the handshake with worker 0 failed ({error})")
        except NotOursError as error:
            why = str(error)
        except socket.gaierror as error:
            why = f"{error.strerror}: correct the name in TF_CONFIG or make it resolve"
        except OSError as error:
            why = error.strerror or str(error)
        refusals.check()
        wait.check([0], refusals.last or why)
        time.sleep(_STATUS_SECONDS if refusals.last else _RETRY_SECONDS)


def _connect(cluster: ClusterSpec, tls: Tls | None) -> socket.socket:
    """Opens a connection to worker 0, with TLS if the job uses it."""
    host, port = split_address(cluster.training_addresses[0])
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), timeout=3 * _STATUS_SECONDS))
        secured = connect(tls, connection, host)
        stack.pop_all()
        return secured


def _is_let_go(connection: socket.socket, cluster: ClusterSpec, wait: _Wait, refusals: "_Refusals") -> bool:
    """Reads worker 0's messages until all workers have come; returns False if it refuses, or is not a worker.

    Worker 0 sends a message every second. A longer silence than the connection's timeout means another program.
    """
    with connection.makefile("rb") as lines:
        while message := parse(lines.readline(_TOLD_BYTES)):
            if "go" in message:
                return True
            if "error" in message:
                kind = WorkerLostError if message.get("lost") else ClusterError
                raise kind(f"{message['error']} (Worker 0 reports this to {cluster.describe()}.)")
            if message.get("refused") in _REMEDIES:
                refusals.note(_REMEDIES[message["refused"]])
                return False
            if not _is_status(message, cluster.num_workers):  # Not from tfdist.
                return False
            refusals.forget()
            wait.check(message["missing"])
    return False


_REMEDIES = {
    "cluster": "worker 0 has another cluster in its TF_CONFIG. Give all workers the same addresses in the same order",
    "versions": f"worker 0 has other versions of {', '.join(_PACKAGES)}. Install the same versions on all workers",
    "index": "another process has the same index. End one of them, or give it another index in TF_CONFIG",
}


class _Refusals:
    """Why and since when worker 0 has refused this worker without a break, to raise an error after a while.

    Attributes:
      last: The last reason; `None` if worker 0 does not refuse this worker.
    """

    def __init__(self, cluster: ClusterSpec):
        self._cluster = cluster
        self._since = 0.0
        self.last: str | None = None

    def note(self, why: str) -> None:
        """Records why worker 0 refuses this worker, and logs the first refusal."""
        if self.last is None:
            self._since = time.monotonic()
            logging.warning("worker 0 at %s refuses this worker: %s", self._cluster.training_addresses[0], why)
        self.last = why

    def forget(self) -> None:
        """Records that worker 0 no longer refuses this worker."""
        self.last = None

    def check(self) -> None:
        """Raises if worker 0 has refused this worker for more than `_REFUSED_SECONDS`."""
        if self.last is not None and time.monotonic() - self._since > _REFUSED_SECONDS:
            own = _introduction(self._cluster)
            raise ClusterError(
                f"Worker 0 must admit each worker, but refuses {self._cluster.describe()} on {own.host}: {self.last}. "
                f"This worker has the addresses {', '.join(own.addresses)} and the versions {own.versions}. See the "
                f"log of worker 0 at {own.addresses[0]} for its addresses and versions."
            )


# All workers.


def _introduction(cluster: ClusterSpec) -> Introduction:
    versions = ", ".join(f"{package} {version_of(package)}" for package in _PACKAGES)
    return Introduction(cluster.worker_id, cluster.training_addresses, versions, socket.gethostname())


def _is_status(message: dict[str, Any], workers: int) -> bool:
    missing = message.get("missing")
    return isinstance(missing, list) and all(type(worker) is int and 0 < worker < workers for worker in missing)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # A later read notices that the peer is gone.
        send(connection, message)
