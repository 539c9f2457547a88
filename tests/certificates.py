"""Creates certificates for tests, signed by an authority of the test, with the command `openssl`."""

import subprocess

import pytest

from tfdist.network.tls import TlsFiles

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


class Authority:
    """A certificate authority that signs certificates and stores their files in a directory of the test."""

    def __init__(self, directory, name="authority"):
        self._directory, self._name = directory, name
        self._run(
            "req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", "/CN=a"
        )

    def worker(self, name="worker", subject="IP:127.0.0.1", authority=None):
        """Returns the TLS files of a worker at the host `subject`, which trusts this authority or another one."""
        (self._directory / f"{name}.ext").write_text(f"subjectAltName={subject}")
        self._run("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=w")
        signed = ["-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key", "-CAcreateserial", "-days", "2"]
        self._run("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem", "-extfile", f"{name}.ext")
        trusted = f"{(authority or self)._name}.pem"
        return TlsFiles(*(str(self._directory / file) for file in (f"{name}.pem", f"{name}.key", trusted)))

    def _run(self, *arguments):
        try:
            subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs the command openssl")
