"""Reads the environment of every process that it can see.

tests: stdio
unguarded: gains
"""

import contextlib
import os


def gained(outside):
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if outside.environment.encode() in file.read():
                return True
    return False
