"""Connects to an abstract Unix socket of this machine.

tests: stdio
unguarded: gains
"""

import socket


def gained(outside):
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(0.2)
            client.connect("\0" + outside.abstract)
    except OSError:
        return False
    return True
