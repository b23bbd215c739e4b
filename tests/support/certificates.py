"""Self-made certificates for tests of TLS."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, *addresses: str) -> tuple[str, str]:
    """Write a certificate for IP addresses, and its private key. Return both paths."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    names = ",".join(f"IP:{address}" for address in addresses)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=unstale", "-addext", f"subjectAltName={names}"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def trusting(certificate: str) -> ssl.SSLContext:
    """Return the TLS settings of a client that trusts only this certificate."""
    return ssl.create_default_context(cafile=certificate)
