"""Ports for servers that need a fixed one and keep it over a restart."""

import random
import socket
from pathlib import Path

LOWEST, AT_LEAST_TO = 10_000, 30_000


def lasting_ports(count: int) -> list[int]:
    """Return free ports of loopback outside of the kernel's range: they stay free between two starts."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [
        port
        for port in random.SystemRandom().sample(range(LOWEST, max(end, AT_LEAST_TO)), 20 * count)
        if _is_free(port)
    ]
    return found[:count]


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
