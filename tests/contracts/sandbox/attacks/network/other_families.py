"""Opens sockets of families that firewalls forget: VSOCK, ALG, Bluetooth, CAN, TIPC, SMC, XDP.

tests: stdio
"""

import contextlib
import socket


def gained(outside):
    vsock, alg, bluetooth, can, tipc, smc, xdp, key, kcm = 40, 38, 31, 29, 30, 43, 44, 15, 41
    for family in (vsock, alg, bluetooth, can, tipc, smc, xdp, key, kcm):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            with contextlib.suppress(OSError):
                socket.socket(family, kind, 0).close()
                return True
    return False
