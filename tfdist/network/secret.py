"""The shared secret of a job's workers, and proofs of the secret that do not reveal it."""

import hashlib
import hmac
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ClusterError

SECRET = "TFDIST_SECRET"
"""The environment variable with the secret of this job."""

SECRET_FILE = "TFDIST_SECRET_FILE"
"""The environment variable with the path of a file that contains the secret, such as a mounted Kubernetes Secret."""

_LEAST_BYTES = 16
_MOST_BYTES = 1 << 16
_REMEDY = "Make one with `openssl rand -hex 32`, and give the same secret to every worker."


def new_secret() -> str:
    """Returns a new random secret for the workers of a job, as text for the environment variable TFDIST_SECRET."""
    return secrets.token_hex(32)


def secret_is_given(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether the environment (`os.environ` if None) sets a secret for the workers, or the path of one."""
    environ = os.environ if environ is None else environ
    return any(environ.get(variable, "").strip() for variable in (SECRET, SECRET_FILE))


class Secret:
    """A key that the workers of a job share. The key is never sent and never printed."""

    def __init__(self, key: bytes):
        self._key = key

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Secret | None":
        """Reads the secret from TFDIST_SECRET, or from the file that TFDIST_SECRET_FILE names; None if neither is set.

        Raises:
          ClusterError: If both variables are set, the file cannot be read, or the secret is shorter than 16 bytes.
        """
        environ = os.environ if environ is None else environ
        text, path = environ.get(SECRET, "").strip(), environ.get(SECRET_FILE, "").strip()
        if text and path:
            raise ClusterError(
                f"The secret of a job comes from {SECRET} or {SECRET_FILE}, but both are set. Unset one."
            )
        if not text and not path:
            return None
        key = _read(path) if path else text.encode()
        if len(key) < _LEAST_BYTES:
            origin = f"the file {path} of {SECRET_FILE}" if path else SECRET
            raise ClusterError(
                f"The secret of a job needs at least {_LEAST_BYTES} bytes, but {origin} has {len(key)}. {_REMEDY}"
            )
        return cls(key)

    def joined(self, more: bytes) -> "Secret":
        """Returns a new secret for other connections, which can be derived only from both this secret and `more`."""
        return Secret(hmac.digest(self._key, more, "sha256"))

    def proof(self, *parts: str) -> str:
        """Returns a proof (HMAC) of knowing the secret, which a handshake sends; valid for exactly these texts."""
        made = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            text = part.encode()
            made.update(len(text).to_bytes(8, "big") + text)
        return made.hexdigest()

    def accepts(self, proof: Any, *parts: str) -> bool:
        """Returns whether a received proof shows that the sender knows this secret, given the proof's texts `parts`."""
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, self.proof(*parts))


def _read(path: str) -> bytes:
    try:
        with pathlib.Path(path).open("rb") as file:
            return file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise ClusterError(
            f"{SECRET_FILE} names {path}, which cannot be read: {error.strerror}. Correct the path, or mount the file "
            "on every host."
        ) from error
