"""Leaves files for the next program in every folder that can be written.

tests: stdio
runs: 2
"""

import contextlib
import os


def gained(outside):
    found = False
    home = os.path.expanduser("~")
    folders = ("/tmp", "/dev/shm", "/var/tmp", "/run", "/run/lock", ".", home, "/dev", "/dev/mqueue")
    for folder in folders:
        with contextlib.suppress(OSError):
            found = found or outside.mark in os.listdir(folder)
    for folder in folders:  # after the search: two of them may be the same
        with contextlib.suppress(OSError), open(f"{folder}/{outside.mark}", "w") as file:
            file.write("from the program before")
    return found
