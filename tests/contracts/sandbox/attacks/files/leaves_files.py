"""Leaves files for the next program in every folder that can be written.

tests: stdio
runs: 2
"""

import contextlib
import os


def gained(outside):
    found = False
    home = os.path.expanduser("~")
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/run/lock", ".", home, "/dev", "/dev/mqueue"):
        with contextlib.suppress(OSError):
            found = found or outside.mark in os.listdir(folder)
            with open(f"{folder}/{outside.mark}", "w") as file:
                file.write("from the program before")
    return found
