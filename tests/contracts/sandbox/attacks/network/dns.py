"""Sends a secret out in a host name to look up.

tests: stdio
"""

import socket


def gained(outside):
    socket.setdefaulttimeout(0.2)
    for name in ("secret.example.com", "pypi.org"):
        try:
            socket.getaddrinfo(name, 80)
        except OSError:
            continue
        return True
    return False
