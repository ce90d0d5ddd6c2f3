"""Rules of ``cluster.name_store`` for etcd: addresses, TLS, user."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from realsys.config.sections.schema_cluster import NameStoreConfig
from realsys.errors import ConfigError

SECTION = "cluster.name_store"


def check_etcd(store: NameStoreConfig) -> None:
    """Check the addresses, the files of TLS, and the user. Raises ConfigError."""
    for address in store.address.split(","):
        host, _, port = address.rpartition(":")
        if not host or " " in address or not port.isdigit() or not 0 < int(port) < 65536:
            problem = "cannot be read: write host:port, and several with commas between them"
            raise ConfigError(f"{SECTION}.address", store.address, problem)
    if store.start and ("," in store.address or store.ca or store.user):
        problem = "starts one etcd with a certificate of its own: name one address only, and set neither ca nor user"
        raise ConfigError(f"{SECTION}.start", True, problem)
    if not store.ca and (store.cert or store.key):
        raise ConfigError(f"{SECTION}.ca", "", "must be set for TLS: name the file of etcd's authority")
    if bool(store.cert) != bool(store.key):
        raise ConfigError(f"{SECTION}.cert", store.cert, "must be set together with key")
    if store.password_file and not store.user:
        raise ConfigError(f"{SECTION}.user", "", "must be set, because password_file is")
    _check_pem_files(store)


def _check_pem_files(store: NameStoreConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    files: tuple[tuple[str, str, Callable[[], None]], ...] = (
        ("ca", store.ca, lambda: context.load_verify_locations(store.ca)),
        # a function as password: OpenSSL would ask the terminal for that of an encrypted key
        ("cert", store.cert, lambda: context.load_cert_chain(store.cert, store.key, password=lambda: "")),
    )
    for name, path, load in files:
        try:
            if path:
                load()
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            missing = next((each for each in (path, store.key) if not Path(each).is_file()), "")
            cause = f"{missing} is not a file" if missing else f"not PEM, or not a pair with key: {exc}"
            raise ConfigError(f"{SECTION}.{name}", path, f"cannot be read: {cause}") from None
