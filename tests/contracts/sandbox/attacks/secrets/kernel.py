"""Reads the kernel: its log, its memory, its symbols, its keys.

tests: stdio
"""

import contextlib


def gained(outside):
    syslog, keyctl, read_all, size = 103, 250, 3, 1 << 16
    buffer = bytearray(size)
    import ctypes

    pointer = (ctypes.c_char * size).from_buffer(buffer)
    if outside.syscall(syslog, read_all, pointer, size) > 0:
        return True
    if outside.syscall(keyctl, 0, -3, 0) >= 0:  # the number of the session's keyring
        return True
    with contextlib.suppress(OSError), open("/proc/kcore", "rb") as file:
        file.read(1)
        return True
    with contextlib.suppress(OSError), open("/proc/kallsyms") as file:
        return any(int(line.split()[0], 16) for line, _ in zip(file, range(100), strict=False))
    return False
