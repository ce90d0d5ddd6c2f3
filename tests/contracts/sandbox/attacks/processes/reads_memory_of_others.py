"""Reads and writes the memory of other processes.

tests: stdio
"""

import contextlib
import ctypes
import os


def gained(outside):
    read, write = 310, 311
    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    for pid in outside.others():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "r+b", 0):
            return True
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            begin = int(maps.readline().partition("-")[0] or "0", 16)
            remote = (ctypes.c_void_p * 2)(begin, 8)
            if outside.syscall(read, pid, local, 1, remote, 1, 0) > 0:
                return True
        remote = (ctypes.c_void_p * 2)(id(os), 8)  # a fork has the same addresses
        for number in (read, write):
            if outside.syscall(number, pid, local, 1, remote, 1, 0) > 0:
                return True
    return False
