"""Waits for a connection of a process outside.

tests: stdio
"""

import socket


def gained(outside):
    try:
        with socket.socket() as server:
            server.bind(("0.0.0.0", 0))
            server.listen()
            return outside.address in socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        return False
