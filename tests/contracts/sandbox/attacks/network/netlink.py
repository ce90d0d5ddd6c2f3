"""Asks the kernel by netlink for the interfaces of the machine.

tests: stdio
"""

import socket
import struct


def gained(outside):
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as client:
            client.settimeout(0.2)
            client.send(struct.pack("IHHIIBxHiII", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))
            return client.recv(65536).count(b"\x00") > 0
    except OSError:
        return False
