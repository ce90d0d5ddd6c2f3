"""Connects to Unix sockets in folders: one of this machine, and those of its services.

tests: stdio
unguarded: gains
"""

import socket


def gained(outside):
    for path in (outside.unix, "/run/dbus/system_bus_socket", "/run/docker.sock", "/run/systemd/private", "/dev/log"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                with socket.socket(socket.AF_UNIX, kind) as client:
                    client.settimeout(0.2)
                    client.connect(path)
            except OSError:
                continue
            return True
    return False
