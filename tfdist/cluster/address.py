"""Parses and checks the addresses of workers, such as "host:port"."""

import ipaddress
import json
import socket

_CONNECT_SECONDS = 20.0  # A server on a busy machine answers late.
# RFC 9113: a client begins with this preface and its settings, here empty. A server begins with a frame of settings.
_HTTP2_SETTINGS = b"\x04"
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
_HTTP2_HEADER_BYTES = 9


def split_address(address: str) -> tuple[str, int]:
    """Splits an address "host:port" or "[ipv6]:port" into host and port, without the brackets.

    Raises:
      ValueError: If `address` has neither form.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not is_digits(port) or any(c.isspace() or c in "/@[]" for c in bare):
        raise ValueError(
            f'an address has the form "host:port" (IPv6 "[::1]:2222"), got {json.dumps(address)}. '
            f"Give a host name or IP address and a port, without a scheme or path."
        )
    if ":" in bare and bare == host:
        raise ValueError(
            f"an IPv6 address must be in brackets, got {json.dumps(address)}. Write it as "
            f"{json.dumps(f'[{host}]:{port}')}."
        )
    if bare != host and not _is_ipv6(bare):
        raise ValueError(
            f"only an IPv6 address may be in brackets, got {json.dumps(address)}. "
            f'Write "[::1]:2222", or a host name without brackets.'
        )
    try:
        bare.encode("idna")  # The resolver encodes the name the same way.
    except UnicodeError as error:
        raise ValueError(
            f"a host name has 1 to 63 letters, digits and hyphens between two dots, got {json.dumps(address)} "
            f"({error}). Correct the name, or give an IP address."
        ) from error
    try:
        return bare, checked_port(int(port))
    except ValueError as error:
        raise ValueError(
            f"{error}, in {json.dumps(address)}. Give each process a port that is free on its machine."
        ) from error


def checked_port(port: int) -> int:
    """Returns `port`. Raises `ValueError` unless it is a TCP port, from 1 to 65535."""
    if not 1 <= port <= 65535:
        raise ValueError(f"a port is a number from 1 to 65535, got {port}")
    return port


def check_answers(address: str) -> None:
    """Checks that a gRPC server, such as a tf.data service, answers at `address`: waits for its first frame.

    Raises:
      OSError: If no gRPC server answers at `address` within 20 s.
      ValueError: If `address` is not valid.
    """
    with socket.create_connection(split_address(address), timeout=_CONNECT_SECONDS) as connection:
        connection.sendall(_HTTP2_HELLO)
        try:
            answer = connection.recv(_HTTP2_HEADER_BYTES)
        except TimeoutError as error:
            raise TimeoutError(f"{address} accepts connections, but sent nothing for {_CONNECT_SECONDS:g} s") from error
        if answer[3:4] != _HTTP2_SETTINGS:  # The frame's type.
            raise ConnectionError(f"{address} does not answer as a TensorFlow server")


def is_digits(text: str) -> bool:
    """Returns whether `text` is a whole number of at most nine ASCII digits, as ports and indices must be."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def is_loopback(host: str) -> bool:
    """Returns whether a host name or IP address means loopback on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in ("localhost", "ip6-localhost", "ip6-loopback")


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
