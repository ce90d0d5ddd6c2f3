"""Looks for descriptors that it should not have: sockets, folders, files of the checker.

tests: stdio
"""

import os
import stat


def gained(outside):
    for number in range(3, 4096):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) or stat.S_ISBLK(mode) or stat.S_ISREG(mode):
            return True
    return False
