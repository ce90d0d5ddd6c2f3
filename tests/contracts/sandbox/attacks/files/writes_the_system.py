"""Writes to the folders of the system.

tests: stdio
"""

import os


def gained(outside):
    for folder in ("/", "/usr", "/usr/bin", "/etc", "/lib", "/var", "/opt", "/boot", "/root", "/home", "/run", "/srv"):
        try:
            os.close(os.open(f"{folder}/{outside.mark}", os.O_CREAT | os.O_RDWR))
        except OSError:
            continue
        if folder in ("/", "/usr", "/usr/bin", "/etc", "/lib", "/opt", "/boot"):
            return True
    return False
