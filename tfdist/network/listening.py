"""Opens sockets that listen for other workers, if possible only at the address that TF_CONFIG gives this worker."""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence

from absl import logging

from tfdist.cluster.address import is_loopback


def listen(host: str, port: int, backlog: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Listens at those addresses of a host name that belong to this machine.

    Behind NAT, or with the name of a Kubernetes Service, no address belongs to this machine. The sockets then listen at
    all addresses, and a log message notes this. The same holds for a name that means loopback only on this machine.

    Args:
      host: A host name or an IP address.
      port: The port; 0 selects a free port, the same at all addresses.
      backlog: Maximum number of waiting connections.
      reuse_port: Whether another socket of this user may be bound to the port; see `tfdist.cluster.ports.HeldPorts`.

    Returns:
      The sockets, at least one.

    Raises:
      OSError: If the port cannot be opened.
    """
    found: list[socket.socket] = []
    for address in addresses_of(host):
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not is_loopback(host):
            continue  # Debian's /etc/hosts does this to a machine's own name: peers could not connect.
        try:
            found.append(_listen_at(address, found[0].getsockname()[1] if found else port, backlog, reuse_port))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and not found:
                raise
    if found:
        return found
    logging.info(
        "%s is not an address of this machine, so this worker listens at all its addresses. To prevent this, give an "
        "address of this machine in TF_CONFIG, or close the port in a firewall.",
        host,
    )
    with contextlib.suppress(OSError, ValueError):  # A machine without IPv6.
        family = socket.AF_INET6
        return [
            socket.create_server(("", port), family=family, backlog=backlog, reuse_port=reuse_port, dualstack_ipv6=True)
        ]
    return [socket.create_server(("", port), backlog=backlog, reuse_port=reuse_port)]


def addresses_of(host: str) -> Sequence[str]:
    """Returns the distinct IP addresses of a host name, or none if the lookup fails."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _listen_at(address: str, port: int, backlog: int, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog, reuse_port=reuse_port)
