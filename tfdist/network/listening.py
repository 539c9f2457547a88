"""Listening sockets at the address that TF_CONFIG gives a worker, and at no other."""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence

from absl import logging

from tfdist.cluster.address import is_loopback

__all__ = ["addresses_of", "listen"]


def listen(host: str, port: int, backlog: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Listens at the addresses of this machine that a host name has.

    If the name has none, as behind NAT or with the name of a Kubernetes Service, the sockets listen at all addresses,
    and a log line says so. The same holds for a name that is loopback on this machine alone.

    Args:
      host: A host name or an IP address.
      port: The port; 0 for a free one, the same at all addresses.
      backlog: How many connections may wait.
      reuse_port: Whether another socket of this user may be bound to the port; see `tfdist.cluster.ports.HeldPorts`.

    Returns:
      The sockets, at least one.

    Raises:
      OSError: If the port cannot be opened.
    """
    found: list[socket.socket] = []
    for address in addresses_of(host):
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not is_loopback(host):
            continue  # As of a machine's own name in /etc/hosts of Debian: other machines could not connect.
        try:
            found.append(_listen_at(address, found[0].getsockname()[1] if found else port, backlog, reuse_port))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and not found:
                raise
    if found:
        return found
    logging.info(
        "%s is no address of this machine, so this worker listens at all its addresses. Where that is not wanted, give "
        "an address of this machine in TF_CONFIG, or close the port in a firewall.",
        host,
    )
    with contextlib.suppress(OSError, ValueError):  # A machine without IPv6.
        family = socket.AF_INET6
        return [
            socket.create_server(("", port), family=family, backlog=backlog, reuse_port=reuse_port, dualstack_ipv6=True)
        ]
    return [socket.create_server(("", port), backlog=backlog, reuse_port=reuse_port)]


def addresses_of(host: str) -> Sequence[str]:
    """The IP addresses of a host name, each once; none if it cannot be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _listen_at(address: str, port: int, backlog: int, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog, reuse_port=reuse_port)
