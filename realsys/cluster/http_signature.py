"""Signatures of requests: a client proves that it knows the trial's token, and does not send it.

    Authorization: Realsys DIGEST SIGNATURE     of the body; HMAC of method, host:port, path with query, and DIGEST

After the death of a service another user may listen at its port. What a client sends there is of little use: a
signature holds for one request of one address. There it may be repeated; docs/security.md says what that does.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import Scope
from yarl import URL

SCHEME = b"Realsys "


def authorization(token: str, method: str, url: str, body: bytes = b"") -> str:
    """Return the value of the header ``Authorization`` for one request."""
    target, digest = URL(url), hashlib.sha256(body).hexdigest().encode()
    host = (target.host_port_subcomponent or "").encode()
    signature = _sign(token, method, host, target.raw_path_qs.encode(), digest)
    return (SCHEME + digest + b" " + signature).decode()


def signed_digest(token: str, scope: Scope, host: bytes, given: bytes) -> bytes:
    """Return the hexadecimal SHA-256 that the body of a signed request has, b"" if its signature does not hold here.

    ``host``: header ``Host``. ``given``: header ``Authorization``.
    """
    digest, _, signature = given.removeprefix(SCHEME).partition(b" ")
    query: bytes = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    is_right = hmac.compare_digest(signature, _sign(token, scope["method"], host, target, digest))
    try:
        return digest if is_right and _is_own(host, scope["server"]) else b""
    except ValueError:  # no address has that form: services advertise no names
        return b""


def _sign(token: str, method: str, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"\n".join([method.encode(), *parts]), "sha256").hex().encode()


@functools.lru_cache(64)  # clients use few addresses, and only a member's request comes this far
def _is_own(host: bytes, server: tuple[str, int | None]) -> bool:
    """Return False for a request to another address, whose owner has passed it on."""
    url = URL(f"http://{host.decode('latin-1')}")  # port 80 is left out in the header
    theirs, ours = _address("127.0.0.1" if url.host == "localhost" else url.host or ""), _address(server[0])
    return url.port == server[1] and (theirs == ours or (theirs.is_loopback and ours.is_loopback))


def _address(text: str) -> IPv4Address | IPv6Address:
    """Return the address; for the form that an IPv4 address has at a socket of both families, the IPv4 address."""
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address
