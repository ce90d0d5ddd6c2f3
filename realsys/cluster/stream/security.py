"""CURVE keys of a trial: they decide which processes may speak on its sockets.

Every process of a trial reads the same key file (mode 0600); a process that can read it is a member. A server
identifies itself with the server key, and a client is let in only with the trial's client key. Processes of one machine
need no keys: their streams are Unix sockets in a folder of the user, which costs less than encryption. Without keys
``sockets.bind_server`` refuses a host beyond loopback.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.auth.thread

from realsys.cluster.network import is_loopback
from realsys.errors import MALFORMED, StreamError

KEY_FILE = "stream.keys"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pairs of one trial, each key 40 characters of Z85."""

    server_public: bytes
    server_secret: bytes = field(repr=False)  # a repr could end in a log
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Create new random key pairs."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(server_public, server_secret, client_public, client_secret)

    def secure_server(self, server: zmq.Socket[bytes]) -> None:
        """Set the server's keys; call it before the socket is bound."""
        server.curve_server = True
        server.curve_secretkey = self.server_secret
        server.curve_publickey = self.server_public

    def secure_client(self, client: zmq.Socket[bytes]) -> None:
        """Set the client's keys; call it before the socket connects."""
        client.curve_serverkey = self.server_public
        client.curve_secretkey = self.client_secret
        client.curve_publickey = self.client_public

    def start_authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.auth.thread.ThreadAuthenticator:
        """Start the thread that checks the client key in each handshake of a server of ``context``."""
        # CURVE alone only encrypts: without an authenticator it lets in a client with any key.
        authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", _OneClient(self.client_public))
        return authenticator


class _OneClient:
    """Credentials provider of pyzmq's authenticator: accepts one client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if ``key`` is the trial's client key."""
        return secrets.compare_digest(key, self._public)


class _KeyFile(msgspec.Struct):
    """Content of the key file, as JSON."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def ensure_keys(directory: Path) -> CurveKeys:
    """Load the keys kept in ``directory``; the first call creates them.

    Concurrent first calls agree on one set of keys.
    """
    path = directory / KEY_FILE
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path, CurveKeys.generate())
    return load_keys(directory)


def load_keys(directory: Path) -> CurveKeys:
    """Load the keys kept in ``directory``; StreamError if they are missing or other users may read them."""
    path = directory / KEY_FILE
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as err:
        raise StreamError(f"stream keys {path}: {err.strerror}: the launcher creates them with ensure_keys") from err
    if stat.S_IMODE(mode) & 0o077:
        raise StreamError(f"stream keys {path}: mode {stat.S_IMODE(mode):04o} lets others read them: chmod 600 it")
    try:
        texts = msgspec.json.decode(content, type=_KeyFile)
        keys = [getattr(texts, name).encode("ascii") for name in texts.__struct_fields__]
    except (ValueError, *MALFORMED) as err:
        raise StreamError(f"stream keys {path}: {err}: delete the file to get new ones") from err
    if any(len(key) != 40 for key in keys):
        raise StreamError(f"stream keys {path}: a key is not 40 characters long: delete the file to get new ones")
    return CurveKeys(*keys)


def keys_for(host: str, directory: Path) -> CurveKeys | None:
    """Return the keys that a process on ``host`` needs: None on loopback."""
    return None if is_loopback(host) else ensure_keys(directory)


def _create(path: Path, keys: CurveKeys) -> None:
    texts = _KeyFile(
        keys.server_public.decode(),
        keys.server_secret.decode(),
        keys.client_public.decode(),
        keys.client_secret.decode(),
    )
    # Completed under another name: a process that reads the key file never sees half of it.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(texts))
            file.flush()
            os.fsync(file.fileno())
        try:
            # Unlike rename, link fails if the file exists: the keys of the process that was first stay.
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
