"""Sends a UDP datagram to a server of this machine, and waits for its answer.

tests: stdio
unguarded: gains
"""

import socket


def gained(outside):
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(0.2)
            client.sendto(b"knock", ("127.0.0.1", outside.udp))
            return bool(client.recv(16))
    except OSError:
        return False
