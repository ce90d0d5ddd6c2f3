"""Connects by TCP to a server of this machine.

tests: stdio
unguarded: gains
"""

import socket


def gained(outside):
    for address in (outside.address, "127.0.0.1"):
        try:
            socket.create_connection((address, outside.tcp), timeout=0.2).close()
        except OSError:
            continue
        return True
    return False
