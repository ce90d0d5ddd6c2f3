"""The certificate of a run's own etcd: one for etcd and for all its clients, and its own authority.

etcd takes a client only with this certificate, and a client trusts only an etcd that has it. So who can read the file,
which lies in the trial's folder of keys, is a member of the trial, and nobody else reads or writes a key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=3650)
#: etcd is its only peer, on loopback
_LOOPBACK = "127.0.0.1"


def ensure_certificate(path: Path, host: str) -> Path:
    """Make the certificate and its key, in one PEM file that only this user can read, unless there is one for ``host``.

    A running client keeps the certificate that it has read, so one that fits is never replaced. Returns a file with
    the certificate alone: etcd takes a key in the file of its authority for a damaged certificate.
    """
    names = {_name(host), _name(_LOOPBACK)}
    if not path.exists() or names != _names_in(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, _signed(names))
    authority = path.with_suffix(".ca.pem")
    _write(authority, x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(serialization.Encoding.PEM))
    return authority


def _write(path: Path, content: bytes) -> None:
    """Replace a file by one that only this user can read."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    staged.replace(path)


def _signed(names: set[x509.GeneralName]) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd of a realsys trial")])
    now = datetime.datetime.now(datetime.UTC)
    # etcd answers HTTP through a client of its own, which shows etcd's certificate.
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # the clocks of two hosts may differ
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem) + private


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names_in(path: Path) -> set[x509.GeneralName]:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        return set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound):
        return set()
