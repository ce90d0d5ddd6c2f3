"""Leaves files for the next program in every folder that can be written.

tests: stdio
runs: 2
"""

import contextlib
import os


def gained(outside):
    home = os.path.expanduser("~")
    folders = ("/tmp", "/dev/shm", "/var/tmp", "/run", "/run/lock", ".", home, "/dev", "/dev/mqueue")
    found = any(os.path.exists(f"{folder}/{outside.mark}") for folder in folders)
    for folder in folders:
        with contextlib.suppress(OSError), open(f"{folder}/{outside.mark}", "w") as file:
            file.write("from the program before")
    return found
