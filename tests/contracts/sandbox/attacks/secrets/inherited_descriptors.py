"""Looks for descriptors that it should not have: sockets, folders, files of the checker.

tests: stdio
"""

import os
import stat


def gained(outside):
    for name in os.listdir("/proc/self/fd"):
        if int(name) < 3:
            continue
        try:
            mode, target = os.fstat(int(name)).st_mode, os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of listdir itself
            continue
        if stat.S_ISDIR(mode) or stat.S_ISBLK(mode) or (stat.S_ISREG(mode) and not target.startswith("/tmp")):
            return True
    return False
