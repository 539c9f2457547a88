"""Workers meet before TensorFlow connects them, which it does without a deadline, a word, or the interpreter's lock.

They keep the connections by which they met: the kernel closes those of a process that ends, so that is known at once.

Worker 0 listens at its address; each other connects to it and says who it is:

    worker i                         worker 0
      {"worker", "addresses", …}  →    compares: the same cluster, the same versions?
                                  ←    {"missing": [...]}   every second
                                  ←    {"go": true}         when all are there: TensorFlow takes over the port
                                  ←    {"error": "..."}     at worker 0's deadline, or when a worker does not fit
      {"bye": true}                ↔    {"bye": true}        when a program is over
"""

import contextlib
import faulthandler
import importlib.metadata
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import split_address
from tfdist.errors import ClusterError, WorkerLostError

__all__ = ["addresses_of", "connecting", "meet", "unconnected"]

_STATUS_SECONDS = 1.0
_LOG_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_LINE_BYTES = 1 << 20
_HERALD = (
    "import select, sys, time; left = max(0, float(sys.argv[1]) - time.monotonic()); "
    "select.select([0], [], [], left)[0] or sys.stderr.write(sys.argv[2])"
)
_HERALD_SECONDS = 1.0  # so much earlier than the stacks
_PACKAGES = ("tfdist", "tensorflow", "keras")


def meet(cluster: ClusterSpec, timeout_seconds: float) -> Mapping[int, socket.socket]:
    """Waits until all workers of a cluster are there, saying every few seconds for whom.

    Args:
      cluster: The cluster, seen from this worker.
      timeout_seconds: For all to come.

    Returns:
      The connections by which they met: of worker 0 to each other, of the others to worker 0.

    Raises:
      ClusterError: If a worker is missing after that time, or has another cluster or other versions.
    """
    wait = _Wait(cluster, timeout_seconds)
    if cluster.num_workers == 1:
        return {}
    return _receive(cluster, wait) if cluster.worker_id == 0 else _report(cluster, wait)


@contextlib.contextmanager
def connecting(cluster: ClusterSpec, timeout_seconds: float) -> Iterator[None]:
    """Ends this process with the names of the others, its own stacks and exit code 1, unless the block is done in time.

    For calls that hold the interpreter's lock, where no thread of Python can look at a clock. Nor can one speak, so
    another process does, which ends when it hears that this one is done or gone.
    """
    words = f"tfdist: {unconnected(cluster, timeout_seconds)} It ends with exit code 1, here:\n"
    moment = str(time.monotonic() + timeout_seconds - _HERALD_SECONDS)  # of a clock that all processes share
    command = [sys.executable, "-I", "-S", "-c", _HERALD, moment, words]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no room for a process: stacks say enough
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def unconnected(cluster: ClusterSpec, seconds: float) -> str:
    """What is to be said when TensorFlow did not connect workers that had all come."""
    workers = enumerate(addresses_of(cluster))
    others = ", ".join(f"worker {worker} at {address}" for worker, address in workers if worker != cluster.worker_id)
    return (
        f"All {cluster.num_workers} workers have come, and TensorFlow must connect them within {seconds:.0f} s, but "
        f"this is {cluster.describe()} on {socket.gethostname()}, and one of {others} was not there. See their logs, "
        f"or set start_timeout_seconds of tfdist.FaultTolerance to more than {5 * seconds:.0f}."
    )


class _Wait:
    """The time that a worker waits, and what it says meanwhile."""

    def __init__(self, cluster: ClusterSpec, timeout_seconds: float):
        self._cluster = cluster
        self._timeout_seconds = timeout_seconds
        self._start = time.monotonic()
        self._said = self._start

    def check(self, missing: list[int], why: str = "") -> None:
        """Says who is missing, and why if that is known, from time to time; raises when the time is over."""
        now = time.monotonic()
        come = self._cluster.num_workers - len(missing)
        names = ", ".join(f"worker {worker} at {addresses_of(self._cluster)[worker]}" for worker in missing)
        names += f" ({why})" if why else ""
        if now - self._start > self._timeout_seconds:
            raise WorkerLostError(
                f"All {self._cluster.num_workers} workers must come within {self._timeout_seconds:g} s, but {come} "
                f"came; missing: {names}, or two processes have the same index in TF_CONFIG. This is "
                f"{self._cluster.describe()} on {socket.gethostname()}. Start the missing, see their logs, check that "
                "worker 0's port is open to them, or raise start_timeout_seconds of tfdist.FaultTolerance."
            )
        if now - self._said > _LOG_SECONDS:
            self._said = now
            left = self._timeout_seconds - (now - self._start)
            total = self._cluster.num_workers
            logging.warning("%d of %d workers have come; waiting %.0f s more for %s", come, total, left, names)


# Worker 0.


def _receive(cluster: ClusterSpec, wait: _Wait) -> Mapping[int, socket.socket]:
    with contextlib.ExitStack() as stack:
        desk = _Desk(cluster, stack)
        try:
            while desk.missing:
                desk.serve(_STATUS_SECONDS)
                wait.check(desk.missing)
                desk.tell({"missing": desk.missing})
        except ClusterError as error:
            desk.tell({"error": str(error), "lost": isinstance(error, WorkerLostError)})
            raise
        desk.tell({"go": True})
        return {worker: guest.dup() for worker, guest in desk.come.items()}


