"""Opens raw sockets and packet sockets, which see the traffic of the machine.

tests: stdio
"""

import contextlib
import socket


def gained(outside):
    for family, kind, protocol in (
        (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
        (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
        (socket.AF_PACKET, socket.SOCK_RAW, 0x0300),
    ):
        with contextlib.suppress(OSError):
            socket.socket(family, kind, protocol).close()
            return True
    return False
