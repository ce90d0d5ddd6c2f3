"""Reads its environment, for the secrets of the trial.

tests: stdio
unguarded: gains
"""

import contextlib
import os


def gained(outside):
    if outside.environment in os.environ:
        return True
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        return outside.environment.encode() in file.read()
    return False
