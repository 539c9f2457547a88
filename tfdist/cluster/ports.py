"""Finds free TCP ports on this machine, and checks that a worker's own port is free."""

import errno
import os
import pathlib
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from absl import logging

from tfdist.cluster.address import split_address
from tfdist.cluster.port_holder import holder_of
from tfdist.cluster.spec import ClusterSpec
from tfdist.errors import ClusterError, TFConfigError

_HELD = "TFDIST_HELD_PORTS"  # Environment variable that lists the ports held for the workers.
_FIRST_PORT = 10000
_RETRY_SECONDS = 1.0
_RESOLVE_SECONDS = 15.0  # The resolver abandons a dead first name server after 5 s, for each suffix.


class HeldPorts:
    """TCP ports of this machine that are reserved for the workers of one job until `close`.

    A port that is only found free can be taken before a worker opens it some ten seconds later. Sockets that do not
    listen therefore bind the ports. A process of the same user can still open a held port by setting SO_REUSEPORT, as
    TensorFlow's server does with `env`; that process then receives all connections.

    Args:
      numbers: The ports.
      sockets: The sockets that hold them.
    """

    def __init__(self, numbers: Sequence[int], sockets: Sequence[socket.socket]):
        self.numbers = tuple(numbers)
        self._sockets = sockets

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables that pass the held ports to the workers and to their TensorFlow."""
        return {_HELD: ",".join(map(str, self.numbers)), "TF_GRPC_REUSE_PORT": "1"}

    def close(self) -> None:
        """Releases the ports. Sockets that workers have opened at these ports stay open."""
        for each in self._sockets:
            each.close()


def hold_ports(n: int) -> HeldPorts:
    """Finds `n` free TCP ports and holds them for workers that are started next.

    Raises:
      ValueError: If `n` is negative.
      ClusterError: If this machine has no `n` free ports.
    """
    sockets = _bind_free(n)
    for each in sockets:
        # Set after binding. A socket that binds with SO_REUSEPORT could share the port of another process.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return HeldPorts([each.getsockname()[1] for each in sockets], sockets)


def is_held(port: int) -> bool:
    """Returns whether the parent process holds `port` with `HeldPorts` for this process."""
    return str(port) in os.environ.get(_HELD, "").split(",")


def free_ports(n: int) -> list[int]:
    """Returns `n` TCP ports that are free on this machine.

    All ports are held until the last one is found, so they are distinct. Where possible they lie outside the kernel's
    range for outgoing connections. A worker takes seconds to bind its port, and a port of that range can be taken in
    the meantime.

    Raises:
      ValueError: If `n` is negative.
      ClusterError: If this machine has no `n` free ports.
    """
    held = _bind_free(n)
    try:
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _bind_free(n: int) -> list[socket.socket]:
    if n < 0:
        raise ValueError(f"free_ports needs n >= 0, got {n}.")
    low, high = _ephemeral_range()
    candidates = [*range(_FIRST_PORT, low), *range(high + 1, 65536)]
    # Programs that call `random.seed` would get the same ports from the global generator.
    random.SystemRandom().shuffle(candidates)
    candidates += [0] * n  # 0: any port that the kernel still has
    held: list[socket.socket] = []
    try:
        while candidates and len(held) < n:
            try:
                held.append(_bind(candidates.pop(0), reuse=False))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise ClusterError(
                        f"{n} free TCP ports are needed, but this process can hold only {len(held)}: {error}. "
                        f"Ask for fewer workers, or raise the limit of open files (`ulimit -n`)."
                    ) from error
        if len(held) < n:
            raise ClusterError(f"{n} free TCP ports are needed, but only {len(held)} are free. Ask for fewer workers.")
    except BaseException:
        for each in held:
            each.close()
        raise
    return held


def check_bindable(spec: ClusterSpec, *, pod_seconds: float = 0.0) -> None:
    """Checks that this worker can serve its own address.

    An unknown host name is an error at once. A name server has at most 15 s to answer. A Kubernetes pod runs before its
    name is known, so there this function waits up to `pod_seconds` for the name, or skips that check.

    Two TensorFlow processes on one port do not notice each other, since gRPC shares ports. Their peers reach either
    process at random, and all wait forever. This function therefore tries the port before TensorFlow opens it. Whether
    the host is this machine is not checked, since a service name may resolve to another address.

    Args:
      spec: The cluster, seen from this process.
      pod_seconds: How long to wait for the host name in a pod; 0 skips the check of the name there.

    Raises:
      TFConfigError: If the host name does not resolve, or the port is taken or not permitted.
    """
    host, _ = split_address(spec.address)
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        _resolve(host, spec)
    elif pod_seconds:
        _wait_for_name(host, spec, pod_seconds)
    check_port(spec)


def check_port(spec: ClusterSpec) -> None:
    """Checks that this worker can open its own port. Needs no name server.

    Raises:
      TFConfigError: If the port is taken or not permitted.
    """
    _, port = split_address(spec.address)
    if is_held(port):
        return
    try:
        # TensorFlow listens at all interfaces, whatever host TF_CONFIG names.
        _bind(port, reuse=True).close()
    except OSError as error:
        problem = f"which cannot be opened here: {error}. Use another port"
        if error.errno == errno.EADDRINUSE:
            holder = holder_of(port) or f"a process that `ss -ltnp 'sport = :{port}'` shows to root"
            problem = (
                f"but that port is already taken on this machine. It is held by {holder}, often a worker of an earlier "
                "run: end it, or give this process another port"
            )
        elif error.errno == errno.EACCES:
            problem = "which this user may not open. Use a port above 1023"
        raise TFConfigError(
            f"TF_CONFIG gives this process ({spec.describe()}) port {port}, {problem} in every worker's TF_CONFIG."
        ) from error


def _wait_for_name(host: str, spec: ClusterSpec, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            _resolve(host, spec)
            return
        except TFConfigError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise
            logging.log_every_n_seconds(logging.WARNING, "waiting until Kubernetes resolves %s: %s", 10, host, error)
        time.sleep(_RETRY_SECONDS)


def _resolve(host: str, spec: ClusterSpec) -> None:
    """Looks up the IP addresses of `host` in a thread, since the system's resolver has no deadline."""
    failures: list[OSError | UnicodeError] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failures.append(error)

    thread = threading.Thread(target=look_up, name="tfdist-resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    if not thread.is_alive() and not failures:
        return
    why = str(failures[0]) if failures else f"no answer within {_RESOLVE_SECONDS:g} s"
    raise TFConfigError(
        f"TF_CONFIG gives this process the address {spec.address}, but the host name {host!r} does not resolve here "
        f"({why}). Correct the name, add it to the name service or /etc/hosts, or use the machine's IP address in "
        f"every worker's TF_CONFIG."
    ) from (failures[0] if failures else None)


def _bind(port: int, *, reuse: bool) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if reuse:  # Then an earlier run's connections in TIME_WAIT do not count as holders.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999  # Linux's default
