"""TLS for connections between workers: both ends show a certificate of the same authority."""

import dataclasses
import os
import socket
import ssl
from collections.abc import Mapping

from tfdist.errors import ClusterError
from tfdist.network.handshake import RefusedError, send

TLS_VARIABLES = ("TFDIST_TLS_CERT", "TFDIST_TLS_KEY", "TFDIST_TLS_CA")
"""The environment variables with the paths of the certificate, its key and the authority's certificate."""

_FIRST_OF_A_WORKER, _FIRST_OF_TLS = b"{", b"\x16"
_FOR_ALL = f"Set {', '.join(TLS_VARIABLES)} for all workers, or for none"


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """The TLS files of a worker, in PEM format.

    Attributes:
      certificate: The worker's certificate, for the host name or IP address that TF_CONFIG has for it.
      key: The key of the certificate.
      authority: The certificate of the authority that has signed the certificates of all workers.
    """

    certificate: str
    key: str
    authority: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "TlsFiles | None":
        """Reads the paths from the environment (`os.environ` if None); returns `None` if no variable is set.

        Raises:
          ClusterError: If only some of these variables are set.
        """
        environ = os.environ if environ is None else environ
        paths = {variable: environ.get(variable, "").strip() for variable in TLS_VARIABLES}
        missing = [variable for variable, path in paths.items() if not path]
        if len(missing) == len(TLS_VARIABLES):
            return None
        if missing:
            raise ClusterError(f"TLS needs three files, but {', '.join(missing)} is not set. {_FOR_ALL}.")
        return cls(*paths.values())


class Tls:
    """Wraps connections between workers in TLS 1.3, with certificates on both ends.

    Raises:
      ClusterError: If a file cannot be read, or is not of the needed kind.
    """

    def __init__(self, files: TlsFiles):
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, files)
        self._server.num_tickets = 0  # Tickets would make a connection readable without a message.
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, files)

    @classmethod
    def from_env(cls) -> "Tls | None":
        """Reads the TLS settings from the environment; returns `None` without TLS.

        Raises:
          ClusterError: If the variables or the files are wrong.
        """
        files = TlsFiles.from_env()
        return cls(files) if files else None

    def connect(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Wraps a connection to a worker on `host`. The worker's certificate must name this host.

        Raises:
          RefusedError: If the other end has no certificate for `host`, or no TLS.
          OSError: If the connection fails.
        """
        try:
            return self._client.wrap_socket(connection, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            problem = f"its certificate is not valid for {host}: {error.verify_message}"
            raise RefusedError(f"{problem}. See docs/how_to/security.md on certificates") from error
        except ssl.SSLError as error:
            raise RefusedError(f"the TLS handshake failed ({_reason(error)}). {_FOR_ALL}") from error

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wraps a connection that another worker has opened; `handshake` must follow."""
        return self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def connect(tls: Tls | None, connection: socket.socket, host: str) -> socket.socket:
    """Secures a connection to a worker by `Tls.connect`; returns the connection unchanged without TLS."""
    return tls.connect(connection, host) if tls else connection


def accept(tls: Tls | None, connection: socket.socket) -> socket.socket:
    """Waits for the first byte of an accepted connection and wraps it; returns it unchanged without TLS.

    Raises:
      RefusedError: If one end has TLS and the other has none.
      OSError: If the connection fails.
    """
    first = connection.recv(1, socket.MSG_PEEK)
    if tls and first == _FIRST_OF_A_WORKER:
        send(connection, {"refused": "tls"})
        raise RefusedError(f"it does not use TLS, but this worker does. {_FOR_ALL}")
    if not tls and first == _FIRST_OF_TLS:
        raise RefusedError(f"it uses TLS, but this worker does not. {_FOR_ALL}")
    return tls.accept(connection) if tls else connection


def handshake(connection: socket.socket) -> None:
    """Performs the TLS handshake of an accepted connection, if the connection uses TLS.

    Raises:
      RefusedError: If the other end has no certificate of the authority, or no TLS.
      OSError: If the connection fails.
    """
    if isinstance(connection, ssl.SSLSocket):
        try:
            connection.do_handshake()
        except ssl.SSLError as error:
            raise RefusedError(f"the TLS handshake failed ({_reason(error)})") from error


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for load, variables, paths in (
        (context.load_cert_chain, TLS_VARIABLES[:2], (files.certificate, files.key)),
        (context.load_verify_locations, TLS_VARIABLES[2:], (files.authority,)),
    ):
        try:
            load(*paths)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ClusterError(
                f"TLS needs a certificate, its key and the authority's certificate in PEM files, but "
                f"{' and '.join(variables)} name {' and '.join(paths)}: {why}. Correct the paths."
            ) from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", None) or error.reason or str(error)