class _Desk:
    """Where worker 0 receives the others."""

    def __init__(self, cluster: ClusterSpec, stack: contextlib.ExitStack):
        self._cluster = cluster
        self._stack = stack
        self._own = _introduction(cluster)
        self._guests: dict[socket.socket, bytes] = {}
        self.come: dict[int, socket.socket] = {}  # by worker
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._listener = stack.enter_context(_listen(cluster))
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def missing(self) -> list[int]:
        return [worker for worker in range(1, self._cluster.num_workers) if worker not in self.come]

    def serve(self, seconds: float) -> None:
        """Receives guests until something has changed, at most for so long."""
        deadline = time.monotonic() + seconds
        before = self.missing
        while self.missing == before and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]

    def tell(self, message: dict[str, Any]) -> None:
        for guest in list(self.come.values()):
            _send(guest, message)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):  # gone again
            guest, _ = self._listener.accept()
            self._stack.enter_context(guest)
            guest.settimeout(_STATUS_SECONDS)
            self._guests[guest] = b""
            self._selector.register(guest, selectors.EVENT_READ)

    def _read(self, guest: socket.socket) -> None:
        received = b""
        with contextlib.suppress(OSError):
            received = guest.recv(1 << 16)
        self._guests[guest] += received
        if not received or len(self._guests[guest]) > _LINE_BYTES:
            self._dismiss(guest)
        elif self._guests[guest].endswith(b"\n"):
            self._introduce(guest)

    def _introduce(self, guest: socket.socket) -> None:
        introduction = _parse(self._guests[guest])
        if introduction is None or not _is_introduction(introduction):  # not of ours: a health check, a scanner
            self._dismiss(guest)
            return
        error = _misfit(self._own, introduction)
        worker = introduction["worker"]
        if error is None and worker in self.come:
            error = (
                f"Each worker must have an index of its own in TF_CONFIG, but two processes say that they are worker "
                f"{worker}; the second runs on {introduction['host']}. End it, or give it another index."
            )
        if error:
            _send(guest, {"error": error})
            raise ClusterError(error)
        self.come[worker] = guest

    def _dismiss(self, guest: socket.socket) -> None:
        self._selector.unregister(guest)
        self._guests.pop(guest)
        self.come = {worker: known for worker, known in self.come.items() if known is not guest}
        guest.close()


def _listen(cluster: ClusterSpec) -> socket.socket:
    port = split_address(cluster.address)[1]
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    except (OSError, ValueError):  # a machine without IPv6
        pass
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ClusterError(
            f"Worker 0 needs its port to receive the others, but this is {cluster.describe()} on "
            f"{socket.gethostname()}, where it cannot be opened: {error}. `ss -ltnp 'sport = :{port}'` shows who holds "
            "it: end that, or give worker 0 another port in every worker's TF_CONFIG."
        ) from error


# The others.


def _report(cluster: ClusterSpec, wait: _Wait) -> Mapping[int, socket.socket]:
    """Tells worker 0 that this worker is there, until all are."""
    chief = split_address(addresses_of(cluster)[0])
    while True:
        why = ""
        try:
            with socket.create_connection(chief, timeout=_STATUS_SECONDS) as connection:
                _send(connection, _introduction(cluster))
                # Worker 0 speaks every second: who is silent for longer is something else at that address.
                connection.settimeout(3 * _STATUS_SECONDS)
                with connection.makefile("rb") as lines:
                    while message := _parse(lines.readline(_LINE_BYTES)):
                        if "go" in message:
                            return {0: connection.dup()}
                        if "error" in message:
                            kind = WorkerLostError if message.get("lost") else ClusterError
                            raise kind(f"{message['error']} (So says worker 0 to {cluster.describe()}.)")
                        if not _is_status(message, cluster.num_workers):  # not of ours
                            break
                        wait.check(message["missing"])
        except socket.gaierror as error:
            why = f"{error.strerror}: correct the name in TF_CONFIG or make it resolve"
        except OSError as error:
            why = error.strerror or str(error)
        wait.check([0], why)
        time.sleep(_RETRY_SECONDS)


# Both.


def addresses_of(cluster: ClusterSpec) -> list[str]:
    """Of all that train, by worker."""
    return [*cluster.jobs.get("chief", ()), *cluster.jobs.get("worker", ())]


def _introduction(cluster: ClusterSpec) -> dict[str, Any]:
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
    return {
        "worker": cluster.worker_id,
        "addresses": addresses_of(cluster),
        "versions": versions,
        "host": socket.gethostname(),
    }


def _is_introduction(message: dict[str, Any]) -> bool:
    """Whether this is what a worker says, of whatever cluster."""
    worker, addresses = message.get("worker"), message.get("addresses")
    texts = [message.get("versions"), message.get("host"), *(addresses if isinstance(addresses, list) else [None])]
    return type(worker) is int and all(isinstance(text, str) for text in texts) and 0 < worker < len(texts) - 2


def _is_status(message: dict[str, Any], workers: int) -> bool:
    missing = message.get("missing")
    return isinstance(missing, list) and all(type(worker) is int and 0 < worker < workers for worker in missing)


def _misfit(own: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why another worker cannot train with this one."""
    name = f"worker {other['worker']} on {other['host']}"
    if own["addresses"] != other["addresses"]:
        return (
            f"All workers need the same cluster in TF_CONFIG, but worker 0 has {len(own['addresses'])} workers "
            f"({', '.join(own['addresses'])}) and {name} has {len(other['addresses'])} "
            f"({', '.join(other['addresses'])}). Give all the same addresses in the same order."
        )
    if own["versions"] != other["versions"]:
        return (
            f"All workers need the same versions, but worker 0 has {own['versions']}, and {name} has "
            f"{other['versions']}. Install the same everywhere."
        )
    return None


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the reader is gone, which is noticed when reading
        connection.sendall(json.dumps(message).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    """A message, `None` if it is none of ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message else None
