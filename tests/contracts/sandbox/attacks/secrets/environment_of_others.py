"""Reads the environment of every process that it can see.

tests: stdio
unguarded: gains
"""

import contextlib


def gained(outside):
    for pid in outside.others():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if outside.environment.encode() in file.read():
                return True
    return False
