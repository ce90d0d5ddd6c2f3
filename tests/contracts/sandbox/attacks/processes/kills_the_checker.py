"""Signals the processes of the checker by their numbers outside.

tests: stdio
unguarded: gains
"""

import contextlib
import os


def gained(outside):
    for pid in outside.pids:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            if os.readlink(f"/proc/{pid}/exe") and pid != os.getpid():
                return True
    return False
