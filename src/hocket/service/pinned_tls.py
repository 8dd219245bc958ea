"""TLS with a certificate of the service's own, which callers know by its fingerprint.

The certificate is made at the first start and signed by nobody. A caller gets its fingerprint
(SHA-256, from ``serve`` or the join command of agents) and accepts no other certificate; names and
dates do not matter then. The key is as private as the rest of the state folder.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import os
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hocket.base.errors import InputFileError, UsageError
from hocket.service.plain_file import open_plain

if TYPE_CHECKING:
    import socket

# Names of the files in the state folder, and how long a new certificate is valid.
CERTIFICATE, KEY = "tls-certificate.pem", "tls-key.pem"
_VALID = datetime.timedelta(days=3650)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class ServerTls(NamedTuple):
    """TLS context of a server, and the fingerprint that callers check."""

    context: ssl.SSLContext
    fingerprint: str


def open_tls(folder: Path) -> ServerTls:
    """The certificate of a state folder, made if there is none."""
    certificate, key = folder / CERTIFICATE, folder / KEY
    if not (certificate.exists() and key.exists()):
        _make(certificate, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
        data = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    except (OSError, ValueError) as error:
        hint = f"delete {CERTIFICATE} and {KEY}: new ones are made, and agents must join anew"
        message = f"this is no certificate: {error}"
        raise InputFileError(message, hint=hint, where=str(certificate)) from None
    return ServerTls(context, hashlib.sha256(data).hexdigest())


def _make(certificate: Path, key: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hocket fleet")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(secret, hashes.SHA256())
    )
    data = secret.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # The key is written first: if the certificate is missing, both are made anew.
    for path, content in (
        (key, data),
        (certificate, made.public_bytes(serialization.Encoding.PEM)),
    ):
        with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content)


def checked_fingerprint(text: str) -> str:
    """The fingerprint in the form of `open_tls`; colons and capitals are accepted."""
    plain = text.replace(":", "").lower()
    if not _FINGERPRINT.fullmatch(plain):
        hint = "copy it from what hocket fleet serve printed"
        raise UsageError("a fingerprint has 64 hexadecimal digits", hint=hint)
    return plain


class WrongCertificateError(OSError):
    """The certificate is not the one with the known fingerprint."""


class PinnedConnection(http.client.HTTPSConnection):
    """HTTPS to the one service whose certificate has this fingerprint; others are sent nothing."""

    def __init__(self, place: str, fingerprint: str, timeout_s: float | None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # The fingerprint is checked in place of names and signatures.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        super().__init__(place, timeout=timeout_s, context=context)
        self._fingerprint = fingerprint

    def connect(self) -> None:
        """Connect, and hang up where the certificate is another one."""
        super().connect()
        its_socket: socket.socket | None = self.sock
        assert isinstance(its_socket, ssl.SSLSocket)
        found = hashlib.sha256(its_socket.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(found, self._fingerprint):
            self.close()
            raise WrongCertificateError("its certificate has another fingerprint")


def connection_to(
    scheme: str, place: str, fingerprint: str, timeout_s: float | None
) -> http.client.HTTPConnection:
    """A connection to ``host:port``; with a fingerprint only to the service that has it."""
    if scheme != "https":
        return http.client.HTTPConnection(place, timeout=timeout_s)
    if fingerprint:
        return PinnedConnection(place, fingerprint, timeout_s)
    return http.client.HTTPSConnection(place, timeout=timeout_s)
