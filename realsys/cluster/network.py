"""Sockets and addresses: bind first, register the address afterwards."""

from __future__ import annotations

import ipaddress
import socket

from realsys.errors import RealsysError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Names other than localhost count as not: the careful side."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def bind_tcp(host: str, port: int = 0) -> socket.socket:
    """A TCP socket bound to ``host``; port 0 is any free one. Not listening yet: what serves it calls ``listen``."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((bare, port))
    except OSError as exc:
        bound.close()
        raise RealsysError(
            f"cannot bind {join_host_port(host, port)}: {exc.strerror or exc}; "
            "is the port taken, or cluster.host not an address of this machine?"
        ) from exc
    return bound


def port_of(bound: socket.socket) -> int:
    port = bound.getsockname()[1]
    assert isinstance(port, int)
    return port


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def advertised_host(host: str) -> str:
    """What to write into the name store for a socket bound to ``host``: a wildcard is an address of nobody."""
    if host.strip("[]") in ("", "0.0.0.0", "::"):
        return socket.gethostname()
    return host


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that were free a moment ago, for programs that must be told one.

    Another process may take one before the program binds it: start it again with new ports if it says so. Whatever can
    bind port 0 itself should.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(bind_tcp(host))
        return [port_of(bound) for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()
