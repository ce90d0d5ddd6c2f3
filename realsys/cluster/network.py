"""Sockets and addresses. A worker binds its socket first and registers the address afterwards."""

from __future__ import annotations

import ipaddress
import socket

from realsys.errors import RealsysError


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``.

    Names other than localhost count as reachable from outside, which is the safe assumption.
    """
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def bind_tcp(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket bound to ``host``. Port 0 means any free port. The server that uses it calls ``listen``.

    Raises RealsysError if the address cannot be bound.
    """
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
            "check that the port is free and that cluster.host is an address of this machine"
        ) from exc
    return bound


def port_of(bound: socket.socket) -> int:
    """Return the port of a bound socket."""
    port = bound.getsockname()[1]
    assert isinstance(port, int)
    return port


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def advertised_host(host: str) -> str:
    """Return the host to register for a socket bound to ``host``: the name of this machine for a wildcard address."""
    if host.strip("[]") in ("", "0.0.0.0", "::"):
        return socket.gethostname()
    return host


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that were free a moment ago, for programs that cannot bind port 0 themselves.

    Another process may take a port before the program binds it. Then start the program again with new ports.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(bind_tcp(host))
        return [port_of(bound) for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()
